"""Every row of the table in `waiting/waiting.py`."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Decision, Limit, Limiter, RateLimitExceeded
from distwindow.limiter.decider import wait_until_admitted
from distwindow.ring.key import AnyKey
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.steps import Sleep
from distwindow.stores.memory import MemoryStore
from distwindow.waiting import waiting as wait_queue
from distwindow.waiting.waiting import PermitWaiter, WaitQueues
from tests.clock_and_stores import ManualClock
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(wait_queue, "-")
COMMAND = CommandCache("unit", "10/second").acquire_command("k")


class Queue:
    """The queue of one key, without threads: nobody sleeps in `wait` here."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queues = WaitQueues(self.clock)

    def waiter(self, timeout: float | None = None) -> PermitWaiter:
        return PermitWaiter(self.queues, COMMAND, timeout)

    def join(self, timeout: float | None = None) -> PermitWaiter:
        waiter = self.waiter(timeout)
        waiter._queues.join(waiter)
        return waiter

    def refuse(self, head: PermitWaiter, retry_after: float) -> None:
        limit = Limit("10/second")
        decision = Decision(
            False, "k", 1, limit, 0, retry_after, 1.0, 0.0, "over_limit", "store", 0
        )
        head.on_refused(decision)

    def where(self, waiter: PermitWaiter) -> str:
        queue = self.queues.by_name.get(COMMAND.charges[0].ring)
        if queue is None or waiter not in queue.waiting:
            return "left"
        return "head" if waiter.is_head else "waiting"


def waits(queue: Queue, waiter: PermitWaiter) -> str:
    """Call `wait` without a sleep, and leave the queue after an exception, as callers do. Return
    the state of the waiter.
    """
    try:
        waiter.wait()
    except RateLimitExceeded:
        waiter.leave()
        return f"{queue.where(waiter)}, with RateLimitExceeded"
    return "sends out of turn" if queue.where(waiter) == "waiting" else queue.where(waiter)


@ROW_CHECKS.row("-", "joins an empty queue")
def _() -> str:
    queue = Queue()
    return queue.where(queue.join())


@ROW_CHECKS.row("-", "joins")
def _() -> str:
    queue = Queue()
    queue.join()
    return queue.where(queue.join())


@ROW_CHECKS.row("waiting", "the one before leaves")
def _() -> str:
    queue = Queue()
    first, second = queue.join(), queue.join()
    first.leave()
    assert second._wake_up.sleep(0)  # it was woken
    return queue.where(second)


@ROW_CHECKS.row("waiting", "the head is refused for longer than its own timeout")
def _() -> str:
    queue = Queue()
    queue.refuse(queue.join(), 5.0)
    return waits(queue, queue.waiter(timeout=1.0))


@ROW_CHECKS.row("waiting", "its timeout ends, and the head was refused")
def _() -> str:
    queue = Queue()
    head, waiter = queue.join(), queue.join(timeout=1.0)
    queue.refuse(head, 0.5)
    queue.clock.move(1000)
    with pytest.raises(RateLimitExceeded):
        waiter._remaining_s_or_raise()
    waiter.leave()
    return f"{queue.where(waiter)}, with RateLimitExceeded"


@ROW_CHECKS.row("waiting", "its timeout ends, and nobody was refused")
def _() -> str:
    queue = Queue()
    queue.join()
    return waits(queue, queue.waiter(timeout=0.0))


@ROW_CHECKS.row("head", "is refused")
def _() -> str:
    queue = Queue()
    head = queue.join()
    queue.refuse(head, 0.5)
    return f"{queue.where(head)}, asleep until its permits"


@ROW_CHECKS.row("head", "permits of the key are given back in this process")
def _() -> str:
    queue = Queue()
    head, second = queue.join(), queue.join()
    queue.refuse(head, 0.5)
    queue.queues.on_freed(COMMAND.charges)
    assert head._wake_up.sleep(0)
    assert not second.consume_wake()
    asks = head.consume_wake() and not head.consume_wake()
    return f"{queue.where(head)}, and {'asks at once' if asks else 'sleeps on'}"


@ROW_CHECKS.row("head", "is admitted, or raises")
def _() -> str:
    queue = Queue()
    head, second = queue.join(), queue.join()
    head.leave()
    head.leave()  # as callers do, who may have been interrupted in the first
    woken = second._wake_up.sleep(0) and queue.where(second) == "head"
    return f"{queue.where(head)}; the next is woken" if woken else "nobody is woken"


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=lambda row: f"{row.before}: {row.event}")
def test_each_row_of_the_table(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_the_table_and_the_checks_have_the_same_rows() -> None:
    ROW_CHECKS.check_complete()


def test_a_refusal_from_before_a_reset_refuses_nobody_behind() -> None:
    """The head's call was on its way to the store when the key was reset."""
    queue = Queue()
    head, second = queue.join(), queue.join(timeout=1.0)
    queue.queues.on_freed(COMMAND.charges)
    queue.refuse(head, 5.0)
    assert second._remaining_s_or_raise() == 1.0


def test_a_refusal_from_before_permits_were_given_back_refuses_nobody_behind() -> None:
    queue = Queue()
    head, second = queue.join(), queue.join(timeout=1.0)
    queue.refuse(head, 5.0)
    queue.queues.on_freed(COMMAND.charges)
    assert second._remaining_s_or_raise() == 1.0


def test_permits_that_are_given_back_before_the_caller_has_joined_are_asked_for_at_once() -> None:
    limiter = Limiter("memory://", "1/minute", time=ManualClock())
    decider: Any = limiter.decider
    decide, limiter_asks = decider.decide_locally, 0

    def refused_before_a_reset(key: AnyKey, cost: int) -> Decision:
        nonlocal limiter_asks
        limiter_asks += 1
        decision: Decision = decide(key, cost)
        if not decision.allowed:
            limiter.reset(key)  # by another thread
        return decision

    decider.decide_locally = refused_before_a_reset
    for asks in (1, 3):
        assert limiter.acquire("k", timeout=5).wait == 0
        assert limiter_asks == asks


def test_the_timeout_of_a_waiter_is_that_of_all_its_refusals_together() -> None:
    queue = Queue()
    waiting = wait_until_admitted(COMMAND, queue.join(timeout=1.0))
    decision = Decision(
        False, "k", 1, Limit("10/second"), 0, 0.6, 1.0, 0.0, "over_limit", "store", 0
    )
    assert next(waiting) is COMMAND
    assert waiting.send(decision) == Sleep(0.6)
    assert waiting.send(None) is COMMAND
    with pytest.raises(RateLimitExceeded):
        waiting.send(decision._replace(now_ms=600))


def test_who_has_left_its_queue_sleeps_on_when_permits_are_given_back() -> None:
    queue = Queue()
    admitted, _ = queue.join(), queue.join()
    admitted.leave()
    queue.queues.on_freed(COMMAND.charges)
    assert not admitted.consume_wake()


def test_a_waiter_that_never_joined_can_leave() -> None:
    queue = Queue()
    head = queue.join()
    queue.waiter().leave()
    assert queue.where(head) == "head"


def test_the_queue_is_dropped_when_its_last_waiter_leaves() -> None:
    queue = Queue()
    queue.join().leave()
    assert queue.queues.by_name == {}


def test_a_waiter_that_is_interrupted_as_it_joins_leaves_no_queue() -> None:
    """Whoever finds a queue of a name waits behind it, and `try_hold` is refused."""

    class Interrupting(dict[bytes, Any]):
        def __setitem__(self, name: bytes, queue: Any) -> None:
            super().__setitem__(name, queue)
            raise KeyboardInterrupt

    queue = Queue()
    queue.queues.by_name = Interrupting()
    waiter = queue.waiter()
    with pytest.raises(KeyboardInterrupt):
        waiter.wait()
    waiter.leave()
    assert not queue.queues.by_name


def test_a_timeout_is_counted_by_the_clock_of_the_queues() -> None:
    """The store has a clock of its own here, which begins anywhere."""
    limiter = Limiter(MemoryStore(ManualClock()), "1/minute")
    assert limiter.acquire("k", timeout=0)
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("k", timeout=10)
    assert limiter.acquire("k", timeout=100)
