"""Borrowing, compared with a ledger that is simple enough to be checked by reading: it writes every
admission into the bucket in which the call proceeds, and looks at every window anew.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Decision, Limit
from distwindow.borrow.commands import Borrow, borrow_decision
from distwindow.ring.commands import Acquire, Lease, Peek, Read, Refund, charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.decisions import decision_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.stats import window_at
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, fresh_key

W = 60_000
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Ledger:
    """The admissions of one limit, by the number of their bucket."""

    def __init__(self, limit: Limit, max_borrowed: int) -> None:
        self.span, self.bucket_ms = limit.span, limit.bucket_ms
        self.amount, self.max_borrowed = limit.amount, max_borrowed
        self.newest = 0
        self.passed: dict[int, int] = {}
        self.borrowed: dict[int, int] = {}

    def open(self, now: int) -> None:
        """Open the bucket of `now`. After the clock was set back by more than a window, all is
        forgotten.
        """
        if self.is_forgotten(now):
            self.passed, self.borrowed, self.newest = {}, {}, 0
        self.newest = max(self.newest, now // self.bucket_ms)

    def is_forgotten(self, now: int) -> bool:
        return self.newest * self.bucket_ms - now > self.span * self.bucket_ms

    @property
    def last(self) -> int:
        return max([self.newest, *[number for number, n in self.passed.items() if n]])

    def sum_of(self, permits: dict[int, int], end: int) -> int:
        return sum(permits.get(number, 0) for number in range(end - self.span + 1, end + 1))

    def number_at(self, moment: int) -> int:
        return max(self.newest, moment // self.bucket_ms)

    def has_room(self, number: int, cost: int, windows: range) -> bool:
        return all(
            self.sum_of(self.passed, end) + cost <= self.amount
            for end in windows
            if end - self.span < number <= end
        )

    def can_count(self, moment: int, cost: int) -> bool:
        """True if a call that proceeds at `moment` can be counted in its bucket."""
        number = self.number_at(moment)
        if number == self.newest:
            return self.has_room(number, cost, range(self.newest, self.last + 1))
        every = range(number, number + self.span)
        return (
            number >= self.last
            and self.has_room(number, cost, every)
            and all(self.sum_of(self.borrowed, end) + cost <= self.max_borrowed for end in every)
        )

    def count(self, moment: int, cost: int) -> None:
        number = self.number_at(moment)
        self.passed[number] = self.passed.get(number, 0) + cost
        if number > self.newest:
            self.borrowed[number] = self.borrowed.get(number, 0) + cost

    def give_back(self, number: int, cost: int, *, borrowed: bool) -> int:
        """Take a refunded call out of its bucket, as far as it is known."""
        if number <= self.newest - self.span or (number > self.newest and not borrowed):
            return 0
        taken = min(cost, self.passed.get(number, 0))
        self.passed[number] = self.passed.get(number, 0) - taken
        left = self.borrowed.get(number, 0) - (taken if borrowed else 0)
        self.borrowed[number] = max(0, min(left, self.passed[number]))
        return taken


class Step(NamedTuple):
    kind: str
    later: int
    cost: int
    max_wait: int
    amount_change: int
    which: int
    """Which of the admissions so far a refund gives back."""


FORWARD = [0] * 10 + [1, W // 3, W - 1, W, W, W + 1, 2 * W] * 2 + [5 * W, 25 * W]
ANY = [*FORWARD, -1, -W, -3 * W, -200 * W]
CALLS = ["plain"] * 4 + ["priority"] * 6
ALL = [*CALLS, "lease", "refund", "refund", "look"]
WAITS = [0, W // 2, W, *[30 * W] * 4]


def history(seed: int, later: list[int], kinds: list[str], changes: list[int]) -> list[Step]:
    """Return a history in which windows are full most of the time."""
    random = Random(seed)
    return [
        Step(
            random.choice(kinds),
            random.choice(later),
            random.choice([1, 1, 1, 2, 3]),
            random.choice(WAITS),
            random.choice(changes),
            random.randrange(50),
        )
        for _ in range(random.randrange(10, 60))
    ]


def histories(
    later: list[int], kinds: list[str], changes: list[int] | None = None
) -> st.SearchStrategy[list[Step]]:
    """Draw a seed, because lists of steps that hypothesis draws rarely fill a window. Then drop
    steps, so that a history that fails is reduced to a short one.
    """

    def drop(seed: int, dropped: set[int]) -> list[Step]:
        steps = history(seed, later, kinds, changes or [0])
        return [step for i, step in enumerate(steps) if i not in dropped] or steps[:1]

    return st.builds(drop, st.integers(0, 2**32), st.sets(st.integers(0, 60), max_size=60))


limits = st.builds(
    lambda amount, buckets, bound: Limit(amount, buckets * W / 1000, buckets, bound),
    st.integers(3, 9),
    st.integers(1, 6),
    st.sampled_from(["leap", "strict"]),
)
several = st.lists(limits, min_size=1, max_size=3, unique_by=lambda limit: limit.span)
shares = st.sampled_from([0.25, 0.5, 0.5, 1, 1, 0])


class Run:
    """One history, executed by a store and by a ledger for each limit; they must agree."""

    def __init__(self, execute: Execute, limits: list[Limit], share: float) -> None:
        self.execute, self.limits = execute, limits
        self.key = fresh_key()
        self.now = T0
        self.share = share
        self.ledgers = [Ledger(limit, int(limit.amount * share)) for limit in limits]
        self.admitted: list[Decision] = []

    def charges(self, cost: int) -> tuple[Charge, ...]:
        changed = [
            Limit(ledger.amount, limit.per, limit.buckets, limit.bound)
            for limit, ledger in zip(self.limits, self.ledgers, strict=True)
        ]
        return charges_of(self.key, ring_name_prefix("borrow", self.key), changed, cost)

    def run(self, step: Step) -> None:
        self.now = max(0, self.now + step.later)
        for limit, ledger in zip(self.limits, self.ledgers, strict=True):
            ledger.amount = max(3, limit.amount + step.amount_change)
            ledger.max_borrowed = int(ledger.amount * self.share)
        if step.kind == "refund":
            self.refund(step)
        elif step.kind == "look":
            self.execute(Peek(self.charges(1), self.now))
            self.execute(Read(self.charges(1), self.now))
        else:
            self.call(step)
        self.compare_windows()

    def call(self, step: Step) -> None:
        for ledger in self.ledgers:
            ledger.open(self.now)
        decision = self.decision(step)
        moment = self.expected_moment(step)
        assert decision.allowed == (moment is not None)
        if moment is None:
            assert decision.retry_after > 0
            return
        assert decision.wait == (moment - self.now) / 1000
        assert decision.reason == ("borrowed" if moment > self.now else "ok")
        for ledger in self.ledgers:
            ledger.count(moment, step.cost)
        self.admitted.append(decision)

    def decision(self, step: Step) -> Decision:
        charges = self.charges(step.cost)
        if step.kind == "lease":
            lease = Lease(charges, self.now)
            reply = self.execute(lease).acquire_reply
            return decision_of(Acquire(charges), reply, "store")
        if step.kind == "plain":
            return decision_of(Acquire(charges), self.execute(Acquire(charges, self.now)), "store")
        most = tuple(ledger.max_borrowed for ledger in self.ledgers)
        command = Borrow(charges, self.now, max_wait_ms=step.max_wait, max_borrowed=most)
        return borrow_decision(command, self.execute(command), "store")

    def expected_moment(self, step: Step) -> int | None:
        """Return the first moment within the wait at which every ledger can count the call."""
        moments = [self.now]
        if step.kind == "priority":
            width = min(ledger.bucket_ms for ledger in self.ledgers)
            window = min(ledger.span * ledger.bucket_ms for ledger in self.ledgers)
            end = self.now + min(step.max_wait, window)
            first = self.now - self.now % width + width
            moments += range(first, end + 1, width)
        for moment in moments:
            if all(ledger.can_count(moment, step.cost) for ledger in self.ledgers):
                return moment
        return None

    def refund(self, step: Step) -> None:
        if not self.admitted:
            return
        decision = self.admitted.pop(step.which % len(self.admitted))
        assert decision.charged is not None
        command = Refund(decision.charged, self.now, decision.now_ms)
        expected = []
        for ledger, start, flag in zip(
            self.ledgers, command.bucket_starts_ms(), command.borrowed_flags(), strict=True
        ):
            expired = self.now // ledger.bucket_ms - ledger.last >= ledger.span
            if expired or ledger.is_forgotten(self.now):  # then a refund opens no bucket
                expected.append(0)
                continue
            ledger.open(self.now)
            expected.append(
                ledger.give_back(start // ledger.bucket_ms, decision.cost, borrowed=flag)
            )
        assert self.execute(command).affected == max(expected)

    def compare_windows(self) -> None:
        """Whoever reads the rings, now or later, finds what the ledgers have, even if nobody calls
        until then.
        """
        states, *_ = self.execute(Read(self.charges(1), self.now))
        for state, ledger, charge in zip(states, self.ledgers, self.charges(1), strict=True):
            for later in (0, W, 3 * W, 9 * W):
                at = self.now + later
                if ledger.is_forgotten(at):
                    continue
                newest = max(ledger.newest, at // W)
                window = window_at(state, charge.limit, at)
                live = range(newest - ledger.span + 1, newest + 1)
                assert {b.start // W: b.passed for b in window.buckets if b.passed} == {
                    n: ledger.passed[n] for n in live if ledger.passed.get(n)
                }
                assert window.borrowed_coming == sum(
                    n for number, n in ledger.borrowed.items() if number > newest
                )
                assert window.borrowed == window.borrowed_coming + ledger.sum_of(
                    ledger.borrowed, newest
                )


@pytest.mark.slow
def test_histories_borrow_a_lot() -> None:
    """Otherwise the tests below would test nothing."""
    found: Counter[str] = Counter()
    for seed in range(40):
        amount, buckets = 3 + seed % 6, 1 + seed % 6
        run = Run(MemoryStore().execute, [Limit(amount, buckets * W / 1000, buckets)], 0.5)
        for step in history(seed, FORWARD, CALLS, [0]):
            before = len(run.admitted)
            run.run(step)
            (ledger,) = run.ledgers
            found["borrowed_coming"] += ledger.last > ledger.newest
            refused = len(run.admitted) == before
            found["refused" if refused else run.admitted[-1].reason] += 1
    assert min(found["borrowed"], found["ok"], found["refused"], found["borrowed_coming"]) > 100, (
        found
    )


@settings(LENIENT, max_examples=80)
@given(
    limits=several,
    share=shares,
    coming=histories(ANY, ALL),
)
def test_priority_calls_proceed_exactly_when_the_ledger_says(
    execute: Execute, limits: list[Limit], share: float, coming: list[Step]
) -> None:
    run = Run(execute, limits, share)
    for step in coming:
        run.run(step)


@settings(LENIENT, max_examples=40)
@given(limits=several, share=shares, coming=histories(ANY, ALL, [0, 0, 0, -3, -1, 2]))
def test_it_stays_so_when_the_limit_is_changed(
    execute: Execute, limits: list[Limit], share: float, coming: list[Step]
) -> None:
    run = Run(execute, limits, share)
    for step in coming:
        run.run(step)


@settings(LENIENT, max_examples=60)
@given(limits=several, share=shares, coming=histories(FORWARD, CALLS))
def test_no_window_holds_more_than_the_limit_nor_more_than_its_share_of_borrowed_permits(
    execute: Execute, limits: list[Limit], share: float, coming: list[Step]
) -> None:
    run = Run(execute, limits, share)
    for step in coming:
        run.run(step)
    for ledger in run.ledgers:
        for end in {n + i for n in ledger.passed for i in range(ledger.span)}:
            assert ledger.sum_of(ledger.passed, end) <= ledger.amount
            assert ledger.sum_of(ledger.borrowed, end) <= ledger.max_borrowed


@settings(LENIENT, max_examples=60)
@given(limit=limits, share=shares, coming=histories(FORWARD, CALLS))
def test_a_plain_call_is_refused_only_where_the_part_that_is_not_borrowed_is_taken(
    execute: Execute, limit: Limit, share: float, coming: list[Step]
) -> None:
    run = Run(execute, [limit], share)
    (ledger,) = run.ledgers
    for step in coming:
        before = len(run.admitted)
        run.run(step)
        if step.kind == "plain" and len(run.admitted) == before:
            held = ledger.sum_of(ledger.passed, ledger.newest)
            not_borrowed = held - ledger.sum_of(ledger.borrowed, ledger.newest)
            assert not_borrowed + step.cost > ledger.amount - ledger.max_borrowed


@settings(LENIENT, max_examples=60)
@given(limit=limits, share=shares, coming=histories(FORWARD, CALLS))
def test_retry_after_is_exact(
    execute: Execute, limit: Limit, share: float, coming: list[Step]
) -> None:
    """The same call, made again, is admitted at that moment, and not yet 1 ms before."""

    def refusal_after(history: list[Step]) -> Decision | None:
        run = Run(execute, [limit], share)
        for step in history[:-1]:
            run.run(step)
        run.now += history[-1].later
        decision = run.decision(history[-1])
        return None if decision.allowed else decision

    refused = refusal_after(coming)
    if refused is not None:
        retry_ms = round(refused.retry_after * 1000)
        last = coming[-1]
        assert refusal_after([*coming, last._replace(later=retry_ms)]) is None
        assert refusal_after([*coming, last._replace(later=retry_ms - 1)]) is not None
