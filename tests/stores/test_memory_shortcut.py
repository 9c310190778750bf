"""`MemoryStore.decide` decides without a reply where it can. It decides as a reply would, and the
ring is then the same.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Read, Reset
from distwindow.ring.decision import Charge
from distwindow.ring.decisions import decision_of
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import (
    COMMAND_NAMES,
    LARGEST_LIMIT_INDEX,
    MINUTE_MS,
    START_MS,
    HistoryStep,
    commands_of,
)
from tests.clock_and_stores import ManualClock

W = MINUTE_MS

steps = st.builds(
    HistoryStep,
    name=st.sampled_from(["acquire"] * 20 + list(COMMAND_NAMES)),
    elapsed_ms=st.sampled_from([0, 0, 0, 0, 1, 7, W - 1, W, 2 * W, 5 * W, -1, -W, -15 * W]),
    limits=st.sampled_from([[4], [4], [4], [1], [3], [0], [4, 6]]),
    cost=st.integers(1, 6),
    calls=st.just(1),
    size=st.integers(0, 5),
    flag=st.sampled_from([False, False, False, True]),
    amount_change=st.sampled_from([0, 0, 0, 0, -3, 1, 40]),
)


class Attempts:
    """Executes each `Acquire` by `decide`, with one command for all calls of the same charges."""

    def __init__(self, clock: ManualClock) -> None:
        self.store = MemoryStore(clock)
        self.decided_by_reply = 0
        self._commands: dict[tuple[tuple[Charge, ...], bool], Acquire] = {}
        attempt_by_reply = self.store._attempt_by_reply

        def counted(command: Acquire) -> Any:
            self.decided_by_reply += 1
            return attempt_by_reply(command)

        self.store._attempt_by_reply = counted  # type: ignore[method-assign]  # to count its calls

    def __call__(self, command: Command[Any]) -> Any:
        if not isinstance(command, Acquire):
            return self.store.execute(command)
        same = self._commands.setdefault((command.charges, command.write_limit), command)
        return self.store.decide(same)


def specified(store: MemoryStore, command: Command[Any]) -> Any:
    """Return the reply to `command`; for an `Acquire`, the decision of that reply."""
    reply = store.execute(command)
    return decision_of(command, reply, "local") if isinstance(command, Acquire) else reply


def compare(history: list[HistoryStep]) -> None:
    clock = ManualClock(START_MS)
    attempts, specification = Attempts(clock), MemoryStore(clock)
    for timed in commands_of(history, "k"):
        assert timed.now_ms is not None
        clock.move(timed.now_ms - clock.now_ms())
        command = replace(timed, now_ms=None)
        assert attempts(command) == specified(specification, command), timed


@settings(deadline=None, max_examples=150)
@given(history=st.lists(steps, min_size=5, max_size=60))
def test_attempt_decides_as_the_specification(history: list[HistoryStep]) -> None:
    compare(history)


full_bucket_steps = st.builds(
    HistoryStep,
    name=st.sampled_from(["acquire"] * 4 + ["lease", "refund", "flush"]),
    elapsed_ms=st.sampled_from([0, 0, 0, W]),
    limits=st.just([4]),
    cost=st.sampled_from([1, 1, 2, 3]),
    calls=st.just(1),
    size=st.integers(0, 5),
    flag=st.just(False),
    amount_change=st.just(0),
)


@settings(deadline=None, max_examples=150)
@given(history=st.lists(full_bucket_steps, min_size=20, max_size=60))
def test_a_refusal_is_repeated_only_while_it_holds(history: list[HistoryStep]) -> None:
    compare(history)


def test_a_refusal_does_not_outlive_a_refund_that_is_spent_again() -> None:
    """`used` is then the same as before, but other buckets hold it."""

    def acquire(cost: int, elapsed_ms: int = 0) -> HistoryStep:
        return HistoryStep("acquire", elapsed_ms, [4], cost, 1, 0, False, 0)

    refund = HistoryStep("refund", 0, [4], 2, 1, 3, False, 0)  # out of the first bucket
    compare([acquire(2), acquire(5, W), acquire(1), acquire(1), refund, acquire(2), acquire(1)])


def test_a_flood_of_expired_rings_leaves_no_count_in_a_dropped_one() -> None:
    """The rings of these commands are dropped, and the clock is set back into their buckets."""
    clock = ManualClock(START_MS)
    attempts, specification = Attempts(clock), MemoryStore(clock)
    step = HistoryStep("acquire", 0, [4], 3, 1, 0, False, 0)
    commands = [replace(next(commands_of([step], f"k{n}")), now_ms=None) for n in range(1_030)]
    for moved_ms in (0, 0, 8 * W, -8 * W, 0, 0):
        clock.move(moved_ms)
        for command in commands:
            assert attempts(command) == specified(specification, command)


class ResetBefore:
    """A lock. Before it is taken for the `number`-th time, another thread resets the key."""

    def __init__(self, store: MemoryStore, charges: tuple[Charge, ...], number: int) -> None:
        self._store, self._charges, self.times_left = store, charges, number
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.times_left -= 1
        if self.times_left == 0:
            self._store._handlers["reset"](Reset(self._charges), START_MS)
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_admitted_after_a_reset_counts_in_the_present_ring(number: int) -> None:
    """`decide` takes the lock to look, to open a bucket, and to count."""
    clock = ManualClock(START_MS)
    store = MemoryStore(clock)
    step = HistoryStep("acquire", 0, [5], 3, 1, 0, False, 0)
    command = replace(next(commands_of([step], "k")), now_ms=None)
    assert isinstance(command, Acquire)
    store.decide(command)
    clock.move(W)
    lock = ResetBefore(store, command.charges, number)
    store._lock = lock  # type: ignore[assignment]  # it has the methods of a lock
    assert store.decide(command)
    assert lock.times_left <= 0
    state = store.execute(Read(command.charges)).states[0]
    assert state is not None
    assert state.used == 3


def test_most_decisions_need_no_reply() -> None:
    clock = ManualClock(START_MS)
    attempts = Attempts(clock)
    step = HistoryStep("acquire", 0, [LARGEST_LIMIT_INDEX], 3, 1, 0, False, 0)
    command = replace(next(commands_of([step], "k")), now_ms=None)
    decisions = [attempts(command) for _ in range(50)]
    assert [decision.allowed for decision in decisions] == [True] * 3 + [False] * 47
    assert attempts.decided_by_reply == 2, "the first call, and the first refusal"
    clock.move(3_600_000)
    assert attempts(command).allowed is False
    assert attempts.decided_by_reply == 3, "the first refusal of a bucket"
    clock.move(4 * 3_600_000)
    assert attempts(command).allowed is True
    assert attempts.decided_by_reply == 3
