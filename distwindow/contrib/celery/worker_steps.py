"""The bootsteps by which the gate becomes part of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.worker import state

from ...errors import ConfigurationError
from ..tasks import acquire_all
from .admission import TaskAdmission
from .gate import Gate
from .pool_slots import make_slots
from .send_back import (
    GivenBack,
    can_be_reached,
    can_be_sent_back,
    forget,
    is_taken_away,
    line_rank,
    origin_queue,
    publish_copy,
    restore_delivery,
    survive_lost_connections,
)
from .worker import logger


class GateStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Makes the gate once the pool is made, before the consumer takes `process_task`."""

    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        worker.distwindow_gate = None
        super().__init__(worker, **kwargs)

    def create(self, worker: Any) -> None:
        try:
            self._make_gate(worker)
        except ConfigurationError as exc:
            sentence = f"the worker does not start: {exc}"
            logger.critical("%s", sentence)
            raise StartRefused(sentence) from exc

    def _make_gate(self, worker: Any) -> None:
        limits = worker.app.distwindow_rate_limits
        settings = limits.settings()
        table = limits.table()
        table.check(worker.app.tasks)
        # Each call names its own limits; the limiter's own are never used.
        limiter = self.limiter = settings.limiter(limits.store, "1/second")
        port = CeleryWorkerPort(worker)
        admission = TaskAdmission(
            partial(acquire_all, limiter), time.monotonic, settings.on_store_error
        )
        limiter.on_health_change(admission.on_health_change)
        slots = make_slots(worker, lambda: port.call_soon(gate.run_pending))
        gate = worker.distwindow_gate = Gate(
            port, slots, admission, table, max_parked=settings.max_parked,
            max_hold_s=limits.max_hold_s(),
        )  # fmt: skip

        def process(request: Any) -> None:
            """Take a request when it has come and its eta, too. Before Celery 5.7 timers of a
            connection that has ended go on: what it had has been given back.
            """
            if request.eta is None or request in port.scheduled:
                port.scheduled.pop(request, None)
                gate.process(request)

        worker.process_task = process

    def start(self, worker: Any) -> None:
        gate = worker.distwindow_gate
        leave_out_of_autoscaling(worker, lambda: gate.waiting_for_limits)

    def stop(self, worker: Any) -> None:
        self.limiter.close()

    terminate = stop


class ConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Opens the gate with each connection to the broker, and closes it with its end."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        worker = consumer.controller
        worker.distwindow_gate.worker.begin_connection(consumer, lambda: self.stop(consumer))
        worker.distwindow_gate.open()

    def stop(self, consumer: Any) -> None:
        worker = consumer.controller
        worker.distwindow_gate.worker.end_connection()
        worker.distwindow_gate.close()

    close = terminate = stop


class StartRefused(ConfigurationError, SystemExit):
    """Ends the command `celery worker` with its sentence and the exit code 1.

    It is a `SystemExit`, so that Python shows the sentence without a traceback through Celery, and
    a `ConfigurationError` for an application that makes a worker itself.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = sentence


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
        codes = (state.should_stop, state.should_terminate)
        return any(code is not None and code is not False for code in codes)  # 0 is one, too

    def received_s(self, request: Any) -> float:
        received_s: float = getattr(request, "distwindow_received_s", None) or time.monotonic()
        return received_s

    def adjust_prefetch(self, raised: int, wanted: int) -> int:
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
        if request.expires is None:
            return None
        left: timedelta = request.expires - datetime.now(request.expires.tzinfo)
        return left.total_seconds()

    def rank(self, request: Any) -> int:
        return line_rank(request.message)

    def is_taken_away(self, request: Any) -> bool:
        return is_taken_away(request.message, _received_at(request))

    def forget(self, request: Any) -> None:
        forget(request.message)
        state.task_ready(request)

    def give_back(self, requests: list[Any]) -> None:
        for request in requests:
            if not request.acknowledged:
                self._given_back.add(request.message, _received_at(request))
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


@signals.task_received.connect  # type: ignore[untyped-decorator]  # Celery has no types
def _stamp(sender: Any, request: Any, **_: Any) -> None:
    """Note when a message was received: the broker counts its visibility timeout from then, and not
    from the moment at which its eta has come. And note how the original came, if it is a copy.
    """
    request.distwindow_received_s = time.monotonic()
    request.distwindow_received_at = time.time()
    restore_delivery(request)
    gate = getattr(sender.controller, "distwindow_gate", None)
    if gate is not None and request.eta is not None:
        gate.worker.scheduled[request] = None


def _received_at(request: Any) -> float:
    received_at: float = getattr(request, "distwindow_received_at", None) or time.time()
    return received_at


def leave_out_of_autoscaling(worker: Any, waiting: Callable[[], int]) -> None:
    """Patch the worker's autoscaler, if it has one, to leave out as many tasks as `waiting`
    returns. It wants a process for each task that the worker has received and that has not ended,
    and one that waits for its limit needs none.
    """
    autoscaler = getattr(worker, "autoscaler", None)
    its_class: Any = type(autoscaler)
    if not isinstance(getattr(its_class, "qty", None), property):
        return  # none, or one of the user's own (`worker_autoscaler`), which counts otherwise

    class LimitedAutoscaler(its_class):  # type: ignore[misc]  # a base known only at run time
        @property
        def qty(self) -> int:
            return max(0, int(super().qty) - waiting())

    autoscaler.__class__ = LimitedAutoscaler
