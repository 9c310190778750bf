"""`on_store_error="local"`: what a fleet admits without its store, and tells it afterwards."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter, StoreError
from distwindow.away.outages import RETRY_AFTER_S
from distwindow.ring.clock import NEVER
from distwindow.runtime.flush import KEYS_AT_ONCE
from tests.away.sharing_process import UNASKED, WAYS
from tests.away.stores import NOT_SENT, UNKNOWN, RemoteStore, limiter_on
from tests.clock_and_stores import ManualClock
from tests.servers import Standalone

ROOT = Path(__file__).parents[2]

STEPS = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("time"), st.integers(1, 400)),
    st.tuples(st.just("away"), st.booleans()),
    st.tuples(st.just("back")),
    st.tuples(st.just("flush"), st.integers(0, 2)),
)


@given(
    st.lists(STEPS, max_size=80),
    st.sampled_from(["direct", "leased"]),
    st.sampled_from(["leap", "strict"]),
    st.sampled_from([0.2, 1 / 3, 0.5, 1.0]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_window_exceeds_the_limit_and_the_shares(
    steps: list[Any], consistency: str, bound: Any, share: float, executed: bool
) -> None:
    """In any window that begins with a bucket the fleet admits at most L + the sum of the shares;
    what one process admits without the store is at most its share. What is charged in the end lies
    between what was admitted and is still in a window, and that plus the unknown.
    """
    clock = ManualClock()
    limit = Limit(12, per=1.0, buckets=5, bound=bound)
    store = RemoteStore(clock)
    store.charges_unknown = executed
    fleet = [
        limiter_on(
            store, limit, consistency, on_store_error="local", share=share, name=f"p{i}",
            borrow_share=0,
        )
        for i in range(3)
    ]  # fmt: skip
    admitted: list[tuple[int, int, int | None]] = []
    maybe_charged: list[tuple[int, int]] = []
    for step in steps:
        if step[0] == "call":
            if store.failure is UNKNOWN and executed:
                maybe_charged.append((clock.now_ms(), step[2]))
            decision = fleet[step[1]].try_acquire("k", step[2])
            if decision.allowed:
                local = step[1] if decision.reason == "store_down" else None
                admitted.append((clock.now_ms(), step[2], local))
        elif step[0] == "time":
            clock.move(step[1])
        elif step[0] == "away":
            store.failure = UNKNOWN if step[1] else NOT_SENT
        elif step[0] == "back":
            store.failure = None
        else:
            try:
                fleet[step[1]].flush()
            except StoreError:
                assert store.failure is not None
    own = max(1, math.floor(limit.amount * share + 1e-9))
    shares = [admitted_by for _, _, admitted_by in admitted if admitted_by is not None]
    width = limit.buckets * limit.bucket_ms
    for begins in {at - at % limit.bucket_ms for at, _, _ in admitted}:
        window = [one for one in admitted if begins <= one[0] < begins + width]
        assert sum(cost for _, cost, _ in window) <= limit.amount + own * len(set(shares))
        for process in set(shares):
            assert sum(cost for _, cost, by in window if by == process) <= own
    if consistency == "direct":  # leases are charged before they are spent
        store.failure = None
        for limiter in fleet:
            while limiter.health().pending:  # what was sent before is sent again, then the rest
                limiter.flush()
        buckets = fleet[0].stats("k").buckets
        oldest = clock.now_ms() - clock.now_ms() % limit.bucket_ms - width + limit.bucket_ms
        charged = sum(bucket.passed for bucket in buckets if bucket.start >= oldest)
        live = sum(cost for at, cost, _ in admitted if at >= oldest)
        unknown = sum(cost for at, cost in maybe_charged if at >= oldest)
        assert live <= charged <= live + unknown


def test_the_windows_begin_with_what_all_had_passed() -> None:
    """8 of 10 have passed, 5 of them by others. Each process has a share of 5: it admits 2 more."""
    store = RemoteStore(ManualClock())
    ours, others = (limiter_on(store, on_store_error="local", share=0.5) for _ in range(2))
    assert others.try_acquire("k", 5)
    assert ours.try_acquire("k", 3)
    store.failure = NOT_SENT
    assert [bool(ours.try_acquire("k")) for _ in range(4)] == [True, True, False, False]
    # The other one knows of 5, and so admits its share.
    assert [bool(others.try_acquire("k")) for _ in range(6)] == [True] * 5 + [False]


@pytest.mark.parametrize("step_ms", [-120_000, -1000, 1000, 120_000])
def test_they_begin_with_that_also_where_the_clock_of_the_store_was_set(step_ms: int) -> None:
    """The windows are there from an earlier outage, and in the time that the store had then."""
    clock = ManualClock()
    store = RemoteStore(clock)
    ours, others = (limiter_on(store, on_store_error="local", share=0.9) for _ in range(2))
    store.failure = NOT_SENT
    assert ours.peek("k")
    store.failure = None
    clock._start_ms += step_ms
    assert others.try_acquire("k", 7)
    assert ours.try_acquire("k")
    store.failure = NOT_SENT
    assert sum(bool(ours.try_acquire("k")) for _ in range(9)) == 2


def test_what_was_admitted_meanwhile_is_told_when_the_store_is_back() -> None:
    clock = ManualClock()
    store = RemoteStore(clock)
    limiter = limiter_on(store, "10/minute", on_store_error="local", share=0.5)
    assert limiter.try_acquire("k", 2)
    store.failure = NOT_SENT
    decision = limiter.try_acquire("k", 4)
    assert decision.allowed
    clock.move(70_000)  # the first ones have left the window
    assert limiter.try_acquire("k", 3)
    store.failure = None
    limiter.flush()
    assert limiter.stats("k").passed == 3
    assert limiter.peek("k").remaining == 7


def test_a_permit_of_the_share_can_be_given_back() -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error="local", share=0.5)
    store.failure = NOT_SENT
    decision = limiter.try_acquire("k", 4)
    store.failure = None
    assert limiter.refund(decision) == 4
    assert limiter.stats("k").passed == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_processes_divide_a_limit_whichever_way_they_call(kind: str) -> None:
    """Also a limit, and a limiter, that is called for the first time while the store is away."""
    processes = 2
    command = [sys.executable, "-m", "tests.away.sharing_process"]
    with Standalone() as server, ExitStack() as stack:
        fleet = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, server.url, kind, str(processes)],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for _ in range(processes)
        ]  # fmt: skip
        assert [str(process.stdout and process.stdout.readline()) for process in fleet] == [
            "ready\n"
        ] * processes
        server.kill()
        admitted: Counter[str] = Counter()
        for process in fleet:
            admitted.update(json.loads(process.communicate("\n", timeout=60)[0]))
    assert dict(admitted) == dict.fromkeys((*WAYS, *UNASKED), 100)


def test_these_are_all_ways_to_call() -> None:
    returned = {"Decision", "Reservation", "Entry"}
    admit = {
        name
        for name, method in inspect.getmembers(Limiter, inspect.isfunction)
        if inspect.signature(method).return_annotation in returned and name[0] != "_"
    }
    assert {way.partition("+")[0] for way in WAYS} == admit - {"peek"} | {"limit"}


def test_the_share_follows_how_many_processes_there_are() -> None:
    """Each is told when it renews its slot: here, when it flushes."""
    clock = ManualClock()
    values: dict[bytes, Any] = {}
    stores = [RemoteStore(clock, values) for _ in range(3)]
    fleet = [limiter_on(store, "12/minute", on_store_error="local") for store in stores]
    for number, limiter in enumerate(fleet):  # as if they were of three processes
        counted: Any = limiter.decider.policy.local
        counted._processes._holder += b"%d" % number

    def renew(processes: list[Limiter]) -> None:
        for limiter in processes:
            limiter.try_acquire("other")
            limiter.flush()

    def shares(processes: list[Limiter]) -> list[int]:
        clock.move(60_000)
        for store in stores:
            store.failure = NOT_SENT
        admitted = [sum(bool(p.try_acquire("k")) for _ in range(12)) for p in processes]
        for store in stores:
            store.failure = None
        return admitted

    renew(fleet)
    clock.move(5000)
    renew(fleet)
    assert shares(fleet) == [4, 4, 4]
    second = limiter_on(stores[0], "24/minute", on_store_error="local")
    assert shares([second]) == [8], "a limiter of the same store and prefix knows of the others"
    fleet[0].close()
    clock.move(70_000)  # longer than the slots last: the first one that renews is told 1
    renew([second])
    assert shares([second]) == [8]
    for _ in range(5):  # the third one has gone
        clock.move(5000)
        renew([second, fleet[1]])
    assert shares([second, fleet[1]]) == [12, 6]


def test_a_limiter_that_is_not_called_has_no_slot_to_renew() -> None:
    """The worker would keep all that ever were called, for as long as one of them is."""
    clock = ManualClock()
    store = RemoteStore(clock)
    idle, used = (limiter_on(store, on_store_error="local") for _ in range(2))
    idle.try_acquire("k")
    for _ in range(3):
        used.try_acquire("k")
        used.flush()
        idle.flush()
        clock.move(5000)
    assert idle.decider.policy.flush_source.next_due_at == NEVER


def test_a_process_that_has_failed_to_announce_itself_tries_again() -> None:
    clock = ManualClock()
    values: dict[bytes, Any] = {}
    store = RemoteStore(clock, values)
    limiter = limiter_on(store, on_store_error="local")
    store.failure = NOT_SENT
    limiter.decider.policy.announce()
    for _ in range(3):
        with pytest.raises(StoreError):
            limiter.flush()
        clock.move(5000)
    store.failure = None
    limiter.flush()
    assert any(b"(processes)" in name for name in values)


def test_a_call_above_the_share_is_refused_and_not_an_error() -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error="local", share=0.3)
    store.failure = NOT_SENT
    assert limiter.try_acquire("k", 3)
    decision = limiter.try_acquire("other", 4)
    assert (decision.allowed, decision.source) == (False, "local")
    assert decision.retry_after == RETRY_AFTER_S  # no time brings room, only the store does


@pytest.mark.parametrize("consistency", ["direct", "eventual"])
def test_a_call_over_several_keys_is_counted_wholly_or_not_at_all(consistency: str) -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, consistency=consistency, on_store_error="local", share=0.5)
    store.failure = NOT_SENT
    both = [("a", "10/minute", 1), ("b", "4/minute", 1)]  # shares of 5 and 2
    assert [bool(limiter.try_acquire_all(both)) for _ in range(3)] == [True, True, False]
    store.failure = None
    limiter.flush()
    assert limiter.stats("a").passed == 2


def test_a_share_needs_something_that_it_caps() -> None:
    with Limiter("memory://", "5/s", on_store_error="local", share=0.2) as limiter:
        assert limiter.try_acquire("k")


def test_a_flush_without_an_answer_ends_after_a_few_keys() -> None:
    """Else each flush of an outage would hold up the event loop for as long as the commands of all
    keys take that were called meanwhile.
    """
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, "100/hour", on_store_error="local", share=0.5)
    assert limiter.try_acquire("first")
    store.failure = NOT_SENT
    for number in range(1000):
        assert limiter.try_acquire(f"k{number}")
    with pytest.raises(StoreError):
        limiter.flush()
    assert store.exchanges == [KEYS_AT_ONCE]
    store.failure = None
    limiter.flush()
    assert max(store.exchanges) == KEYS_AT_ONCE
    assert {limiter.stats(f"k{number}").passed for number in range(1000)} == {1}
    assert limiter.health().pending == 0
