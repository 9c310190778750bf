"""The worker as its gate uses it, and the signals of the gate. These are sent in the worker's
parent, with the task as the sender.

    @task_parked.connect
    def on_parked(sender, request, key, wait_s, **kwargs): ...

A receiver runs on the worker's event loop, so it must return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from celery.utils.dispatch import Signal
from celery.utils.log import get_logger

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


class WorkerPort(Protocol):
    """The worker as the gate uses it."""

    def monotonic(self) -> float: ...

    def call_after(self, seconds: float, callback: Callable[[], None]) -> Any:
        """Call `callback` on the worker's event loop; return what `cancel` takes."""

    def cancel(self, timer: Any) -> None: ...

    def is_stopping(self) -> bool:
        """True once the worker is told to shut down, warm or cold."""

    def received_s(self, request: Any) -> float:
        """Return when the worker received the message, by `monotonic`."""

    def adjust_prefetch(self, raised: int, wanted: int) -> int:
        """Raise the prefetch count by `wanted` messages; it was raised by `raised`. Return how many
        it may now: the worker's settings may allow fewer.
        """

    def expires_after_s(self, request: Any) -> float | None:
        """Return in how many seconds the task expires; None if it does not."""

    def rank(self, request: Any) -> int:
        """Return the place of the task in its line; the smallest is first."""

    def is_taken_away(self, request: Any) -> bool:
        """True if the broker has given the message to another worker, or may do so now."""

    def forget(self, request: Any) -> None:
        """Drop a task that is another worker's now."""

    def give_back(self, requests: list[Any]) -> None:
        """Ask the broker to deliver tasks again whose connection has ended. They never start
        here.
        """

    def can_send_back(self, request: Any) -> bool: ...

    def send_back(self, request: Any, delay_s: float) -> datetime:
        """Publish the message again, to be taken up in `delay_s`, and acknowledge it. Return the
        time of that. Raises anything if the broker has not taken it, and then changes nothing.
        """


class OneTimer:
    """The next call of the gate. There is one, because the event loop of kombu fires ten timers and
    may then sleep for a second.
    """

    def __init__(self, worker: WorkerPort, callback: Callable[[], None]) -> None:
        self._worker = worker
        self._callback = callback
        self._timer: Any = None
        self._at_s = 0.0

    def forget(self) -> None:
        """Drop the timer: Celery cancels one that is set while a connection to the broker fails."""
        self._timer = None

    def call_by(self, at_s: float) -> None:
        """Call at `at_s` at the latest, and maybe earlier."""
        now_s = self._worker.monotonic()
        delay_s = min(max(at_s - now_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
        if self._timer is not None:
            if self._at_s <= now_s + delay_s:
                return
            self._worker.cancel(self._timer)
        self._at_s = now_s + delay_s
        self._timer = self._worker.call_after(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._callback()


def is_revoked(request: Any) -> bool:
    """Ask Celery, which stores the state of a revoked task: its result backend may fail."""
    try:
        return bool(request.revoked())
    except Exception as exc:
        logger.warning("whether %s is revoked is unknown: %s", request.id, exc)
        return False
