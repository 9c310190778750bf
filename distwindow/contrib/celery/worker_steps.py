"""The bootsteps by which the gate becomes part of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals

from ... import Limit
from ...errors import ConfigurationError
from ..tasks import acquire_all
from .admission import TaskAdmission
from .gate import Gate
from .pool_slots import make_slots
from .send_back import restore_delivery
from .worker import CeleryWorkerPort, logger


class GateStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Makes the gate once the pool is made, before the consumer takes `process_task`."""

    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

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
        limiters = self.limiters = settings.limiters(limits.store)
        limiter = limiters.get((Limit("1/second"),))
        port = CeleryWorkerPort(worker)
        admission = TaskAdmission(
            partial(acquire_all, limiter), time.monotonic, settings.on_store_error
        )
        limiter.on_health_change(admission.on_health_change)
        slots = make_slots(worker, lambda: port.call_soon(gate.run_pending))
        gate = worker.distwindow_gate = Gate(
            port, slots, admission, table, max_parked=settings.max_parked,
            max_hold_s=limits.max_hold_s(), tally=limiters.tally, source=limiters.store.decided_by,
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
        self.limiters.close()

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


@signals.task_received.connect  # type: ignore[untyped-decorator]  # Celery has no types
def _stamp(sender: Any, request: Any, **_: Any) -> None:
    """Note when a message was received: the broker counts its visibility timeout from then, and not
    from the moment at which its eta has come. And note how the original came, if it is a copy.
    """
    request.distwindow_received = time.monotonic(), time.time()
    restore_delivery(request)
    gate = getattr(sender.controller, "distwindow_gate", None)
    if gate is not None and request.eta is not None:
        gate.worker.scheduled[request] = None


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
