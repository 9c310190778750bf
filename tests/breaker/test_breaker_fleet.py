"""Several processes share a circuit breaker: what holds for the fleet, over random histories.

Each process is a `CircuitBreaker` of its own over one store, which loses requests and replies. Time
is moved by the test, which also does what the worker does: a flush every tick.
"""

from __future__ import annotations

import dataclasses
from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import (
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ConfigurationError,
    ErrorCount,
    ErrorRatio,
)
from distwindow.breaker.call import BreakerCall
from distwindow.breaker.record import STATES, BreakerRecord
from distwindow.breaker.states import BreakerAdmission
from distwindow.errors import DistwindowError, StoreTimeout, StoreUnavailable
from distwindow.ring.command import Command
from distwindow.runtime.flush import send_all
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, ManualClock

TICK_MS = 250


class LossyStore(MemoryStore):
    """A store elsewhere: it loses requests, and replies after their execution, as it is told."""

    decided_by: Literal["store"] = "store"

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.faults: list[str] = []
        self.is_away = False
        self.refused: bytes | None = None
        """Commands for keys that have this in their names are refused, as by a missing right."""
        self.commands = 0

    def state_now(self) -> str:
        """Return the state of the only breaker."""
        return STATES[self.breakers[0].state] if self.breakers else "closed"

    @property
    def breakers(self) -> list[BreakerRecord]:
        """What is stored of each breaker."""
        return [v for v in self._values.by_name.values() if isinstance(v, BreakerRecord)]

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return [self._attempt_one(command) for command in commands]

    def _attempt_one(self, command: Command[Any]) -> Any:
        self.commands += 1
        if self.refused is not None and self.refused in command.keys[0]:
            return ConfigurationError("the server refuses: NOPERM")
        fault = "request lost" if self.is_away else self.faults.pop() if self.faults else ""
        if fault == "request lost":
            return StoreUnavailable("the request was lost", charged=False)
        reply = self.execute(command)
        return StoreTimeout("the reply was lost", charged=None) if fault else reply


class Process:
    """One process of the fleet."""

    def __init__(self, store: LossyStore, rule: Any, **options: Any) -> None:
        self.breaker = CircuitBreaker(store, rule, time=store.clock, **options)
        self.changes: list[BreakerChange] = []
        self.breaker.on_change(self.changes.append)
        self.calls: list[BreakerCall[BreakerAdmission]] = []

    def begin(self, key: str = "k") -> bool:
        call = self.breaker.call(key)
        try:
            Context().run(call.__enter__)  # no process calls inside the probe of another
        except BreakerOpen:
            return False
        self.calls.append(call)
        return True

    def end(self, failed: bool) -> None:
        call = self.calls.pop()
        call.__exit__(*((OSError, OSError(), None) if failed else (None, None, None)))

    def run(self, failed: bool, key: str = "k") -> bool:
        """Return True if a call was let through."""
        admitted = self.begin(key)
        if admitted:
            self.end(failed)
        return admitted

    def open_it(self) -> None:
        """Fail as often as opens the breaker, and flush that."""
        for _ in range(RULE.count):
            self.run(failed=True)
        self.tick()

    def tick(self) -> None:
        """Do what the worker does."""
        try:
            self.breaker.flush()
        except DistwindowError:
            return  # it is sent again at the next tick


def fleet(rule: Any, number: int, **options: Any) -> tuple[ManualClock, LossyStore, list[Process]]:
    clock = ManualClock(T0)
    store = LossyStore(clock)
    return clock, store, [Process(store, rule, **options) for _ in range(number)]


FAULTS = st.lists(st.sampled_from(["", "", "request lost", "reply lost"]), max_size=30)
RULE = ErrorCount(6, window=10, open_for=2, probe_timeout=3)


@settings(deadline=None, max_examples=200)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["good", "bad", "bad", "tick", "wait"])),
        max_size=60,
    ),
    faults=FAULTS,
)
def test_every_call_of_a_closed_breaker_is_counted_once(
    history: list[tuple[int, str]], faults: list[str]
) -> None:
    rule = ErrorCount(10**6, window=60)
    clock, store, processes = fleet(rule, 3)
    store.faults = faults
    ended = failed = 0
    for which, action in history:
        process = processes[which]
        if action == "wait":
            clock.move(TICK_MS)
        elif action == "tick":
            process.tick()
        else:
            assert process.run(action == "bad")
            ended, failed = ended + 1, failed + (action == "bad")
    store.faults = []
    for process in [*processes, *processes]:  # first what was lost, then what was counted since
        process.tick()
    (record,) = store.breakers if ended else [None]
    if record is not None:
        assert record.totals(rule, clock.now_ms()) == (ended, failed)


@settings(deadline=None, max_examples=60)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([True, True, False]), st.integers(0, 2)),
        min_size=20,
        max_size=120,
    ),
    faults=FAULTS,
)
def test_processes_hear_what_they_see_and_the_probes_are_the_fleets(
    history: list[tuple[int, bool, int]], faults: list[str]
) -> None:
    # With "allow", a process that finds the store away would have changes of its own.
    clock, store, processes = fleet(RULE, 3, on_store_error="deny")
    assert all(process.run(failed=False) for process in processes)
    store.faults = faults
    probes: list[tuple[Process, int]] = []
    for which, failed, ticks in history:
        for _ in range(ticks):
            clock.move(TICK_MS)
            for process in processes:
                process.tick()
                with suppress(StoreTimeout, StoreUnavailable):
                    process.breaker.state("k")  # also where it has not called for ten seconds
        process = processes[which]
        ends_at = clock.now_ms() - RULE.probe_ms
        probes = [(p, began) for p, began in probes if began > ends_at and p.calls]
        before = store.state_now()
        if process.calls:
            process.end(failed)
        elif process.begin():
            if before != "closed" and store.state_now() == "half_open":
                probes.append((process, clock.now_ms()))
            elif before == "closed":
                process.end(failed)
        assert len([1 for p, _ in probes if p.calls]) <= RULE.probes
    store.faults = []
    for process in processes:
        process.breaker.state("k")
    for process in processes:
        process.breaker.state("k")
    happened = {change[2:] for process in processes for change in process.changes}
    assert len({at_ms for _, at_ms in happened}) == len(happened)
    for process in processes:
        seen = ["closed", *(change.state for change in process.changes)]
        assert [change.previous for change in process.changes] == seen[:-1]
        assert all(before != after for before, after in pairwise(seen))
        assert seen[-1] == store.state_now()
        at = [change.at_ms for change in process.changes]
        assert at == sorted(set(at)), "each once, in order"


def test_every_process_refuses_within_both_intervals() -> None:
    clock, _, processes = fleet(RULE, 4)
    assert all(process.run(failed=False) for process in processes)
    for _ in range(6):
        assert processes[0].run(failed=True)
    # The first flush opens it; the other processes learn of that at their next refresh.
    clock.move(TICK_MS)
    processes[0].tick()
    assert not processes[0].run(failed=True)
    clock.move(TICK_MS)
    for process in processes:
        process.tick()
    assert not any(process.run(failed=True) for process in processes)
    # A process that is new, or has not called for a while, asks in its first call.
    clock.move(TICK_MS)
    late = Process(processes[0].breaker._store, RULE)  # type: ignore[arg-type]
    assert not late.run(failed=True)


def test_errors_of_several_processes_open_it_together() -> None:
    clock, _, processes = fleet(ErrorRatio(0.5, window=10, min_calls=20), 5)
    for _ in range(4):
        assert all(process.run(failed=True) for process in processes)
    for _ in range(2):
        clock.move(TICK_MS)
        for process in processes:
            process.tick()
    clock.move(1)  # what is known is older than the sync interval
    assert not any(process.run(failed=True) for process in processes)


def test_counts_from_before_it_opened_do_not_reopen_it() -> None:
    clock, store, (first, late) = fleet(RULE, 2)
    assert first.run(failed=True)
    for _ in range(20):
        assert late.run(failed=True)
    store.is_away = True
    late.tick()  # is lost, and sent again below
    store.is_away = False
    first.open_it()
    clock.move(2000)
    assert first.run(failed=False)  # the probe closes it
    assert store.state_now() == "closed"
    late.tick()
    assert store.state_now() == "closed"
    (record,) = store.breakers
    assert record.totals(RULE, clock.now_ms()) == (0, 0)


def test_a_call_that_began_before_it_opened_does_not_decide_as_a_probe_does() -> None:
    clock, store, (process,) = fleet(RULE, 1)
    assert process.begin()
    slow = process.calls.pop()
    process.open_it()
    clock.move(2000)
    assert process.begin()  # the probe
    slow.__exit__(None, None, None)
    process.tick()
    assert store.state_now() == "half_open"
    process.end(failed=True)
    assert store.state_now() == "open"


def test_a_probe_whose_process_died_is_given_to_another_one() -> None:
    clock, store, (dead, alive) = fleet(RULE, 2)
    dead.open_it()
    clock.move(2000)
    assert dead.begin()
    assert not alive.begin()
    clock.move(RULE.probe_ms)
    alive.tick()
    assert alive.run(failed=False)
    assert store.state_now() == "closed"
    dead.end(failed=True)  # too late
    assert store.state_now() == "closed"


@pytest.mark.parametrize("interval_s", [0.25, 60.0])
def test_a_probe_of_a_slow_service_is_not_replaced_and_decides(interval_s: float) -> None:
    """Not even where its process makes no other call, and flushes seldom."""
    intervals = {"sync_interval": interval_s, "flush_interval": interval_s}
    rule = dataclasses.replace(RULE, open_for=2 * interval_s + 1)
    clock, store, (slow, other) = fleet(rule, 2, **intervals)
    slow.open_it()
    clock.move(rule.open_ms)
    assert slow.begin()
    states, until_ms = slow.breaker._states, clock.now_ms() + 20 * RULE.probe_ms
    while clock.now_ms() < until_ms:
        clock.move(max(1, int((states.next_due_at - clock.monotonic()) * 1000)))
        slow.tick()
        other.tick()
        assert not other.begin()
    slow.end(failed=False)
    assert store.state_now() == "closed"


def test_a_probe_whose_call_was_dropped_is_given_to_another_one() -> None:
    """A signal handler that raises before the end is recorded leaves a call that nobody has."""
    clock, store, (process,) = fleet(RULE, 1)
    process.open_it()
    clock.move(2000)
    assert process.begin()
    process.calls.clear()
    for _ in range(RULE.probe_ms // TICK_MS):
        clock.move(TICK_MS)
        process.tick()
    assert process.run(failed=False)
    assert store.state_now() == "closed"


def test_a_probe_that_says_nothing_is_given_to_the_next_call() -> None:
    clock, store, (process,) = fleet(RULE, 1, ignore=KeyError)
    process.open_it()
    clock.move(2000)
    assert process.begin()
    process.calls.pop().__exit__(KeyError, KeyError(), None)
    assert store.state_now() == "half_open"
    assert process.run(failed=False)
    assert store.state_now() == "closed"


@pytest.mark.parametrize("fault", ["request lost", "reply lost"])
def test_the_end_of_a_probe_arrives_though_its_reply_is_lost(fault: str) -> None:
    clock, store, (process,) = fleet(RULE, 1)
    process.open_it()
    clock.move(2000)
    assert process.begin()
    store.faults = [fault]
    process.end(failed=False)
    process.tick()
    assert store.state_now() == "closed"
    assert [change.state for change in process.changes] == ["open", "half_open", "closed"]


def test_the_commands_of_a_process_are_bounded_by_its_calls() -> None:
    clock, store, (process,) = fleet(ErrorCount(10**6), 1, max_local_keys=5000)
    for number in range(1000):
        assert process.run(failed=False, key=f"k{number}")
    assert store.commands == 1000
    for _ in range(80):
        clock.move(TICK_MS)
        process.tick()
    assert store.commands == 2000, "one asks in the call, one has its end; nothing comes after"
    for _ in range(80):  # a breaker in steady use: its calls ask nothing, the worker once a tick
        for _ in range(5):
            clock.move(TICK_MS // 5)
            assert process.run(failed=False)
        process.tick()
    assert store.commands - 2000 <= 81
    before = store.commands
    for _ in range(20):  # refused calls have no ends, and are refreshed once a tick, too
        store._values.by_name.clear()
        for _ in range(5):
            clock.move(TICK_MS // 5)
            assert process.begin()
        process.tick()
    assert store.commands - before <= 20


def test_many_keys_evict_the_oldest_and_lose_no_count() -> None:
    clock, store, (process,) = fleet(RULE, 1, max_local_keys=10)
    assert process.begin()  # a long call: its key is evicted meanwhile
    states = process.breaker._states
    for number in range(25):
        assert process.run(failed=True, key=f"k{number}")
    assert len(states._states) == 10
    assert states.dropped == 0, "the store takes them at the next tick"
    store.is_away = True
    process.tick()
    for number in range(25, 50):
        assert process.run(failed=True, key=f"k{number}")
    assert len(states._active) <= 25 + 1, "nothing else bounds what the store does not take"
    assert states.dropped + states.unacknowledged_counts() == 50
    store.is_away = False
    for _ in range(2):
        clock.move(TICK_MS)
        process.tick()
    process.end(failed=True)
    process.tick()
    totals = [record.totals(RULE, clock.now_ms())[1] for record in store.breakers]
    assert sum(totals) == 51 - states.dropped


def test_a_process_hears_of_the_state_that_it_finds_and_of_none_in_between() -> None:
    clock, _, (first, calling, idle) = fleet(RULE, 3)
    for process in (calling, idle):
        assert process.run(failed=False)
        process.tick()

    def open_it() -> None:
        first.open_it()
        clock.move(TICK_MS)
        calling.run(failed=False)
        for process in (first, calling, idle):
            process.tick()

    for _ in range(3):
        open_it()
        clock.move(RULE.open_ms)
        first.run(failed=False)  # a probe, which closes it
        calling.run(failed=False)
    clock.move(TICK_MS * 2)
    idle.run(failed=False)
    assert [change.state for change in first.changes] == ["open", "half_open", "closed"] * 3
    assert [change.state for change in calling.changes] == ["open", "closed"] * 3
    assert idle.changes == [], "it finds it closed, as it left it"
    clock.move(TICK_MS * 2)
    open_it()
    idle.run(failed=False)
    assert idle.changes == first.changes[-1:]


def test_an_earlier_epoch_is_a_late_reply_or_a_store_that_has_lost_the_breaker() -> None:
    clock, store, (process, other) = fleet(RULE, 2)
    for each in (process, other):
        assert each.run(failed=False)
    states = process.breaker._states
    (refresh,) = states.outgoing_of(states.get_or_create("k"))
    sent_at, overtaken = clock.monotonic(), store.execute(refresh.command)
    other.open_it()
    clock.move(TICK_MS)
    process.tick()
    refresh.on_reply(overtaken, sent_at)
    assert not process.begin()
    store._values.by_name.clear()
    clock.move(TICK_MS)
    process.tick()
    assert process.run(failed=False)


def test_an_exchange_that_is_cancelled_says_nothing_of_the_store() -> None:
    clock, _, (process,) = fleet(RULE, 1, on_store_error="deny")
    assert process.run(failed=False)
    states = process.breaker._states
    exchange = send_all(states.outgoing_of(states.get_or_create("k")), clock.monotonic)
    next(exchange)
    with pytest.raises(CancelledError):
        exchange.throw(CancelledError())
    assert process.run(failed=False, key="new"), "it asks the store"


def test_an_evicted_key_that_is_called_again_keeps_its_counts() -> None:
    clock, store, (process,) = fleet(RULE, 1, max_local_keys=1)
    for key in ("a", "b", "a"):
        assert process.run(failed=True, key=key)
    process.tick()
    totals = [record.totals(RULE, clock.now_ms()) for record in store.breakers]
    assert sorted(totals) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("changes", [False, True])
def test_a_call_of_an_evicted_key_is_counted_unless_its_breaker_has_changed(changes: bool) -> None:
    """What is known of the key has been learned anew, and is as old as what the call knew."""
    clock, store, (other,) = fleet(RULE, 1)
    slow = Process(store, RULE, max_local_keys=1)
    assert slow.run(failed=False)
    slow.tick()
    assert slow.begin()
    assert slow.run(failed=False, key="evicts it")
    for _ in range(3):
        clock.move(TICK_MS)
        slow.tick()
    if changes:
        other.open_it()
        clock.move(RULE.open_ms)
        assert other.run(failed=False)  # the probe closes it
    assert slow.run(failed=False)
    slow.end(failed=True)
    slow.tick()
    totals = [record.totals(RULE, clock.now_ms()) for record in store.breakers]
    assert sorted(totals) == ([(1, 0), (1, 0)] if changes else [(1, 0), (3, 1)])


def opened_and_away(**options: Any) -> tuple[ManualClock, LossyStore, Process]:
    """Return a process whose breaker was open when the store went away."""
    clock, store, (process,) = fleet(RULE, 1, **options)
    process.open_it()
    store.is_away = True
    return clock, store, process


class TestStoreAway:
    """The store does not answer: the last known state holds, then the setting decides."""

    def test_a_closed_breaker_stays_closed(self) -> None:
        clock, store, (process,) = fleet(RULE, 1, on_store_error="deny")
        assert process.run(failed=False)
        store.is_away = True
        for _ in range(20):
            clock.move(TICK_MS)
            process.tick()
            assert process.run(failed=True)

    @pytest.mark.parametrize(("setting", "let_through"), [("allow", True), ("deny", False)])
    def test_without_a_known_state_the_setting_decides(
        self, setting: str, let_through: bool
    ) -> None:
        _, store, (process,) = fleet(RULE, 1, on_store_error=setting)
        store.is_away = True
        assert process.run(failed=False) is let_through

    def test_what_was_counted_before_anything_was_known_is_counted_later(self) -> None:
        clock, store, (first,) = fleet(RULE, 1)
        slow = Process(store, RULE)
        store.is_away = True
        assert slow.begin()  # begins before it opens, and ends after it has closed again
        store.is_away = False
        first.open_it()
        clock.move(2000)
        assert first.run(failed=False)
        assert store.state_now() == "closed"
        clock.move(1000)
        store.is_away = True
        late = Process(store, RULE)  # starts while the store is away
        for _ in range(5):
            assert late.run(failed=True)
        late.tick()
        assert late.begin()  # ends when the state is known
        store.is_away = False
        clock.move(2500)
        late.tick()
        late.end(failed=True)
        slow.end(failed=True)
        (record,) = store.breakers
        assert record.totals(RULE, clock.now_ms()) == (5, 5)
        for process in (late, slow):
            process.tick()
            process.tick()
        assert store.state_now() == "open"
        assert record.totals(RULE, clock.now_ms()) == (6, 6)

    def test_refusals_of_the_store_lose_no_count_and_keep_no_other_breaker_away(self) -> None:
        clock, store, (process,) = fleet(ErrorCount(10**6), 1, on_store_error="deny")
        for key in ("good", "bad"):
            assert process.run(failed=True, key=key)
        store.refused = b"bad"
        for _ in range(20):
            clock.move(TICK_MS)
            process.tick()
            assert process.run(failed=True, key="good")
            assert process.run(failed=True, key="bad")
            assert process.run(failed=True, key=f"new {clock.now_ms()}"), "its first call may ask"
        clock.move(TICK_MS)
        process.tick()
        assert process.breaker._states.unacknowledged_counts() == 21
        store.refused = b""
        assert process.run(failed=True, key="good")
        process.tick()
        store.refused = None
        for _ in range(2):
            process.tick()
        totals = [
            record.totals(process.breaker.rule, clock.now_ms())[1] for record in store.breakers
        ]
        assert sorted(totals)[-2:] == [21, 22]
        assert process.breaker._states.dropped == 0

    def test_an_open_breaker_gets_probes_of_this_process(self) -> None:
        clock, store, process = opened_and_away()
        assert not process.begin()
        clock.move(2000)
        assert process.begin()
        assert not process.begin()  # one at a time
        process.end(failed=True)
        assert not process.begin()
        clock.move(2000)
        assert process.run(failed=False)
        assert process.run(failed=False)  # closed, until the store answers
        store.is_away = False
        clock.move(2000)
        process.tick()
        assert process.begin()  # the probe of the fleet
        assert store.state_now() == "half_open"

    def test_a_call_inside_a_probe_of_this_process_belongs_to_it(self) -> None:
        clock, _, process = opened_and_away()
        clock.move(2000)
        with process.breaker.call("k"), suppress(OSError), process.breaker.call("k"):
            raise OSError
        assert process.run(failed=False)

    def test_a_slow_probe_of_this_process_is_the_only_one(self) -> None:
        clock, _, process = opened_and_away()
        clock.move(2000)
        assert process.begin()
        for _ in range(5):
            clock.move(2000)
            process.tick()
            assert not process.begin()
        process.end(failed=False)
        assert process.run(failed=False)

    def test_with_deny_an_open_breaker_stays_open(self) -> None:
        clock, _, process = opened_and_away(on_store_error="deny")
        clock.move(60_000)
        assert not process.begin()

    def test_what_was_counted_meanwhile_is_sent_later_in_its_own_bucket(self) -> None:
        clock, store, (process,) = fleet(ErrorCount(10, window=10), 1)
        assert process.run(failed=True)
        process.tick()
        store.is_away = True
        for _ in range(4):
            clock.move(3000)
            process.run(failed=True)
            process.tick()
        store.is_away = False
        process.tick()
        process.tick()
        (record,) = store.breakers
        # Those of the last ten seconds: at 3, 6, 9 and 12 s, and not that at 0 s.
        assert record.totals(RULE, clock.now_ms()) == (4, 4)
