"""Every row of the table in `waiting/waiting.py`, and what turns need of a limiter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from distwindow import Decision, Limit, Limiter, RateLimitExceeded
from distwindow.local.in_process import InProcess
from distwindow.ring.commands import Acquire
from distwindow.ring.replies import AcquireReply
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.runtime.steps import Sleep
from distwindow.stores.memory import MemoryStore
from distwindow.waiting import waiting as turns
from distwindow.waiting.commands import AcquireTurn, TurnReply
from distwindow.waiting.waiting import PermitWaiter, RetryAt, Turns, WaitQueues, wait_for_turn
from tests.clock_and_stores import T0, ManualClock
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(turns, "no turn")
LIMIT = Limit("10/second")


class Queue:
    """The queue of one key, whose head asks a store that answers as the test says."""

    def __init__(self, *, followers: int = 1, timeout: float | None = None) -> None:
        self.clock = ManualClock()
        commands = CommandCache("unit", LIMIT)
        self.command = commands.acquire_command("k")
        strategy = InProcess(
            commands, MemoryStore(self.clock).decide_at_once, self.clock, Options(max_local_keys=10)
        )
        self.turns = Turns(commands, strategy, "store", self.clock, lambda decision: decision)
        queues = WaitQueues(self.clock)
        self.head = PermitWaiter(queues, self.command, timeout)
        self.head._queues.join(self.head)
        for _ in range(followers):
            queues.join(PermitWaiter(queues, self.command, None))
        self.steps: list[Any] = []
        self.operation: Generator[Any, Any, Decision] = wait_for_turn(
            self.command, self.turns, self.head
        )

    def holds(self, due_in_s: float = 0.3, free_calls: int = 0) -> Queue:
        due_at = self.clock.monotonic() + due_in_s
        self.head.queue.turn = RetryAt(T0 + round(due_in_s * 1000), due_at)
        self.head.queue.free_calls = free_calls
        return self

    def play(self, *replies: Any) -> str:
        """Answer each step that goes to the store, and sleep in between. Return the state of the
        queue when the replies are used up, or the head has its decision.
        """
        left, answer = list(replies), None
        while True:
            try:
                step = self.operation.send(answer)
            except StopIteration:
                assert not left, "it has asked less often"
                return self.state()
            self.steps.append(step)
            answer = None
            if isinstance(step, Sleep):
                self.clock.move(round(step.seconds * 1000))
            elif left:
                answer = left.pop(0)(step)
            else:
                return self.state()

    def slept(self, number: int) -> float:
        """Return for how long the step of this number sleeps."""
        step = self.steps[number]
        assert isinstance(step, Sleep)
        return step.seconds

    def state(self) -> str:
        held = self.head.queue
        if held.turn is None:
            return "no turn"
        return f"free calls {held.free_calls}" if held.free_calls else "turn"

    def plain(self, *, allowed: bool) -> Any:
        """Return the reply to a plain call."""

        def reply(step: Any) -> Decision:
            assert type(step) is Acquire
            retry, reason = (0.0, "ok") if allowed else (0.2, "over_limit")
            now = self.clock.now_ms()
            return Decision(allowed, "k", 1, LIMIT, 0, retry, 1.0, 0.0, reason, "store", now)  # type: ignore[arg-type]  # a str that is a Reason

        return reply

    def turn(self, *, allowed: bool, left: int = 0, queued: int = 0) -> Any:
        """Return the reply to a call that takes a place."""

        def reply(step: Any) -> TurnReply:
            assert isinstance(step, AcquireTurn)
            now = self.clock.now_ms()
            if allowed:
                turn_in = 400 if step.takes_next else 0
                of_acquire = AcquireReply(1, 0, left, 1000, 0, now)
                return TurnReply(of_acquire, turn_in, queued if step.takes_next else 0)
            return TurnReply(AcquireReply(0, 0, 0, 1000, 200, now), 400)

        return reply


@ROW_CHECKS.row("no turn", "asked plainly: admitted")
def _() -> str:
    queue = Queue()
    return queue.play(queue.plain(allowed=True))


@ROW_CHECKS.row("no turn", "asked plainly: refused, and so for a place")
def _() -> str:
    queue = Queue()
    state = queue.play(queue.plain(allowed=False), queue.turn(allowed=False))
    assert queue.slept(2) == pytest.approx(0.4), "until its turn"
    return state


@ROW_CHECKS.row("no turn", "asked plainly: refused; for a place: admitted")
def _() -> str:
    queue = Queue()
    state = queue.play(queue.plain(allowed=False), queue.turn(allowed=True, left=6, queued=2))
    return with_room(state, 2)


@ROW_CHECKS.row("turn", "at its turn: refused")
def _() -> str:
    queue = Queue().holds()
    state = queue.play(queue.turn(allowed=False))
    assert queue.slept(0) == pytest.approx(0.3)
    assert queue.steps[1].held_ms == T0 + 300
    return state


@ROW_CHECKS.row("turn", "at its turn: admitted, others wait behind")
def _() -> str:
    full = Queue().holds()
    assert full.play(full.turn(allowed=True)) == "turn"
    queue = Queue().holds()
    return with_room(queue.play(queue.turn(allowed=True, left=9, queued=2)), 3)


@ROW_CHECKS.row("turn", "at its turn: admitted, nobody waits behind")
def _() -> str:
    queue = Queue(followers=0).holds()
    state = queue.play(queue.turn(allowed=True, left=9))
    assert not queue.steps[1].takes_next
    return state


@ROW_CHECKS.row("turn", "the head gives up")
def _() -> str:
    queue = Queue(timeout=0.25).holds()
    with pytest.raises(RateLimitExceeded) as caught:
        queue.play(queue.turn(allowed=False))
    assert queue.slept(0) == pytest.approx(0.25), "its timeout ends before its turn"
    assert caught.value.retry_after == pytest.approx(0.4), "the time to its turn"
    return queue.state()


@ROW_CHECKS.row("free calls", "asked plainly: admitted")
def _() -> str:
    queue = Queue().holds(free_calls=3)
    state = queue.play(queue.plain(allowed=True))
    return "free calls, one less" if state == "free calls 2" else state


@ROW_CHECKS.row("free calls", "asked plainly: refused")
def _() -> str:
    queue = Queue().holds(free_calls=3)
    state = queue.play(queue.plain(allowed=False))
    assert queue.slept(1) == pytest.approx(0.3), "it asks at its turn, and takes no new one"
    return state


def with_room(state: str, free_calls: int) -> str:
    return "turn; free calls if there is room" if state == f"free calls {free_calls}" else state


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=lambda row: f"{row.before}: {row.event}")
def test_each_row_of_the_table(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_the_table_and_the_checks_have_the_same_rows() -> None:
    ROW_CHECKS.check_complete()


def test_a_turn_that_is_over_is_used_at_once() -> None:
    queue = Queue().holds(due_in_s=-1.0)
    queue.play(queue.turn(allowed=True))
    assert len(queue.steps) == 1


def test_who_is_not_the_head_leaves_the_turn_alone() -> None:
    """A waiter whose timeout ends while nobody has been refused sends out of turn."""
    queue = Queue().holds()
    outside = PermitWaiter(queue.head._queues, queue.command, 0.0)
    outside._queues.join(outside)
    operation = wait_for_turn(queue.command, queue.turns, outside)
    assert next(operation) is queue.command
    with pytest.raises(RateLimitExceeded):
        operation.send(queue.plain(allowed=False)(queue.command))
    assert queue.head.queue.turn is not None


def test_no_waiter_sleeps_for_more_than_ten_windows_after_there_was_room() -> None:
    queue = Queue().holds(due_in_s=3600.0)
    queue.play(queue.turn(allowed=False))
    assert queue.slept(0) == pytest.approx(10.0)


def test_with_leases_no_place_is_taken_for_the_next_waiter() -> None:
    """It asks plainly, as its call may lease permits for the others."""
    queue = Queue().holds()
    queue.turns.takes_next = False
    assert queue.play(queue.turn(allowed=True, left=9)) == "no turn"


@pytest.mark.parametrize("by_turns", [True, False])
def test_the_clock_of_a_store_of_ones_own_counts(by_turns: bool) -> None:
    """The limiter has another one, and asks no more often for it."""
    clock = ManualClock()
    store = MemoryStore(clock)
    with Limiter(store, "1/minute 1 buckets") as limiter:
        limiter.acquire("k")
        if by_turns:
            limiter.try_acquire("k", enqueue=True)
        assert limiter.acquire("k").now_ms == clock.now_ms()
        assert sum(clock.slept) == pytest.approx(120.0 if by_turns else 60.0)
        assert limiter.stats("k").blocked <= 1, "of the window since then"
