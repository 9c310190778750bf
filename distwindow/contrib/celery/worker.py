"""The worker as its gate uses it, and the signals of the gate. These are sent in the worker's
parent, with the task as the sender.

    @task_parked.connect
    def on_parked(sender, request, key, wait_s, **kwargs): ...

A receiver runs on the worker's event loop, so it must return at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery.utils.dispatch import Signal
from celery.utils.log import get_logger
from celery.worker import state

from .send_back import (
    GivenBack,
    can_be_reached,
    can_be_sent_back,
    forget,
    is_taken_away,
    line_rank,
    origin_queue,
    publish_copy,
    survive_lost_connections,
)

logger = get_logger("celery.distwindow")

task_parked = Signal(name="task_parked", providing_args={"request", "key", "wait_s"})
"""A task begins to wait for its limit. `request` is Celery's `Request`, `key` the limit key, and
`wait_s` the seconds until the first task of its line may ask again.
"""

task_sent_back = Signal(name="task_sent_back", providing_args={"request", "key", "eta"})
"""A task that waited too long to be kept was sent back to its queue. `eta` is the time, a
`datetime`, before which no worker takes it up again.
"""

_LONGEST_SLEEP_S = 1.0
"""Timers that are replaced stay in the timer's heap until they would fire; so none is far away."""
_SHORTEST_SLEEP_S = 0.001
"""The event loop gets its turn between two calls."""


class CeleryWorkerPort:
    """Celery's worker as the gate uses it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.scheduled: dict[Any, None] = {}
        """The requests whose eta is to come, which Celery's timer keeps."""
        self.consumer: Any = None
        """The consumer, while it is connected."""
        self._channel: Any = None
        """The channel of its messages."""
        self._qos: Any = None
        self._max_prefetch: int | None = None
        """`max_prefetch` of `_qos` as Celery has set it."""
        self._given_back = GivenBack()

    monotonic = staticmethod(time.monotonic)

    def call_after(self, seconds: float, callback: Callable[[], None]) -> Any:
        """Call `callback` on the worker's event loop; return what `cancel` takes."""
        if self._has_sleeping_timer:
            timer = threading.Timer(seconds, callback)
            timer.daemon = True
            timer.start()
            return timer
        return self._timer.call_after(seconds, callback)

    def cancel(self, timer: Any) -> None:
        if self._has_sleeping_timer:
            timer.cancel()
        else:
            self._timer.cancel(timer)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop; may be called by any thread."""
        hub = self._worker.hub
        if hub is None:
            self.call_after(0, callback)
        else:
            hub.call_soon(callback)

    @property
    def _timer(self) -> Any:
        # A process that has had a worker before may keep its event loop, with a timer of its own.
        hub = self._worker.hub
        return self._worker.timer if hub is None else hub.timer

    @property
    def _has_sleeping_timer(self) -> bool:
        """True on transports without an event loop, such as a database: Celery's timer is a thread
        there that sleeps until the moment it knows, up to two seconds, whatever is added meanwhile.
        """
        return self._worker.hub is None and not getattr(self._worker.pool, "is_green", False)

    def is_stopping(self) -> bool:
        """True once the worker is told to shut down, warm or cold."""
        codes = (state.should_stop, state.should_terminate)
        return any(code is not None and code is not False for code in codes)  # 0 is one, too

    def received_s(self, request: Any) -> float:
        """Return when the worker received the message, by `monotonic`."""
        return _received(request)[0]

    def adjust_prefetch(self, raised: int, wanted: int) -> int:
        """Raise the prefetch count by `wanted` messages; it was raised by `raised`. Return how many
        it may now: the worker's settings may allow fewer.
        """
        if self.consumer is None:
            return raised
        qos = self.consumer.qos
        if qos is not self._qos:
            self._qos, self._max_prefetch = qos, getattr(qos, "max_prefetch", None)
        # What is not raised must not be lowered: at the end the worker would fetch one message at
        # a time. Celery sets the count anew, to its own, when tasks that ran at a reconnection end.
        raised = max(0, min(raised, qos.value - self.consumer.initial_prefetch_count))
        if self._max_prefetch is not None:
            # `worker_eta_task_limit` is for Celery's own raises, for tasks with an eta: those that
            # find no room are lowered later nevertheless.
            qos.max_prefetch = self._max_prefetch + max(raised, wanted)
        while raised < wanted:
            before = qos.value
            if qos.increment_eventually() <= before:
                break
            raised += 1
        while raised > wanted:
            qos.decrement_eventually()
            raised -= 1
        if self._max_prefetch is not None:
            qos.max_prefetch = self._max_prefetch + raised
        return raised

    def expires_after_s(self, request: Any) -> float | None:
        """Return in how many seconds the task expires; None if it does not."""
        if request.expires is None:
            return None
        left: timedelta = request.expires - datetime.now(request.expires.tzinfo)
        return left.total_seconds()

    def rank(self, request: Any) -> int:
        """Return the place of the task in its line; the smallest is first."""
        return line_rank(request.message)

    def is_taken_away(self, request: Any) -> bool:
        """True if the broker has given the message to another worker, or may do so now."""
        return is_taken_away(request.message, _received(request)[1])

    def forget(self, request: Any) -> None:
        """Drop a task that is another worker's now."""
        forget(request.message)
        state.task_ready(request)

    def give_back(self, requests: list[Any]) -> None:
        """Ask the broker to deliver tasks again whose connection has ended. They never start
        here.
        """
        for request in requests:
            if not request.acknowledged:
                self._given_back.add(request.message, _received(request)[1])
        if self.consumer is not None:  # the next connection, under gevent
            self._put_back(())

    def begin_connection(self, consumer: Any, end: Callable[[], None]) -> None:
        """Keep the consumer. `end` is called when kombu puts its messages back."""
        self.consumer = consumer
        channel = self._channel = consumer.task_consumer.channel

        def end_if_current() -> None:
            if self._channel is channel:
                end()

        survive_lost_connections(channel, end_if_current)
        self._put_back(consumer.connection_errors)

    def end_connection(self) -> None:
        self.consumer = self._channel = None
        scheduled = list(self.scheduled)
        self.scheduled.clear()
        self.give_back(scheduled)

    def _put_back(self, errors: tuple[type[Exception], ...]) -> None:
        """Put back what waited for a connection that has ended. Raises `errors`."""
        try:
            self._given_back.put_back(self.consumer.task_consumer.channel)
        except errors:
            raise  # to Celery, which makes the next connection
        except Exception as exc:
            logger.warning(
                "putting back the waiting tasks of a lost connection failed (%s: %s); the broker "
                "delivers them after its visibility timeout", type(exc).__name__, exc,
            )  # fmt: skip

    def can_send_back(self, request: Any) -> bool:
        message = request.message
        return can_be_sent_back(message) and can_be_reached(message, self._origin_queue(message))

    def send_back(self, request: Any, delay_s: float) -> datetime:
        """Publish the message again, to be taken up in `delay_s`, and acknowledge it. Return the
        time of that. Raises anything if the broker has not taken it, and then changes nothing.
        """
        eta = datetime.now(timezone.utc) + timedelta(seconds=delay_s)
        publish_copy(self._worker.app, request.message, eta, self._origin_queue(request.message))
        if self._worker.hub is None:
            request.acknowledge()
        else:
            # `acknowledge` would leave it to the event loop, up to a second later; a worker that is
            # killed meanwhile leaves the message in the queue twice.
            request.message.ack_log_error(logger, request.connection_errors)
            request.acknowledged = True
        state.task_ready(request)
        return eta

    def _origin_queue(self, message: Any) -> str | None:
        consumed = self.consumer.task_consumer if self.consumer is not None else None
        return origin_queue(message, consumed, self._worker.app.amqp.queues.values())


def _received(request: Any) -> tuple[float, float]:
    """Return when the worker received the message, by `time.monotonic` and by `time.time`."""
    return getattr(request, "distwindow_received", None) or (time.monotonic(), time.time())


class OneTimer:
    """The next call of the gate. There is one, because the event loop of kombu fires ten timers and
    may then sleep for a second.
    """

    def __init__(self, worker: CeleryWorkerPort, callback: Callable[[], None]) -> None:
        self._worker = worker
        self._callback = callback
        self._timer: Any = None
        self._number = 0
        self._is_set = False
        """False once the last timer has fired, which a thread of its own may do before it is known
        here, where the worker has no event loop."""
        self._at_s = 0.0

    def forget(self) -> None:
        """Drop the timer: Celery cancels one that is set while a connection to the broker fails."""
        self._is_set = False

    def call_by(self, at_s: float) -> None:
        """Call at `at_s` at the latest, and maybe earlier."""
        now_s = self._worker.monotonic()
        delay_s = min(max(at_s - now_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
        if self._is_set:
            if self._at_s <= now_s + delay_s:
                return
            self._worker.cancel(self._timer)
        self._at_s = now_s + delay_s
        self._number += 1
        self._is_set = True
        self._timer = self._worker.call_after(delay_s, partial(self._fire, self._number))

    def _fire(self, number: int) -> None:
        if number == self._number:
            self._is_set = False
        self._callback()


def is_revoked(request: Any) -> bool:
    """Ask Celery, which stores the state of a revoked task: its result backend may fail."""
    try:
        return bool(request.revoked())
    except Exception as exc:
        logger.warning("whether %s is revoked is unknown: %s", request.id, exc)
        return False
