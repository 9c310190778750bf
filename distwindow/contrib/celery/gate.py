"""The gate: holds limited tasks back in the worker's parent, and starts them as limits allow.

All work is done by `run_pending`, by one caller at a time: a call that comes while another works
(from a callback of the pool, another thread or greenlet) only has that one look again. So lines
are never seen half changed, and nothing recurses, though a slot that is given back may be granted
to another line at once.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Any

from ...observer import Tally
from ...ring.clock import NEVER
from .admission import LOOK_EVERY_S, RUN, Answer, TaskAdmission
from .counts import GateCounts
from .limits import LimitTable
from .lines import ParkedTask, TaskQueue, TaskQueues
from .pool_slots import PoolSlots
from .worker import CeleryWorkerPort, OneTimer, is_revoked, logger, task_parked, task_sent_back

_WORK_S = 0.05
"""After this time the event loop gets its turn, and the gate the next one, a millisecond later."""
_TRY_AGAIN_S = 5.0
"""After the broker has not taken a message back, or the result backend not said if a task is
revoked.
"""
_SHORTEST_SENT_BACK_S = 1.0
_MOST_SENT_BACK, _SENT_BACK_IN_S = 100, 0.2
"""So many tasks without room are sent back in so many seconds at most, for the broker's sake."""
_CONNECTION_ENDED = object()
"""Stands among the arrivals behind those of a connection to the broker that has ended."""


class Gate:
    """The limited tasks of one worker. Requests are Celery's `Request`."""

    def __init__(
        self,
        worker: CeleryWorkerPort,
        slots: PoolSlots,
        admission: TaskAdmission,
        limits: LimitTable,
        *,
        max_parked: int,
        max_hold_s: float,
        tally: Tally | None = None,
        source: str = "store",
    ) -> None:
        """`tally` adds up for an observer what is decided by `source`."""
        self.worker = worker
        self._slots = slots
        self.limits = limits
        self._max_parked = max_parked
        self._max_hold_s = max_hold_s
        self.admission = admission
        self.lines: TaskQueues[Any] = TaskQueues()
        # Until its eta another worker keeps a task, which has half of the time left then.
        self._longest_away_s = max_hold_s / 2
        self._counts = GateCounts(tally, self.lines, worker, source)
        self.parked = 0
        """How many tasks are here whose line has waited for its limit since they came."""
        self.started = 0
        self.sent_back = 0
        self._raised = 0
        self._arrivals: deque[Any] = deque()
        self._ended_connections = 0
        """How many times `_CONNECTION_ENDED` is among the arrivals."""
        self._with_revoked: list[str] = []
        """Tasks of which some that wait here have been revoked, and are to leave now."""
        self._granted: deque[TaskQueue[Any]] = deque()
        self._without_room: deque[ParkedTask[Any]] = deque()
        """Tasks to be sent back because there is more than `max_parked`."""
        self._may_send_back = _MOST_SENT_BACK
        self._may_send_back_until_s = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._pumping = False
        self._again = False
        self._look_after_s = NEVER
        self._timer = OneTimer(worker, self.run_pending)

    @property
    def waiting_for_limits(self) -> int:
        """The number of tasks that need no slot now, because their limits do not let them start."""
        return sum(line.size for line in self.lines if line.state == "waiting")

    def process(self, request: Any) -> None:
        """Take a task that the consumer has received: Celery's `process_task`."""
        if not self.limits.of(request.task).parts:
            self._slots.pass_on(request, self.lines.size > 0)
        else:
            self._arrivals.append(request)
            self.run_pending()
        self._slots.block_consumer()

    def open(self) -> None:
        """Begin, or begin again with a new connection to the broker."""
        self._closed = False
        self._timer.forget()

    def close(self) -> None:
        """Forget all tasks that have not been started, and have the broker give them to a worker
        again: here they could not be acknowledged any more, because a delivery tag ends with its
        channel.

        Under gevent another greenlet may be at work, and wait for the store until there is a new
        connection, whose tasks are not to be forgotten.
        """
        self._closed = True
        self._ended_connections += 1
        self._arrivals.append(_CONNECTION_ENDED)
        self.worker.give_back(self._slots.forget_tasks())
        self.run_pending()

    def drop_revoked(self, task: str) -> None:
        """Remove the revoked tasks of this name now, and not when their lines ask."""
        self._with_revoked.append(task)
        self.run_pending()

    def run_pending(self) -> None:
        """Do whatever can be done now, and set the timer for the rest."""
        with self._lock:
            if self._pumping:
                self._again = True
                return
            self._pumping = True
        try:
            while True:
                self._again = False
                is_done = self._work()
                self._set_timer(is_done)
                with self._lock:
                    if self._again and is_done:
                        continue
                    self._pumping = False
                if self._again:  # the timer may have fired before, in a thread of its own
                    self._set_timer(is_done)
                return
        except BaseException:  # a signal handler may raise anything here
            self._pumping = False
            self._set_timer(False)
            raise

    def _work(self) -> bool:
        """Return False if there is more to do, and the event loop should have its turn first."""
        worker = self.worker
        ends_s = worker.monotonic() + _WORK_S
        while True:
            self._take_arrivals()
            if self._with_revoked:
                self._drop_revoked()
            if self.admission.end_pause():
                for line in self.lines:
                    if line.waits_for_store:
                        self.lines.stop_waiting(line)
            self.lines.advance(worker.monotonic())
            while (ready := self.lines.pop_ready()) is not None:
                self._slots.take(partial(self._grant, ready))
            self._look_after_s = self._slots.serve(by_turns=self.lines.size > 0)
            if not self._granted:
                # At last: one whose eta was long is overdue when it comes, and may start now.
                return self._send_back_overdue(ends_s) and self._send_back_without_room(ends_s)
            while self._granted:
                self._serve(self._granted.popleft())
                if worker.monotonic() > ends_s:
                    return False

    def _take_arrivals(self) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            if request is _CONNECTION_ENDED:
                self._ended_connections -= 1
                self._forget_all()
            elif not self._ended_connections and not self._closed:
                self._add(request)
            else:
                self.worker.give_back([request])

    def _drop_revoked(self) -> None:
        tasks, self._with_revoked = set(self._with_revoked), []
        for line in self.lines:
            for entry in list(line.entries) if line.task in tasks else ():
                if not entry.left and is_revoked(entry.item):
                    self._leave(entry)

    def _grant(self, line: TaskQueue[Any]) -> None:
        self._granted.append(line)
        self.run_pending()

    def _add(self, request: Any) -> None:
        task = request.task
        items = self.limits.of(task).items(request.args, request.kwargs, request.id)
        worker = self.worker
        kept_until_s = worker.received_s(request) + self._max_hold_s
        entry = self.lines.add(task.name, request, items, kept_until_s, worker.rank(request))
        self._watch_expiry(entry)
        if entry.line.state == "waiting":
            entry.parked = True
            self._park(entry.line, 0.0, [entry])

    def _watch_expiry(self, entry: ParkedTask[Any], earliest_s: float = 0.001) -> None:
        """Look at `entry` when it expires, too: its line may ask much later."""
        after_s = self.worker.expires_after_s(entry.item)
        if after_s is not None:
            entry.expires_s = self.worker.monotonic() + max(after_s + 0.001, earliest_s)
            self.lines.keep_until(entry, min(entry.expires_s, entry.kept_until_s))

    def _serve(self, line: TaskQueue[Any]) -> None:
        """Ask for the first task of a line, which holds a slot."""
        # All lines are about to be forgotten then.
        entry = None if self._is_ending() else self._head(line)
        if entry is None:
            self._slots.give_back()
            return
        answer = RUN
        if not entry.admitted:
            if self._waits_behind(line, entry):
                self._slots.give_back()
                return
            try:
                answer = self.admission.may_run(entry.items, line.failures)
            except BaseException:  # of a signal handler: the gate goes on with its next call
                self._slots.give_back()
                self.lines.ask_again(line)
                raise
            line.failures = answer.failures
            line.waits_for_store = answer.store_is_away
        if entry.left or self._is_ending():  # while the store was asked
            self._slots.give_back()
            self.lines.ask_again(line)
        elif answer.admitted and not answer.wait_s:
            line.started += 1
            self.started += 1
            self._counts.started(entry, answer)
            self._go_on(entry, answer)
            self._slots.start(entry.item)
        else:
            if answer.admitted:
                entry.admit()
            self._slots.give_back()
            until_s = self.worker.monotonic() + answer.wait_s
            if answer.permits is None:
                self.lines.wait(line, until_s)
            else:
                self.lines.use_up(answer.permits, until_s)
                self.lines.wait_for(line, answer.permits)
            self._park(line, answer.wait_s, self.lines.park(line))

    def _is_ending(self) -> bool:
        """True if a connection has ended, or the worker is told to stop: its event loop may not go
        on then, and what a prefork pool starts without it is not acknowledged.
        """
        return self._ended_connections > 0 or self.worker.is_stopping()

    def _go_on(self, entry: ParkedTask[Any], answer: Answer) -> None:
        """Take a task that starts out of its line, whose next one asks: at once, or when there can
        be a permit for it again.
        """
        line, permits, left = entry.line, answer.permits, answer.left
        following = next((one for one in line.entries if one is not entry and not one.left), None)
        if permits is not None and left is not None:
            if following is not None:
                permits = permits._replace(cost=following.cost_of(permits))
            is_needed = following is not None or self.lines.is_waited_for(permits)
            if permits.cost > left and is_needed:
                self.lines.use_up(permits, self.worker.monotonic() + answer.left_for_s)
        self._leave(entry)
        self.lines.has_answer(line)
        if following is not None and not self._waits_behind(line, following):
            self.lines.ask_again(line)

    def _waits_behind(self, line: TaskQueue[Any], entry: ParkedTask[Any]) -> bool:
        """True if a limit of the first task is used up, as is known: its line waits for it then."""
        until_s = self.lines.wait_behind(line, entry.items)
        if until_s is not None:
            wait_s = max(0.0, until_s - self.worker.monotonic())
            self._park(line, wait_s, self.lines.park(line))
        return until_s is not None

    def _head(self, line: TaskQueue[Any]) -> ParkedTask[Any] | None:
        """Return the first task of a line that is to run; drop those that are another worker's by
        now, and those that were revoked or have expired, which Celery announces and acknowledges.
        """
        while line.state == "asking" and (entry := line.head) is not None:
            if self._is_taken_away(entry):
                continue
            if not is_revoked(entry.item):
                return entry
            self._leave(entry)
        return None

    def _is_taken_away(self, entry: ParkedTask[Any]) -> bool:
        """Forget a task that the broker has given to another worker, as this one was frozen."""
        is_taken: bool = self.worker.is_taken_away(entry.item)
        if is_taken:
            self._leave(entry)
            self.worker.forget(entry.item)
        return is_taken

    def _park(self, line: TaskQueue[Any], wait_s: float, begin: list[ParkedTask[Any]]) -> None:
        """Do what follows when the tasks `begin` of a line begin to wait for their limit."""
        if line.began_s is None:
            line.began_s = self.worker.monotonic()
            logger.info(
                "tasks %s with the limit key %r begin to wait; the next may start in %.3f s",
                *(line.task, line.key, wait_s),
            )
        self._counts.parked(line, begin)
        for entry in begin:
            self.parked += 1
            self._adjust_prefetch()
            item = entry.item
            task_parked.send(sender=item.task, request=item, key=line.key, wait_s=wait_s)
            if self.parked > self._max_parked and (last := line.last_with_room) is not None:
                last.has_room = False
                self._without_room.append(last)

    def _leave(self, entry: ParkedTask[Any]) -> None:
        if entry.left:
            return
        line = entry.line
        self.lines.remove(entry)
        if entry.parked:
            self.parked -= 1
            self._adjust_prefetch()
            self._counts.changed()
        if line.state == "gone" and line.began_s is not None:
            logger.info(
                "no task %s with the limit key %r waits any more, after %.3f s and %d started",
                *(line.task, line.key, self.worker.monotonic() - line.began_s, line.started),
            )

    def _adjust_prefetch(self) -> None:
        """Fetch one more message for each task that is parked, up to a bound."""
        if self._ended_connections:
            return  # the prefetch count of a new connection was never raised for these tasks
        wanted = min(self.parked, self._max_parked)
        self._raised = self.worker.adjust_prefetch(self._raised, wanted)

    def _forget_all(self) -> None:
        self.worker.give_back(self.lines.clear())
        self._without_room.clear()
        self.parked = self._raised = 0  # a new connection begins with the usual prefetch count
        self._counts.changed()
        # Slots that lines were granted meanwhile are given back by `_serve`.

    def _send_back_overdue(self, ends_s: float) -> bool:
        """Send back what may be kept no longer. Return False if there is more."""
        now_s = self.worker.monotonic()
        while (entry := self.lines.pop_overdue(now_s)) is not None:
            if now_s >= entry.expires_s and is_revoked(entry.item):
                self._leave(entry)
            elif now_s >= entry.expires_s:
                # The clock of the day has been set back, or the result backend is away.
                self._watch_expiry(entry, _TRY_AGAIN_S)
            elif entry.admitted and now_s < (ends := entry.kept_until_s + self._max_hold_s / 2):
                # It starts soon, with the permits that are counted for it. Later they are lost:
                # the broker would give the message to another worker, too.
                self.lines.keep_until(entry, min(entry.expires_s, ends))
            else:
                self._send_back(entry)
            if self.lines.any_ready or self.worker.monotonic() > ends_s:
                return False
        return True

    def _send_back_without_room(self, ends_s: float) -> bool:
        """Send back what is beyond `max_parked`, some at a time. Return False if there is more that
        may be sent back now.
        """
        while self._without_room:
            entry, now_s = self._without_room[0], self.worker.monotonic()
            if entry.left or entry.admitted or self.parked <= self._max_parked:
                entry.has_room = True
                self._without_room.popleft()
                continue
            if now_s >= self._may_send_back_until_s:
                self._may_send_back = _MOST_SENT_BACK
                self._may_send_back_until_s = now_s + _SENT_BACK_IN_S
            if not self._may_send_back:
                return True
            if self.lines.any_ready or now_s > ends_s:
                return False
            self._without_room.popleft()
            self._may_send_back -= 1
            self._send_back(entry)
        return True

    def _send_back(self, entry: ParkedTask[Any]) -> None:
        request, line, now_s = entry.item, entry.line, self.worker.monotonic()
        if not self._is_taken_away(entry) and is_revoked(request):
            self._leave(entry)
        # What came over a connection that has ended is delivered again: a copy would run, too.
        if entry.left or self._ended_connections:
            return
        if not self.worker.can_send_back(request):
            self.lines.keep_until(entry, entry.expires_s)
            return
        turn_s = self._turn_s(entry, now_s)
        if self._ended_connections:
            return
        if self.lines.any_ready:  # one may start, so there may be room
            if entry.has_room:
                self.lines.keep_until(entry, now_s)
            else:
                self._without_room.appendleft(entry)
            return
        delay_s = min(turn_s - now_s, self._longest_away_s)
        try:
            eta = self.worker.send_back(request, delay_s)
        except Exception as exc:  # whatever the broker's client raises: the task stays here
            logger.warning(
                "sending %s[%s] back failed (%s: %s); it is kept, and sent back in %g s",
                *(request.task.name, request.id, type(exc).__name__, exc, _TRY_AGAIN_S),
            )
            self.lines.keep_until(entry, now_s + _TRY_AGAIN_S)
            return
        seconds = [
            cost * limit.per / limit.amount for _, limits, cost in entry.items for limit in limits
        ]
        line.next_turn_s = now_s + delay_s + max(seconds, default=0.0)
        self.sent_back += 1
        self._counts.sent_back(entry)
        self._leave(entry)
        task_sent_back.send(sender=request.task, request=request, key=line.key, eta=eta)

    def _turn_s(self, entry: ParkedTask[Any], now_s: float) -> float:
        """Return when a task that is sent back is to come again, which is not before a while.

        why it is sent back            its turn
        it was kept for too long       the worker's own
        the worker has no room for it  the fleet's; the worker's own where that is unknown: while
                                       the store is away, under paced limits, once its line may ask,
                                       for costs that are not those of the first in the line, and
                                       for a line whose key cannot be served

        Turns of a worker are as far apart as the limit admits tasks. Several workers that gave out
        turns for want of room would give the same moments, and the tasks come back as many times
        too early as there are workers, to find no room again. What was kept for too long has half
        of `max_hold` when it comes back, whenever that is within the other half: how often that
        goes back does not depend on its turn, so it costs no call.

        The limiter may admit the call. Then the first task of the line has its permits, and may
        start: so only a task of the same costs asks.
        """
        line, head = entry.line, entry.line.head
        turn_s = line.next_turn_s
        asks = not entry.has_room and line.state == "waiting" and not line.failures
        if asks and head is not None and head.items == entry.items:
            decision = self.admission.take_turn(entry.items)
            now_s = self.worker.monotonic()
            if decision is not None and decision.allowed:
                head.admit()
                self.lines.stop_waiting(line)
            elif decision is not None:
                turn_s = now_s + decision.retry_after
        return max(now_s + min(_SHORTEST_SENT_BACK_S, self._longest_away_s), turn_s)

    def _set_timer(self, is_done: bool) -> None:
        now_s = self.worker.monotonic()
        next_s = self.lines.next_s() if is_done else now_s
        if self._without_room:
            next_s = min(next_s, self._may_send_back_until_s)
        next_s = min(next_s, now_s + self._look_after_s)
        if next_s < NEVER:
            if self.admission.is_paused:
                next_s = min(next_s, now_s + LOOK_EVERY_S)
            self._timer.call_by(next_s)
