"""Exceptions of signal handlers, at every single place where CPython may run one.

A scenario is run once for each such place: it is interrupted there, the exception arrives, and
the limiter is used again. Afterwards the store has counted each call that returned once, and beyond
these at most the interrupted one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from distwindow import Decision, Limit, Limiter
from distwindow.core.charge import Charge
from distwindow.protocol.commands import Read
from distwindow.protocol.frames import Command
from distwindow.protocol.replies import LeaseReply
from distwindow.store.memory import MemoryStore
from tests.interruptions import interrupt_at
from tests.unit.clock_and_stores import ManualClock, fresh_key

pytestmark = pytest.mark.slow

LIMITS = "20/minute;60/hour"


class Remote(MemoryStore):
    """A store in memory that is used like a remote one: the strategies work as with Redis, and the
    store itself is not interrupted.
    """

    source = "store"

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.largest_lease = 0
        """The permits of the largest lease."""

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        watch = sys.getprofile()
        sys.setprofile(None)
        reply = super().execute(command)
        sys.setprofile(watch)
        if isinstance(reply, LeaseReply):
            self.largest_lease = max(self.largest_lease, reply.extra + 1)
        return reply


class ScenarioRun:
    """One run of a scenario, here with `memory://`."""

    def __init__(self, store: Any = "memory://", clock: ManualClock | None = None, **how: Any):
        self.clock = clock or ManualClock()
        self.limiter = Limiter(store, LIMITS, time=self.clock, **how)
        self.decisions: list[Decision] = []

    def calls(self, times: int, *keys: Any) -> None:
        for key in keys * times:
            decision = self.limiter.try_acquire(key)
            self.decisions.append(decision)


class RemoteScenarioRun(ScenarioRun):
    """A run whose limiter keeps state of a remote store."""

    def __init__(self, mode: Any, **how: Any) -> None:
        clock = ManualClock()
        self.store = Remote(clock)
        super().__init__(self.store, clock, consistency=mode, **how)
        self.strategy: Any = self.limiter._strategy

    def end(self) -> None:
        """Send all counts, and refund all leases."""
        self.limiter.close()
        assert self.limiter._flush_now(True) is None

    def check(self, interrupted: str | None) -> None:
        for state in self.strategy._key_states.all():
            assert getattr(state, "lease_fetch", None) is None, interrupted
        lost = max(1, self.store.largest_lease) if interrupted else 0
        one = int(bool(interrupted))
        doubt = 0
        for key in {decision.key for decision in self.decisions}:
            own = [decision for decision in self.decisions if decision.key == key]
            passed = sum(decision.allowed for decision in own)
            states, *_ = self.store.execute(Read(self.charges(key)[-1:]))
            held = sum(bucket.passed for bucket in states[0].buckets)
            blocked = sum(bucket.blocked for bucket in states[0].buckets)
            assert passed <= held <= passed + lost, interrupted
            assert len(own) - passed <= blocked <= len(own) - passed + one, interrupted
            doubt += held - passed + blocked - (len(own) - passed)
        # The interrupted exchange may have been the refund of the leases of all keys.
        assert doubt <= (lost if self.store.largest_lease else one) * 2, interrupted

    def charges(self, key: Any) -> tuple[Charge, ...]:
        return self.limiter._command_cache.acquire_command(key).charges


def across_buckets(run: ScenarioRun) -> None:
    """Admissions and refusals of two keys across a change of bucket, with flushes and `stats`."""
    run.calls(3, "a", b"b")
    run.limiter.flush()
    run.clock.move(7_000)
    run.calls(22, "a")
    run.limiter.stats("a")
    run.clock.move(20)
    run.calls(2, "b", "a")
    run.limiter.flush()
    run.clock.move(61_000)  # all of that leaves the shorter window
    run.calls(1, "a", "b")


def evicted(run: ScenarioRun) -> None:
    """More keys than `max_local_keys`."""
    run.calls(2, *"abcdefg")
    run.limiter.flush()
    run.calls(1, *"gfedcba")


def use_again(run: ScenarioRun) -> None:
    """Use the limiter as an application does after the exception has arrived."""
    run.clock.move(300)
    run.limiter.flush()
    run.calls(2, "a", "b")
    run.clock.move(300)


SCENARIOS: Sequence[Any] = (across_buckets, pytest.param(evicted, marks=pytest.mark.slow))


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_call_that_returned_is_counted_once(
    mode: str, scenario: Callable[[ScenarioRun], None]
) -> None:
    how: Any = {"max_local_keys": 2} if scenario is evicted else {}
    places: int = 0
    interrupted: str | None = ""
    while interrupted is not None:
        places += 1
        run = RemoteScenarioRun(mode, **how)
        interrupted = interrupt_at(places, partial(scenario, run), "distwindow.")
        use_again(run)
        run.end()
        run.check(interrupted)
    assert places > 300


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_store_in_this_process_stays_consistent(scenario: Callable[[ScenarioRun], None]) -> None:
    """`memory://`: what was counted expires, whatever was interrupted."""
    places: int = 0
    interrupted: str | None = ""
    while interrupted is not None:
        places += 1
        run = ScenarioRun()
        interrupted = interrupt_at(places, partial(scenario, run), "distwindow.")
        clock, limiter, decisions = run.clock, run.limiter, run.decisions
        for key in "ab":
            own = sum(decision.allowed for decision in decisions if decision.key == key)
            state = limiter._store.execute(
                Read(limiter._command_cache.acquire_command(key).charges[-1:])
            ).states[0]
            held = 0 if state is None else sum(bucket.passed for bucket in state.buckets)
            assert own <= held <= own + bool(interrupted), interrupted
        # Until all that was counted in the scenario has left the shorter window.
        for _ in range(22):
            clock.move(6_000)
            limiter.try_acquire("a")
        assert limiter.peek("a").remaining == 10, interrupted
        clock.move(3_600_000 + 360_000)
        for key in "ab":
            assert limiter.peek(key).remaining == 20
            assert limiter.stats(key).passed == 0
    assert places > 300


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_on_a_real_server(redis_url: str, prefix: str, mode: Any) -> None:
    """The same through a connection: the next call gets its own reply."""
    limit = Limit("1000000/day")
    places: int = 0
    interrupted: str | None = ""
    while interrupted is not None:
        places += 1
        key = fresh_key()
        returned = 0
        with Limiter(redis_url, limit, prefix=prefix, consistency=mode, timeout=5) as limiter:
            limiter.try_acquire(f"{key}-other")

            def scenario(limiter: Limiter = limiter, key: str = key) -> None:
                nonlocal returned
                for _ in range(2):
                    assert limiter.try_acquire(key)
                    returned += 1
                limiter.flush()

            interrupted = interrupt_at(places, scenario, "distwindow.")
            assert limiter.try_acquire(f"{key}-other").key == f"{key}-other"
            assert limiter.try_acquire(key).key == key
            returned += 1
        with Limiter(redis_url, limit, prefix=prefix, timeout=5) as other:
            # A lease that was being fetched is lost with the connection.
            most = 40 if mode == "leased" else 1
            passed = other.stats(key).passed
            assert returned <= passed <= returned + most * bool(interrupted), interrupted
    assert places > 100
