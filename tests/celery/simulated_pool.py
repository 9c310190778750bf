"""A pool without a semaphore, as threads and gevent are: what it is given waits inside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker import state


class SimulatedPool:
    """Runs `slots` tasks at a time, for their durations. `run` is told of each start, `ended` of
    each end. A `solo` pool runs a task within the call that gives it, in no time. A green one only
    says that it is one: no slot is given to it that is not free.
    """

    def __init__(
        self,
        slots: int,
        call_after: Callable[[float, Callable[[], object]], object],
        run: Callable[[Any], None],
        ended: Callable[[Any], None],
        *,
        is_solo: bool = False,
        is_green: bool = False,
    ) -> None:
        self.is_green = is_green
        self.limit = slots
        self._call_after = call_after
        self._run = run
        self._ended = ended
        self._is_solo = is_solo
        self._queue: deque[tuple[Any, Callable[..., Any]]] = deque()
        self._running = 0

    @property
    def num_processes(self) -> int:
        return self._running if self.is_green else self.limit  # as gevent in Celery 5.4

    def apply_async(
        self,
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        callback: Any = None,
        error_callback: Any = None,
    ) -> None:
        self._queue.append((target, callback))
        self._start()

    def _start(self) -> None:
        while self._queue and self._running < self.limit:
            request, callback = self._queue.popleft()
            self._running += 1
            self._run(request)
            if self._is_solo:
                self._end(request, callback)
            else:
                self._call_after(request.duration_s, partial(self._end, request, callback))

    def _end(self, request: Any, callback: Callable[..., Any]) -> None:
        self._running -= 1
        state.reserved_requests.discard(request)
        self._ended(request)
        callback()
        self._start()
