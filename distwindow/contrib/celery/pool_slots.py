"""Free slots of the worker's pool. A line asks its limiter only while it holds one, so that no
permit goes stale because its task waits for a process or a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from celery.worker import state


class PoolSlots(Protocol):
    """How the gate gets slots. `take` calls `grant` once a slot is held, perhaps at once; then
    follows either `give_back` or `start`, which uses it for a task.
    """

    def take(self, grant: Callable[[], None]) -> None: ...

    def give_back(self) -> None: ...

    def start(self, request: Any) -> None: ...

    def pass_on(self, request: Any) -> None:
        """Run a task without a limit, as Celery would."""

    def serve(self) -> float | None:
        """Grant the slots that have become free. Return after how many seconds it is to be called
        again, because nothing else says for certain when that is so; None: not at all.
        """


class SemaphoreSlots:
    """For the prefork pool on an event loop, whose semaphore counts free processes. Tasks without
    limits wait in the same queue, in the order in which they come.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._process = worker.process_task

    def take(self, grant: Callable[[], None]) -> None:
        self._worker.semaphore.acquire(grant)

    def give_back(self) -> None:
        self._worker.semaphore.release()

    def start(self, request: Any) -> None:
        self._worker._process_task(request)  # the pool releases the semaphore when it ends

    def pass_on(self, request: Any) -> None:
        self._process(request)

    def serve(self) -> float | None:
        return None  # the semaphore does it


class CountedSlots:
    """For all other pools: threads, solo, gevent, eventlet, and prefork without an event loop.

    Those have no semaphore to wait at, so the tasks are counted that were given to the pool and
    have not ended. Celery's own set of reserved requests says which have ended, whatever ended
    them; the callbacks of the pool only say when to look: they call `wake`, in any thread.
    """

    def __init__(self, worker: Any, wake: Callable[[], None]) -> None:
        self._pool = worker.pool
        self._process = worker.process_task
        self._wake = wake
        # The event loop of kombu before 5.6 may sleep a second after another thread has called it.
        is_woken = worker.hub is None or hasattr(worker.hub, "_waker")
        self._look_every_s = 1.0 if is_woken else 0.01
        self._in_pool: set[Any] = set()
        self._held = 0
        self._waiting: deque[Callable[[], None]] = deque()
        # Celery's Request keeps this method of the pool for all its tasks.
        worker.pool.apply_async = self._wrap(worker.pool.apply_async)

    def take(self, grant: Callable[[], None]) -> None:
        self._waiting.append(grant)
        self.serve()

    def give_back(self) -> None:
        self._held -= 1
        self.serve()

    def start(self, request: Any) -> None:
        self._held -= 1
        self.pass_on(request)

    def pass_on(self, request: Any) -> None:
        self._in_pool.add(request)
        self._process(request)

    def serve(self) -> float | None:
        while self._waiting and self._free() > 0:
            self._held += 1
            self._waiting.popleft()()
        return self._look_every_s if self._waiting else None

    def _free(self) -> int:
        # Not a new set: another thread may add to this one meanwhile.
        for request in list(self._in_pool):
            if request not in state.reserved_requests:
                self._in_pool.discard(request)
        size = int(self._pool.num_processes or 1)
        return size - self._held - len(self._in_pool)

    def _wrap(self, apply_async: Callable[..., Any]) -> Callable[..., Any]:
        def then_serve(callback: Callable[..., Any] | None) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return callback(*args, **kwargs) if callback is not None else None
                finally:
                    if self._waiting:
                        self._wake()

            return call

        def wrapped(
            target: Any,
            args: Any = None,
            kwargs: Any = None,
            callback: Callable[..., Any] | None = None,
            error_callback: Callable[..., Any] | None = None,
            **options: Any,
        ) -> Any:
            return apply_async(
                target,
                args,
                kwargs,
                callback=then_serve(callback),
                error_callback=then_serve(error_callback),
                **options,
            )

        return wrapped


def make_slots(worker: Any, wake: Callable[[], None]) -> PoolSlots:
    """Return the slots of this worker's pool, which has been made. `wake` has `serve` called on the
    event loop.
    """
    if getattr(worker, "semaphore", None) is not None and (
        worker.process_task == worker._process_task_sem
    ):
        return SemaphoreSlots(worker)
    return CountedSlots(worker, wake)
