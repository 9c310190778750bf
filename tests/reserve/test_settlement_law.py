"""What the windows hold is what was committed, what is open, and what was never settled: in any
order of reserving, extending, committing, releasing and flushing, and of faults of the store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter, Reservation, StoreError
from distwindow.ring.command import Command
from tests.away.stores import NOT_SENT, UNKNOWN, RemoteStore
from tests.clock_and_stores import ManualClock, fresh_key

STEPS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 1), st.integers(1, 9)),
    st.tuples(st.just("extend"), st.integers(0, 9), st.integers(1, 5)),
    st.tuples(st.just("commit"), st.integers(0, 9), st.integers(0, 15), st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("time"), st.sampled_from([1, 50, 199, 200, 201, 400, 1300])),
    st.tuples(st.just("away"), st.booleans()),
    st.tuples(st.just("back")),
    st.tuples(st.just("flush"), st.integers(0, 1)),
)


class FaultyStore(RemoteStore):
    """Executes commands of a flush, too, whose replies it loses."""

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(self.execute(command, deadline))
            except StoreError as exc:
                replies.append(exc)
        return replies


class Oracle:
    """What each bucket has to hold: at least `least` and at most `most`, by its start. They differ
    where an outcome is unknown, as nothing is sent again that might be executed twice.
    """

    def __init__(self, limit: Limit, *, leases: bool) -> None:
        self._width = limit.bucket_ms
        self._lost_lease = limit.amount if leases else 0
        """The most that an exchange with an unknown outcome has charged besides its calls."""
        self.least: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.admitted: Counter[int] = Counter()
        """Without debts, and without what was given back."""
        self.parts: dict[int, list[tuple[int, int, bool]]] = {}
        """Of each open reservation: (bucket, permits, counted)."""
        self._queued: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By limiter: (bucket, permits) that go with its next flush."""

    def add_part(self, owner: int, now_ms: int, permits: int, *, counted: bool) -> None:
        start = now_ms - now_ms % self._width
        self.parts.setdefault(owner, []).append((start, permits, counted))
        if counted:
            self._count(start, permits)
            self.admitted[start] += permits

    def may_have_charged(self, now_ms: int, permits: int) -> None:
        self.most[now_ms - now_ms % self._width] += permits + self._lost_lease

    def settle(self, owner: int, limiter: int, actual: int, now_ms: int) -> None:
        parts = self.parts.pop(owner)
        unused = sum(permits for _, permits, _ in parts) - actual
        if unused < 0:
            self._count(now_ms - now_ms % self._width, -unused)
        for start, permits, counted in reversed(parts):
            given_back = min(permits, max(0, unused))
            unused -= given_back
            if given_back and counted:
                self._count(start, -given_back)
                self.admitted[start] -= given_back
                self._queued[limiter].append((start, given_back))

    def flushed(self, limiter: int, failure: StoreError | None, now_ms: int) -> None:
        """Note that this limiter has sent what it has queued."""
        if failure is UNKNOWN:
            self.may_have_charged(now_ms, 0)
            for start, permits in self._queued[limiter]:
                self.most[start] += permits
        if failure is not NOT_SENT:
            self._queued[limiter].clear()

    def _count(self, start: int, permits: int) -> None:
        self.least[start] += permits
        self.most[start] += permits


class Run:
    """A fleet of two limiters on one store, and the oracle beside it."""

    def __init__(self, store: Any, clock: ManualClock, consistency: Any, bound: Any, policy: Any):
        self.limit = Limit(20, per=1.0, buckets=5, bound=bound)
        self.clock = clock
        self.key = fresh_key()
        self.store = store if isinstance(store, FaultyStore) else None
        options: dict[str, Any] = {}
        if isinstance(store, str) and not store.startswith("memory"):
            options = {"clock": "client", "timeout": 30.0}
        if consistency == "eventual" or policy == "local":
            options["share"] = 1.0
        self.fleet = [
            Limiter(
                store,
                self.limit,
                time=clock,
                consistency=consistency,
                on_store_error=policy,
                **options,
            )
            for _ in range(2)
        ]
        if isinstance(store, str) and store.startswith("memory"):
            self.fleet[1] = self.fleet[0]  # each has a memory of its own
        self.oracle = Oracle(self.limit, leases=consistency == "leased")
        self.reservations: list[tuple[int, Reservation]] = []

    @property
    def failure(self) -> StoreError | None:
        return None if self.store is None else self.store.failure

    def step(self, name: str, *arguments: Any) -> None:
        if name == "time":
            self.clock.move(arguments[0])
        elif name == "away" and self.store is not None:
            self.store.failure = UNKNOWN if arguments[0] else NOT_SENT
        elif name == "back" and self.store is not None:
            self.store.failure = None
        elif name == "flush":
            self._flush(arguments[0])
        elif name == "reserve":
            self._reserve(*arguments)
        elif name in ("extend", "commit", "release") and self.reservations:
            number = arguments[0] % len(self.reservations)
            getattr(self, f"_{name}")(number, *self.reservations[number], *arguments[1:])

    def check(self) -> None:
        """Compare, after everything was sent that can be sent."""
        if self.store is not None:
            self.store.failure = None
        for _ in range(4):
            for number in range(2):
                self._flush(number)
        self.clock.move(self.limit.bucket_ms)  # leases are given back after their bucket
        for _ in range(4):
            for limiter in self.fleet:
                limiter.flush()
        assert [limiter.health().pending for limiter in self.fleet] == [0, 0]
        oldest = self.clock.now_ms() - (self.limit.span - 1) * self.limit.bucket_ms
        oldest -= oldest % self.limit.bucket_ms
        held = {bucket.start: bucket.passed for bucket in self.fleet[0].stats(self.key).buckets}
        for start in {*held, *self.oracle.least}:
            if start >= oldest:
                found = held.get(start, 0)
                assert self.oracle.least[start] <= found <= self.oracle.most[start], (start, found)

    def no_window_was_exceeded(self) -> bool:
        width = self.limit.bucket_ms
        return all(
            sum(self.oracle.admitted[start + n * width] for n in range(self.limit.span))
            <= self.limit.amount
            for start in list(self.oracle.admitted)
        )

    def _flush(self, number: int) -> None:
        try:
            self.fleet[number].flush()
        except StoreError:
            assert self.failure is not None
        self.oracle.flushed(number, self.failure, self.clock.now_ms())

    def _reserve(self, number: int, estimate: int) -> None:
        before = self.clock.now_ms()
        unknown = self.failure is UNKNOWN
        try:
            reservation = self.fleet[number].try_reserve(self.key, estimate)
        except StoreError as exc:
            if exc.charged is None:
                self.oracle.may_have_charged(before, estimate)
            return
        if unknown and reservation.decision.reason == "store_down":
            self.oracle.may_have_charged(before, estimate)
        assert self.clock.now_ms() == before
        if reservation:
            self._add(len(self.reservations), reservation.decision, estimate)
            self.reservations.append((number, reservation))

    def _add(self, owner: int, decision: Any, permits: int) -> None:
        counted = decision.charged is not None
        self.oracle.add_part(owner, self.clock.now_ms(), permits, counted=counted)

    def _extend(self, owner: int, number: int, reservation: Reservation, more: int) -> None:
        if owner not in self.oracle.parts:
            with pytest.raises(RuntimeError, match="cannot be extended"):
                reservation.extend(more)
            return
        unknown = self.failure is UNKNOWN
        try:
            decision = reservation.extend(more)
        except StoreError as exc:
            if exc.charged is None:
                self.oracle.may_have_charged(self.clock.now_ms(), more)
            return
        if unknown and decision.reason == "store_down":
            self.oracle.may_have_charged(self.clock.now_ms(), more)
        if decision:
            self._add(owner, decision, more)

    def _commit(
        self, owner: int, number: int, reservation: Reservation, actual: int, now: bool
    ) -> None:
        if owner not in self.oracle.parts:
            with pytest.raises(RuntimeError, match="before, and is committed with"):
                reservation.commit(actual + 100)
            return
        self.oracle.settle(owner, number, actual, self.clock.now_ms())
        try:
            reservation.commit(actual, now=now)
        except StoreError:
            assert now
            assert self.failure is not None
        reservation.commit(actual)
        if now and self.failure is UNKNOWN:  # it may have been sent, and may be queued
            for start, permits in self.oracle._queued[number]:
                self.oracle.most[start] += permits

    def _release(self, owner: int, number: int, reservation: Reservation) -> None:
        if owner in self.oracle.parts:
            self.oracle.settle(owner, number, 0, self.clock.now_ms())
            assert reservation.release() == reservation.estimate
        assert reservation.state in ("released", "committed")


@given(
    st.lists(STEPS, max_size=60),
    st.sampled_from(["direct", "leased", "eventual"]),
    st.sampled_from(["leap", "strict"]),
    st.sampled_from(["raise", "allow", "deny", "local"]),
    st.booleans(),
)
@settings(max_examples=300)
def test_the_windows_hold_what_was_used_whatever_fails(
    steps: list[Any], consistency: str, bound: str, policy: str, executed: bool
) -> None:
    clock = ManualClock()
    store = FaultyStore(clock)
    store.charges_unknown = executed
    run = Run(store, clock, consistency, bound, policy)
    for step in steps:
        run.step(*step)
    run.check()
    if consistency != "eventual" and policy in ("raise", "deny"):
        assert run.no_window_was_exceeded()


# The clock of a test takes `clock="client"`, which leases do not have.
@pytest.mark.parametrize("name", ["memory://", "fake_url", "redis_url", "cluster_url"])
@pytest.mark.parametrize("consistency", ["direct", "eventual"])
@given(steps=st.lists(STEPS, max_size=40), bound=st.sampled_from(["leap", "strict"]))
@settings(max_examples=20)
def test_the_windows_of_every_store_hold_what_was_used(
    request: pytest.FixtureRequest, name: str, consistency: str, steps: list[Any], bound: str
) -> None:
    store = name if "://" in name else request.getfixturevalue(name)
    run = Run(store, ManualClock(), consistency, bound, "raise")
    try:
        for step in steps:
            run.step(*step)
        run.check()
        if consistency != "eventual":
            assert run.no_window_was_exceeded()
    finally:
        for limiter in run.fleet:
            limiter.close()
