"""What plain calls get beside priority calls, and what priority calls may use (docs/guarantees.md).

`Beside` lets two kinds of callers call one key, and writes every admission into the bucket in which
the call proceeds. Buckets begin and end with a flood: priority calls until one is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.protocol.borrowing import Borrow
from distwindow.protocol.commands import Acquire, charges_of
from distwindow.protocol.decisions import borrow_decision
from distwindow.protocol.keys import ring_name_prefix
from distwindow.store.memory import MemoryStore
from tests.property.test_borrowing import (
    CALLS,
    FORWARD,
    Ledger,
    Run,
    Step,
    histories,
    limits,
    shares,
)
from tests.unit.clock_and_stores import T0, Execute, blocking, fresh_key

pytestmark = pytest.mark.slow

W = 60_000
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.fixture(scope="module", params=["memory", "redis"])
def execute(request: pytest.FixtureRequest) -> Iterator[Execute]:
    if request.param == "memory":
        yield MemoryStore().execute
    else:
        with blocking(request.getfixturevalue("redis_url")) as store:
            yield store


# -- the bound, in any history ---------------------------------------------------------------------


def refusals(execute: Execute, limit: Limit, share: float, coming: list[Step]) -> Counter[str]:
    """Check the bound at each refusal of a plain call. Return in how many windows plain calls had
    their whole share (`share`), or less, because they had asked for less (`asked`).
    """
    run, found = Run(execute, [limit], share), Counter[str]()
    (ledger,) = run.ledgers
    reserves: list[tuple[int, int]] = []
    """The bucket of each admission of a priority call, and the reserve at that moment."""
    for step in coming:
        before = len(run.admitted)
        run.run(step)
        if len(run.admitted) > before:
            if step.kind == "priority":
                moment = run.now + round(run.admitted[-1].wait * 1000)
                reserves.append((ledger.number_at(moment), ledger.reserve_at(ledger.newest)))
        elif step.kind == "plain":
            found += refusal(ledger, reserves, step.cost)
    return found


def refusal(ledger: Ledger, reserves: list[tuple[int, int]], cost: int) -> Counter[str]:
    """Check the refusal of a plain call in the newest bucket."""
    of_plain = ledger.amount - ledger.max_borrowed
    found = Counter[str]()
    for end in range(ledger.newest, ledger.newest + ledger.span):
        if ledger.sum_of(ledger.passed, end) + cost <= ledger.amount:
            continue
        reserve = next((r for n, r in reversed(reserves) if end - ledger.span < n <= end), math.inf)
        plain = ledger.sum_of(ledger.passed, end) - ledger.of_priority(end)
        assert plain > min(of_plain, reserve) - cost
        if ledger.of_priority(end):
            found["share" if reserve >= of_plain > 0 else "asked"] += 1
    return found


def test_plain_calls_are_refused_beside_priority_calls_in_these_histories() -> None:
    """Otherwise the test below would test nothing."""
    found, store = Counter[str](), MemoryStore()
    for seed in range(80):
        random = Random(seed)
        limit = Limit(3 + seed % 6, (1 + seed % 5) * W / 1000, 1 + seed % 5)
        steps = [
            Step(random.choice(CALLS), random.choice(FORWARD), random.choice([1, 1, 2]), W, 0, 0)
            for _ in range(60)
        ]
        found += refusals(store.execute, limit, 0.5, steps)
    assert min(found["share"], found["asked"]) > 50, found


@settings(LENIENT, max_examples=80)
@given(limit=limits, share=shares, coming=histories(FORWARD, CALLS))
def test_a_full_window_holds_what_plain_calls_asked_for_up_to_their_share(
    execute: Execute, limit: Limit, share: float, coming: list[Step]
) -> None:
    refusals(execute, limit, share, coming)


# -- beside a flood --------------------------------------------------------------------------------


class Beside:
    """Priority calls that ask for more than there is, and plain calls beside them."""

    def __init__(self, execute: Execute, limit: Limit, share: float) -> None:
        self.execute, self.limit = execute, limit
        self.max_borrowed = int(limit.amount * share)
        self.of_plain = limit.amount - self.max_borrowed
        key = fresh_key()
        self.charges = charges_of(key, ring_name_prefix("share", key), [limit], 1)
        self.number = T0 // W
        self.plain: Counter[int] = Counter()
        self.priority: Counter[int] = Counter()

    def call(self) -> bool:
        """Make a plain call."""
        reply = self.execute(Acquire(self.charges, self.number * W))
        self.plain[self.number] += reply.admitted
        return bool(reply.admitted)

    def flood(self) -> None:
        """Make priority calls until one is refused."""
        command = Borrow(self.charges, self.number * W, self.limit.span * W, (self.max_borrowed,))
        while (decision := borrow_decision(command, self.execute(command), "store")).allowed:
            self.priority[self.number + round(decision.wait * 1000) // W] += 1

    def held(self, permits: Counter[int]) -> int:
        """Return the permits in the window that ends with the present bucket."""
        return sum(permits[self.number - i] for i in range(self.limit.span))

    def buckets(self, windows: int, *, again: bool = True) -> Iterator[int]:
        """Go on for so many windows, and yield in each bucket the number of the window. The caller
        makes the plain calls of the bucket. With `again` priority calls come after them, too.
        """
        for i in range(windows * self.limit.span):
            self.number += 1
            self.flood()
            yield i // self.limit.span
            if again:
                self.flood()


fleets = st.builds(
    lambda amount, buckets, bound: Limit(amount, buckets * W / 1000, buckets, bound),
    st.integers(4, 40),
    st.integers(1, 8),
    st.sampled_from(["leap", "strict"]),
)
parts = st.sampled_from([0.1, 0.25, 0.5, 0.5, 0.9, 0])
FLOODED = settings(LENIENT, max_examples=40)


@FLOODED
@given(limit=fleets, share=parts)
def test_priority_calls_alone_use_the_whole_limit(
    execute: Execute, limit: Limit, share: float
) -> None:
    beside = Beside(execute, limit, share)
    for _ in beside.buckets(3):
        assert beside.held(beside.priority) == limit.amount


@FLOODED
@given(limit=fleets, share=parts)
def test_plain_callers_who_ask_for_all_have_their_share_after_a_window(
    execute: Execute, limit: Limit, share: float
) -> None:
    beside = Beside(execute, limit, share)
    for _ in beside.buckets(2):
        pass  # priority calls fill the windows before any plain call comes
    for window in beside.buckets(5):
        refused = 0
        while refused < limit.amount:
            refused += not beside.call()
        assert beside.held(beside.plain + beside.priority) <= limit.amount
        if window >= 1:
            assert beside.held(beside.plain) == beside.of_plain


@FLOODED
@given(limit=fleets, share=parts)
def test_refusals_that_the_store_does_not_see_delay_the_share_by_a_few_windows(
    execute: Execute, limit: Limit, share: float
) -> None:
    """Where a process repeats refusals itself, the store may see no more than one in a bucket."""
    beside = Beside(execute, limit, share)
    windows = 2 + math.ceil(math.log2(beside.of_plain + 1))
    for window in beside.buckets(windows + 3):
        while beside.call():
            pass
        if window >= windows:
            assert beside.held(beside.plain) == beside.of_plain


@FLOODED
@given(limit=fleets, share=parts, again=st.booleans(), data=st.data())
def test_plain_callers_who_ask_for_less_than_their_share_are_not_refused(
    execute: Execute, limit: Limit, share: float, again: bool, data: st.DataObject
) -> None:
    """And priority calls use the rest, down to the last permit, if they come after them."""
    beside = Beside(execute, limit, share)
    cycle = data.draw(
        st.lists(st.integers(0, 3), min_size=limit.span, max_size=limit.span).filter(
            lambda calls: 0 < sum(calls) <= beside.of_plain
        )
    )
    for window in beside.buckets(7, again=again):
        admitted = [beside.call() for _ in range(cycle[beside.number % limit.span])]
        if again:
            beside.flood()
        if window >= 2:
            assert all(admitted)
        if window >= 5 and again:
            assert beside.held(beside.plain + beside.priority) == limit.amount


@FLOODED
@given(limit=fleets, share=parts)
def test_what_plain_callers_do_not_ask_for_any_more_is_free_after_three_windows(
    execute: Execute, limit: Limit, share: float
) -> None:
    beside = Beside(execute, limit, share)
    for _ in beside.buckets(3):
        while beside.call():
            pass
    for window in beside.buckets(5):
        if window >= 3:
            assert beside.held(beside.priority) == limit.amount


def test_where_the_whole_limit_may_be_borrowed_plain_callers_get_nothing(execute: Execute) -> None:
    """So the floods of these tests take what they can get."""
    beside = Beside(execute, Limit(20, 5 * W / 1000, 5), 1)
    for _ in beside.buckets(6):
        for _ in range(30):
            beside.call()
        assert beside.held(beside.plain) == 0
