"""Exceptions of signal handlers, at places all over the code where CPython may run one.

A story is played once for each of these places, and is interrupted there. Four laws hold: nothing
hangs, the exception arrives unchanged, nothing is admitted beyond a limit, and at most what the
interrupted call has taken or counted is lost: slots and probes come back by their ttl.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import pytest

from distwindow import (
    Blocked,
    CircuitBreaker,
    Concurrency,
    Decision,
    DegradeRule,
    ErrorRatio,
    FlowRule,
    Guard,
    Limiter,
    SystemRule,
)
from distwindow.concurrency.commands import HoldReply
from distwindow.concurrency.held import HeldSlots
from distwindow.guard.system import SystemSlot
from distwindow.lifecycle import connect
from distwindow.ring.command import Command
from distwindow.ring.commands import Read
from distwindow.ring.replies import LeaseReply
from distwindow.runtime.command_cache import CommandCache
from distwindow.sentinel.rules import Rule
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock
from tests.interruptions import Interruption, interrupt_at
from tests.observer.told import Told

LIMITS = "20/minute;60/hour"


class Uninterrupted(MemoryStore):
    """A store that executes each command whole, as a server does."""

    largest_lease = 0
    """The permits of the largest lease."""

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        watch = sys.getprofile()
        sys.setprofile(None)
        reply = super().execute(command)
        sys.setprofile(watch)
        if isinstance(reply, LeaseReply):
            self.largest_lease = max(self.largest_lease, reply.extra + 1)
        return reply


class Remote(Uninterrupted):
    """One for which this process keeps state, as for a server."""

    decided_by = "store"


class Story(Protocol):
    """What is interrupted."""

    def play(self) -> None:
        """Use the library, with a clock that the story moves."""

    def check(self, place: str | None) -> None:
        """Check the laws, after an interruption at `place`; None: it was not interrupted."""


def play_interrupted(story: type[Any], *arguments: Any, every: int, least: int) -> None:
    """Play a story to its end, and interrupt it at the `every`th place, the twice `every`th, and so
    on; there are `least` such places.
    """
    number = 0
    place: str | None = ""
    while place is not None:
        number += 1
        told: Story = story(*arguments)
        place = interrupt_at(number * every, told.play, "distwindow.")
        told.check(place)
    assert number > least


class Calls:
    """Admissions and refusals of two keys across a change of bucket, with flushes, `stats`, and a
    call that waits.
    """

    def __init__(self, mode: Any) -> None:
        self.clock = ManualClock()
        self.store = Remote(self.clock)
        self.mode = mode
        self.limiter = Limiter(self.store, LIMITS, time=self.clock, consistency=mode)
        self.decisions: list[Decision] = []

    def play(self) -> None:
        self.call(3, "a", b"b")
        self.limiter.flush()
        self.clock.move(7_000)
        self.call(22, "a")
        self.limiter.stats("a")
        self.clock.move(20)
        self.call(2, "b", "a")
        self.limiter.flush()
        self.decisions.append(self.limiter.acquire("a"))
        self.clock.move(61_000)  # all of that leaves the shorter window
        self.call(1, "a", "b")

    def call(self, times: int, *keys: Any) -> None:
        for key in keys * times:
            self.decisions.append(self.limiter.try_acquire(key))

    def check(self, place: str | None) -> None:
        # The application goes on, and in the end all counts are sent, and all leases given back.
        self.clock.move(300)
        self.limiter.flush()
        self.call(2, "a", "b")
        assert self.limiter.decider.queues.by_name == {}, place
        self.clock.move(300)
        self.limiter.close()
        assert self.limiter._flush_now(True) is None
        one = int(place is not None)
        taken = max(one, self.store.largest_lease) if place is not None else 0
        commands = CommandCache(self.limiter.prefix, self.limiter.limits)
        for key in ("a", "b"):
            own = [decision for decision in self.decisions if decision.key in (key, key.encode())]
            passed = sum(decision.allowed for decision in own)
            charges = commands.acquire_command(key).charges
            states, *_ = self.store.execute(Read(charges[-1:]))
            buckets = () if states[0] is None else states[0].buckets
            held = sum(bucket.passed for bucket in buckets)
            # Only `eventual` counts after it has admitted.
            uncounted = one if self.mode == "eventual" else 0
            assert passed - uncounted <= held <= passed + taken, place
            blocked = sum(bucket.blocked for bucket in buckets)
            # A call that waits is refused before it is admitted.
            waited = sum(decision.source != "deny_cache" for decision in own)
            assert len(own) - passed - one <= blocked <= len(own) - passed + one + waited, place


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_calls(mode: str) -> None:
    play_interrupted(Calls, mode, every=17, least=20)


class CallsInMemory:
    """The same with `memory://`, where the store is interrupted, too."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.limiter = Limiter("memory://", "20/minute;900/hour", time=self.clock)
        self.admitted = 0

    def play(self) -> None:
        for ms in (7_000, 20, 61_000, 300):
            for key in "ab" * 7:
                self.admitted += self.limiter.try_acquire(key).allowed
            self.limiter.stats("a")
            self.clock.move(ms)

    def check(self, place: str | None) -> None:
        passed = sum(self.limiter.stats(key).windows[-1].passed for key in "ab")
        assert self.admitted <= passed <= self.admitted + int(place is not None), place
        # Until all that was counted has left the shorter window, and then the longer one.
        for _ in range(22):
            self.clock.move(6_000)
            self.limiter.try_acquire("a")
        assert self.limiter.peek("a").remaining == 10, place
        self.clock.move(3_600_000 + 360_000)
        for key in "ab":
            assert self.limiter.peek(key).remaining == 20, place
            assert self.limiter.stats(key).passed == 0, place


def test_calls_in_memory() -> None:
    play_interrupted(CallsInMemory, every=37, least=15)


class ObservedInMemory:
    """What an observer is told of calls of which one was interrupted."""

    def __init__(self, limits: Any) -> None:
        self.clock, self.told = ManualClock(), Told()
        self.limiter = Limiter("memory://", limits, time=self.clock, observer=self.told)
        self.seen = Counter[str]()

    def play(self) -> None:
        for ms in (7_000, 20, 61_000, 300):
            for key in "ab" * 13:
                allowed = self.limiter.try_acquire(key).allowed
                self.seen["allowed" if allowed else "refused"] += 1
            self.clock.move(ms)

    def check(self, place: str | None) -> None:
        self.limiter.flush()
        self.play()
        self.limiter.close()
        told = Counter[str]()
        for counts in self.told.counts:
            told[counts.result] += counts.calls
        for result, seen in self.seen.items():
            assert seen <= told[result] <= seen + int(place is not None), (place, result)


@pytest.mark.parametrize("limits", ["10/minute", ["10/minute", "900/hour"]], ids=str)
def test_what_is_told_of_calls_in_memory(limits: Any) -> None:
    play_interrupted(ObservedInMemory, limits, every=13, least=20)


class Entries:
    """Two entries, one of which fails."""

    def __init__(self, mode: Any, with_breaker: bool) -> None:
        self.clock = ManualClock()
        self.limiter = Limiter(Remote(self.clock), "20/minute", consistency=mode, time=self.clock)
        breaker = CircuitBreaker(Remote(self.clock), ErrorRatio(0.9), time=self.clock)
        self.options: Any = {"breaker": breaker} if with_breaker else {"origin": "app-a"}
        self.begun = 0

    def play(self) -> None:
        with self.limiter.entry("k", **self.options):
            self.begun += 1
            self.clock.advance(0.1)
        with suppress(OSError), self.limiter.entry("k", **self.options):
            self.begun += 1
            raise OSError

    def check(self, place: str | None) -> None:
        with self.limiter.entry("k", **self.options):
            self.begun += 1
        self.limiter.flush()
        stats, minute = self.limiter.stats("k"), self.limiter.minute("k")
        for ended in (stats.success + stats.error, minute.success + minute.error):
            assert self.begun - int(place is not None) <= ended <= self.begun, place


@pytest.mark.parametrize("with_breaker", [False, True])
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_entries(mode: str, with_breaker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RedisStore", Remote)  # the stores that are sent minute views
    play_interrupted(Entries, mode, with_breaker, every=5, least=8)


class Slots:
    """Slots of two keys, one of which is refused."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slots = Concurrency(Uninterrupted(self.clock), 2, timeout=0.5, time=self.clock)

    def play(self) -> None:
        with self.slots.hold("k") as first:
            assert first
            second, third = self.slots.try_hold("k"), self.slots.try_hold("k")
            assert second
            assert not third
            second.release()
        with self.slots.hold("other") as fourth:
            assert not fourth.lost

    def check(self, place: str | None) -> None:
        self.slots.flush()
        self.clock.advance(self.slots.ttl + 0.5)
        self.slots.flush()
        for key in ("k", "other"):
            stats = self.slots.stats(key)
            assert (stats.held, stats.waiting) == (0, 0), place
        assert self.slots._held._claims == {}, place


def test_slots() -> None:
    play_interrupted(Slots, every=5, least=30)


class Guarded:
    """Calls through the slots of a guard: one that is admitted and one that the last rule refuses,
    or a failure and the probe after it.
    """

    TAKING: Sequence[Rule] = (
        SystemRule(max_thread=3, qps=6, avg_rt=1000),
        FlowRule("r", 100),
        FlowRule("r", 1, grade="thread"),
    )
    BREAKING: Sequence[Rule] = (
        SystemRule(max_thread=3),
        DegradeRule("r", 0, grade="error_count", time_window_s=2, min_request_amount=1),
    )

    def __init__(self, rules: Sequence[Rule], mode: Any) -> None:
        self.clock = ManualClock()
        self.store = Remote(self.clock)
        self.rules = rules
        self.guard = Guard(
            self.store, rules, consistency=mode, time=self.clock,
            installed_slots=False,  # to look for them takes longer than everything else here
        )  # fmt: skip

    def play(self) -> None:
        if self.rules is self.BREAKING:
            with suppress(OSError), self.guard.entry("r"):
                raise OSError
            self.clock.advance(2.5)
            with self.guard.entry("r"):
                return
        with self.guard.entry("r"), suppress(Blocked), self.guard.entry("r"):
            raise AssertionError("the slot is held")

    def check(self, place: str | None) -> None:
        for _ in range(3):
            self.guard.flush()
            self.clock.advance(11)
        (system,) = [
            one.slot for one in self.guard._chain_of_others if isinstance(one.slot, SystemSlot)
        ]
        if system._running:
            gc.collect()  # an entry that was not left, in a cycle with the exception
        assert len(system._running) == 0, place
        assert system._passed == sum(one.cost for one in system._passes), place
        assert Concurrency(self.store, 1, time=self.clock).stats("r").held == 0, place
        # The guard works on, and its breaker lets a probe through.
        with self.guard.entry("r"):
            assert len(system._running) == 1, place


@pytest.mark.parametrize("rules", [Guarded.TAKING, Guarded.BREAKING], ids=["taking", "breaking"])
@pytest.mark.parametrize("mode", ["direct", "eventual"])
def test_guards(rules: Sequence[Rule], mode: str) -> None:
    play_interrupted(Guarded, rules, mode, every=5, least=8)


@pytest.mark.parametrize("mode", ["direct", "eventual"])
def test_after_an_interrupted_wake_up_the_next_call_wakes_the_worker(mode: Any) -> None:
    clock = ManualClock()
    limiter = Limiter(Remote(clock), "1/minute", consistency=mode, time=clock)
    for _ in range(3):
        limiter.try_acquire("k")
    limiter.flush()
    woken: list[bool] = []

    def interrupted() -> None:
        woken.append(False)
        raise KeyboardInterrupt

    limiter.decider.strategy.wake = interrupted
    with pytest.raises(KeyboardInterrupt):
        limiter.try_acquire("k")
    limiter.decider.strategy.wake = lambda: woken.append(True)
    limiter.try_acquire("k")
    assert woken == [False, True]


def test_after_an_interrupted_end_of_a_slot_the_next_hold_wakes_the_worker() -> None:
    """Wherever the end is interrupted, and though the next slot is due later: else the worker would
    not come to renew that one either.
    """
    woken: list[bool] = []

    def interrupted() -> None:
        raise Interruption

    number, place = 0, ""
    while place is not None:
        number += 1
        held = HeldSlots(2, 30_000, lambda: "owner")
        first, second = (held.new_claim("k", b"k") for _ in range(2))
        for claim in (first, second):
            held.add(claim, 0.0)
            claim.on_reply(HoldReply(True, 1, 30_000, 0), 0.0)
        held.wake = interrupted
        place = interrupt_at(number, partial(held.end, first, 5.0), "distwindow.")  # type: ignore[assignment]
        held.wake = lambda: woken.append(True)
        held.on_granted(second)
        assert len(woken) == number, place
        assert held.next_due_at <= 10.0, place
    assert number > 3
