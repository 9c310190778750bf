"""Whom the refusal of a head wakes: exactly those behind it whose timeouts end before it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distwindow import Decision, Limit, RateLimitExceeded
from distwindow.runtime.command_cache import CommandCache
from distwindow.waiting.waiting import AsyncPermitWaiter, PermitWaiter, WaitQueues
from tests.clock_and_stores import ManualClock

COMMAND = CommandCache("property", "10/second").acquire_command("k")
QUARTERS = st.integers(0, 40).map(lambda quarters: quarters / 4)  # exact as floats
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), st.one_of(st.none(), QUARTERS)),
        st.tuples(st.just("is refused"), QUARTERS),
        st.tuples(st.just("passes"), QUARTERS),
        st.tuples(st.just("leaves"), st.integers(0, 20)),
        st.tuples(st.just("is reset"), st.none()),
    ),
    max_size=30,
)


SOME_ARE_OUTLASTED = [
    *(("joins", 1.0), ("joins", 6.0), ("joins", 9.0)),
    *(("is refused", 5.0), ("is refused", 8.0), ("is refused", 10.0)),
]


def refusal(retry_after: float) -> Decision:
    limit = Limit("10/second")
    return Decision(False, "k", 1, limit, 0, retry_after, 1.0, 0.0, "over_limit", "store", 0)


class History:
    """A queue, and the moments at which its waiters give up, as a list of their own."""

    def __init__(self, waiter_type: type[PermitWaiter]) -> None:
        self.clock = ManualClock(auto_advance=False)
        self.queues = WaitQueues(self.clock)
        self.waiter_type = waiter_type
        self.waiting: list[tuple[PermitWaiter, float | None]] = []
        self.is_reset = False
        self.join(None)

    def join(self, timeout: float | None) -> None:
        waiter = self.waiter_type(self.queues, COMMAND, timeout)
        waiter._queues.join(waiter)
        deadline = None if timeout is None else self.clock.monotonic() + timeout
        self.waiting.append((waiter, deadline))

    def run(self, event: str, value: Any) -> list[PermitWaiter]:
        """Let `event` happen. Return who has to be woken."""
        head, _ = self.waiting[0]
        if event == "joins":
            self.join(value)
        elif event == "passes":
            self.clock.move(int(value * 1000))
        elif event == "leaves":
            waiter, _ = self.waiting[value % len(self.waiting)]
            if len(self.waiting) == 1:
                return []
            waiter.leave()
            self.waiting = [other for other in self.waiting if other[0] is not waiter]
            return [self.waiting[0][0]]
        elif event == "is reset":
            self.queues.on_freed(COMMAND.charges)
            self.is_reset = True
            return [head]
        elif self.is_reset:  # the head asks again, as the refusal may be from before
            head.on_refused(refusal(value))
            assert head.consume_wake()
            self.is_reset = False
        else:
            head.on_refused(refusal(value))
            until = self.clock.monotonic() + value
            behind = self.waiting[1:]
            return [
                waiter for waiter, deadline in behind if deadline is not None and deadline < until
            ]
        return []

    def check_raises(self, woken: list[PermitWaiter]) -> None:
        for waiter in woken:
            if waiter is not self.waiting[0][0]:
                with pytest.raises(RateLimitExceeded):
                    waiter._remaining_s_or_raise()


@settings(deadline=None)
@given(EVENTS)
@example(SOME_ARE_OUTLASTED)
def test_a_refusal_wakes_those_threads_that_it_outlasts(events: list[tuple[str, Any]]) -> None:
    history = History(PermitWaiter)
    for event, value in events:
        expected = history.run(event, value)
        woken = [waiter for waiter, _ in history.waiting if waiter._wake_up.sleep(0)]
        assert woken == expected
        history.check_raises(woken)


@pytest.mark.event_loops
@settings(deadline=None)
@given(EVENTS)
@example(SOME_ARE_OUTLASTED)
def test_a_refusal_wakes_those_tasks_that_it_outlasts(events: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        history = History(AsyncPermitWaiter)
        for event, value in events:
            expected = history.run(event, value)
            await asyncio.sleep(0)
            woken: list[Any] = [waiter for waiter, _ in history.waiting]
            woken = [waiter for waiter in woken if waiter._event.is_set()]
            assert woken == expected
            for waiter in woken:
                waiter._event.clear()
            history.check_raises(woken)

    asyncio.run(run())
