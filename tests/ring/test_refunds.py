"""A refund takes permits out of the bucket in which they were counted: afterwards every ring is as
it was before the admission, whatever steps the store's clock made before, between and after.

The clock is set forward and back. The newest bucket of a ring stays the newest one, so that one
ring may count in a bucket ahead of the clock, and another one in the current bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Lease, Read, Refund, charges_of
from distwindow.ring.decision import Decision
from distwindow.ring.decisions import decision_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import split_reply
from distwindow.ring.stats import RingState
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.flush import flush_due
from distwindow.runtime.operations import refund
from distwindow.runtime.options import Options
from distwindow.runtime.steps import Fetch, Pipeline, run_blocking
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, ManualClock, blocking, fresh_key

W = 60_000
START = T0 // W * W
LIMITS = (
    Limit(1000, per=60, buckets=1),
    Limit(1000, per=120, buckets=2),
    Limit(1000, per=420, buckets=3, bound="strict"),
    Limit(1000, per=300, buckets=5),
    Limit(1000, per=3600, buckets=6),
)
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

limits = st.lists(
    st.sampled_from(LIMITS), min_size=1, max_size=3, unique_by=lambda limit: limit.buckets
)
forward = st.sampled_from([0, 1, 17, W - 1, W, W + 1, 2 * W, 5 * W, 11 * W])
steps = st.one_of(
    forward, st.sampled_from([-1, -17, -W + 1, -W, -W - 1, -2 * W, -5 * W, -11 * W, -200 * W])
)


@pytest.fixture(scope="module")
def in_redis(examples_url: str) -> Iterator[Execute]:
    with blocking(examples_url) as store:
        yield store


class SteppedProcess:
    """A store whose clock is set by hand, and a process whose own clock only goes forward."""

    def __init__(self, execute: Execute, mode: Any, limits: tuple[Limit, ...]) -> None:
        self.clock = ManualClock(START)
        self.step_ms = 0
        self.key = fresh_key()
        self.strategy = mode(CommandCache("refunds", limits), self.clock)
        self.charges = self.strategy._command_cache.acquire_command(self.key).charges
        self.refunds: list[Refund] = []
        self.counted_in: list[int] = []
        """The starts of the buckets in which the last admission or lease was counted."""
        self._execute = execute

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms() + self.step_ms

    def execute(self, command: Any) -> Any:
        if isinstance(command, Pipeline):
            return [self._one(each) for each in command.commands]
        if isinstance(command, Fetch):
            command = command.command
        reply = self._one(command)
        return decision_of(command, reply, "store") if type(command) is Acquire else reply

    def _one(self, command: Command[Any]) -> Any:
        reply = self._execute(command.with_time(self.now_ms))
        if isinstance(command, Refund):
            self.refunds.append(command)
        if (isinstance(command, Acquire) and reply.admitted) or (
            isinstance(command, Lease) and reply.acquire_reply.admitted
        ):
            self.counted_in = [state.start for state in self.states() if state]
        return reply

    def states(self) -> tuple[RingState | None, ...]:
        states: tuple[RingState | None, ...] = self._execute(Read(self.charges, self.now_ms)).states
        return states

    def call(self, cost: int = 1) -> Decision:
        decision: Decision | None = self.strategy.decide_locally(self.key, cost)
        if decision is None:
            decision = run_blocking(
                self.strategy.acquire_remote(self.key, cost), self.execute, self.clock.sleep
            )
        return decision

    def flush(self) -> None:
        run_blocking(flush_due(self.strategy, self.clock.monotonic), self.execute, self.clock.sleep)

    def refund(self, decision: Decision) -> int:
        return run_blocking(
            refund(self.strategy, decision, self.clock), self.execute, self.clock.sleep
        )


def passed_by_bucket(state: RingState | None) -> dict[int, int]:
    return {} if state is None else {b.start: b.passed for b in state.buckets if b.passed}


def check_as_before(
    before: tuple[RingState | None, ...],
    after: tuple[RingState | None, ...],
    limits: tuple[Limit, ...],
    now_ms: int,
) -> None:
    """Compare the buckets in the current window. A ring is lost, and not compared, if the clock was
    set back by more than a window.
    """
    for was, now, limit in zip(before, after, limits, strict=True):
        width, window_ms = limit.bucket_ms, limit.span * limit.bucket_ms
        assert now is not None
        if now.start - now_ms > window_ms or (was is not None and now.start < was.start):
            continue
        oldest = max(now.start, now_ms - now_ms % width) - window_ms
        held, known = (
            {s: n for s, n in passed_by_bucket(one).items() if s > oldest} for one in (now, was)
        )
        assert held == known


def direct(commands: CommandCache, clock: ManualClock) -> Direct:
    return Direct(commands, clock, Options(max_local_keys=1000, flush_interval=0.1))


def leased(commands: CommandCache, clock: ManualClock) -> Leased:
    return Leased(commands, clock, Options(max_local_keys=1000, flush_interval=0.1))


def eventual(commands: CommandCache, clock: ManualClock) -> Eventual:
    return Eventual(commands, clock, Options(max_local_keys=1000))


def check_refunds(execute: Execute, chosen: list[Limit], history: list[Any]) -> None:
    process = SteppedProcess(execute, direct, tuple(chosen))
    for before_ms, between_ms, cost in history:
        process.step_ms = max(process.step_ms + before_ms, -100 * W)
        process.call()  # is not refunded
        process.clock.move(1)
        before = process.states()
        decision = process.call(cost)
        assert decision.allowed
        process.step_ms += between_ms
        process.refund(decision)
        check_as_before(
            before, process.states(), process.strategy._command_cache.limits, process.now_ms
        )
        process.call()


histories = st.lists(st.tuples(steps, steps, st.integers(1, 3)), min_size=1, max_size=12)


@settings(LENIENT, max_examples=150)
@given(chosen=limits, history=histories)
def test_after_a_refund_every_ring_is_as_before(chosen: list[Limit], history: list[Any]) -> None:
    check_refunds(MemoryStore().execute, chosen, history)


@settings(LENIENT, max_examples=50)
@given(chosen=limits, history=histories)
def test_after_a_refund_every_ring_is_as_before_in_redis(
    in_redis: Execute, chosen: list[Limit], history: list[Any]
) -> None:
    check_refunds(in_redis, chosen, history)


@pytest.mark.parametrize("where", ["memory", "redis"])
@settings(LENIENT, max_examples=60)
@given(
    chosen=limits,
    used=st.integers(0, 4),
    times=st.integers(1, 6),
    forward_ms=forward,
    back_ms=forward,
)
def test_each_share_of_a_shared_call_is_refunded_where_it_was_counted(
    in_redis: Execute,
    where: str,
    chosen: list[Limit],
    used: int,
    times: int,
    forward_ms: int,
    back_ms: int,
) -> None:
    """Also if only the first of them were admitted."""
    execute = MemoryStore().execute if where == "memory" else in_redis
    few = [Limit(9, limit.per, limit.buckets, limit.bound) for limit in chosen]
    charges = charges_of("k", ring_name_prefix("refunds", fresh_key()), few, 2)
    now = START + forward_ms
    for _ in range(used):
        execute(Acquire(charges, now))
    now -= back_ms
    execute(Acquire(charges, now))
    before = execute(Read(charges, now)).states
    command = Acquire(charges, now)
    reply = execute(command.combined(times))
    parts = split_reply(reply, times, [2] * len(charges)) if times > 1 else [reply]
    for part in parts:
        decision = decision_of(command, part, "store")
        if decision:
            assert decision.charged
            refunded, _ = execute(Refund(decision.charged, now, decision.now_ms))
            assert refunded == 2
        else:
            assert decision.charged is None
    after = execute(Read(charges, now)).states
    assert [passed_by_bucket(one) for one in after] == [passed_by_bucket(one) for one in before]


@pytest.mark.parametrize("where", ["memory", "redis"])
def test_a_refund_of_a_bucket_that_has_left_the_window_takes_nothing_of_another(
    in_redis: Execute, where: str
) -> None:
    """The slot of such a bucket is that of a later one by then."""
    execute = MemoryStore().execute if where == "memory" else in_redis
    limit = LIMITS[3]
    charges = charges_of("k", ring_name_prefix("refunds", fresh_key()), [limit], 3)
    later = START + limit.span * limit.bucket_ms
    for now in (START, later, later + limit.bucket_ms):
        execute(Acquire(charges, now))
        before = execute(Read(charges, now)).states
        if now > START:
            assert execute(Refund(charges, now, START)).affected == 0
            assert execute(Read(charges, now)).states == before


# -- what is decided in the process ---------------------------------------------------------------


@settings(LENIENT, max_examples=100)
@given(
    chosen=limits,
    history=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, -1, -17, -W, -3 * W, 5, W]), st.integers(1, 40)),
        min_size=1,
        max_size=10,
    ),
)
def test_a_refund_names_the_buckets_of_the_lease(chosen: list[Limit], history: list[Any]) -> None:
    process = SteppedProcess(MemoryStore().execute, leased, tuple(chosen))
    latest = process.now_ms
    for step_ms, calls in history:
        # The clock is set back by less than a window: otherwise a ring is lost, with its leases.
        latest = max(latest, process.now_ms)
        process.step_ms = max(process.step_ms + step_ms, latest - W - process.clock.now_ms())
        for _ in range(calls):
            process.clock.move(1)
            decision = process.call()
            expected = process.counted_in
            if decision:
                process.refunds.clear()
                process.refund(decision)
                assert process.refunds[-1].bucket_starts_ms() == expected, decision
        process.flush()
        process.clock.move(30)
        process.flush()


def test_that_process_is_granted_leases() -> None:
    process = SteppedProcess(MemoryStore().execute, leased, (LIMITS[0], LIMITS[3]))
    sources = set()
    for _ in range(100):
        process.clock.move(1)
        sources.add(process.call().source)
    assert sources == {"store", "lease"}, "otherwise the test above checks no lease"


@pytest.mark.parametrize("where", ["memory", "redis"])
def test_several_rings_lend_nothing_while_one_is_ahead_of_the_clock(
    in_redis: Execute, where: str
) -> None:
    execute = MemoryStore().execute if where == "memory" else in_redis
    for chosen, lent in (((LIMITS[3],), 9), ((LIMITS[3], LIMITS[4]), 0)):
        charges = charges_of("k", ring_name_prefix("refunds", fresh_key()), chosen, 1)
        execute(Acquire(charges, START + 2 * W))
        ahead = tuple(state.start for state in execute(Read(charges, START)).states)
        grant = execute(Lease(charges, START + W, extra=9))
        assert (grant.extra, grant.acquire_reply.bucket_starts_ms) == (lent, ahead)
        later = execute(Lease(charges, START + 2 * W + 1, extra=9))
        assert (later.extra, later.acquire_reply.bucket_starts_ms) == (9, None)


@pytest.mark.parametrize("step_ms", [0, -1, -W, -2 * W, 2 * W])
def test_a_refund_names_the_buckets_that_were_counted_in_here(step_ms: int) -> None:
    """Under `eventual` a process counts by itself, and its buckets do not go back either."""
    process = SteppedProcess(MemoryStore().execute, eventual, (LIMITS[1], LIMITS[3]))
    for _ in range(2):
        process.call()
        process.flush()
        process.clock.move(W)
    process.call()
    process.flush()
    process.step_ms = step_ms
    process.clock.move(200)
    process.call()
    process.flush()  # its reply carries the new time
    before = process.states()
    process.clock.move(200)
    decision = process.call()
    process.flush()
    assert process.states() != before
    assert process.refund(decision) == 1
    process.flush()
    check_as_before(
        before, process.states(), process.strategy._command_cache.limits, process.now_ms
    )
