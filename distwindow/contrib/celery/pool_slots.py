"""Free slots of the worker's pool. A line asks its limiter only while it holds one, so that no
permit goes stale because its task waits for a process or a thread.

`take(grant)` calls `grant` once a slot is held, perhaps at once; then follows either `give_back` or
`start`, which uses it for a task. `pass_on(request, by_turns)` runs a task without a limit:
`by_turns` while limited tasks are here. Both kinds have the same number of starts where both wait.
A line that is refused has had none.

`serve(by_turns)` grants the slots that have become free, and returns after how many seconds it is
to be called again, because nothing else says for certain when that is so; `NEVER`: not at all.
`forget_tasks` drops the tasks without limits that wait, and returns them, when their connection to
the broker has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from celery.worker import state

from ...ring.clock import NEVER

_MOST_OWED = 16
"""So many more starts than lines tasks without limits may have had, and lines catch up on."""
_LONGEST_HOLD_S = 2.0
"""How long the consumer is blocked at most: as long as Celery may wait for a message."""
_PRUNE_AT = 64
"""From this number on, requests that were given to the pool are looked through for ended ones."""


class _Waiting:
    """A queue for slots. It is the turn of lines, unless they have had more starts.

    Several slots may be free at once, when a line can take only one before it asks again. So starts
    are counted, and lines catch up later.
    """

    def __init__(self) -> None:
        self.lines: deque[Callable[[], None]] = deque()
        self.tasks: deque[Any] = deque()
        self._owed = 0
        """How many starts tasks without limits have had more than lines."""

    def __len__(self) -> int:
        return len(self.lines) + len(self.tasks)

    def is_turn_of_line(self) -> bool:
        return bool(self.lines) and (self._owed >= 0 or not self.tasks)

    def line_has_started(self) -> None:
        self._owed = max(self._owed - 1, -1)

    def task_has_started(self) -> None:
        self._owed = min(self._owed + 1, _MOST_OWED)


class SemaphoreSlots:
    """For the prefork pool on an event loop, whose semaphore counts free processes. It is acquired
    once for each line and task that waits; who gets the slot is decided when it is free.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._waiting = _Waiting()

    def take(self, grant: Callable[[], None]) -> None:
        self._waiting.lines.append(grant)
        self._worker.semaphore.acquire(self._use_slot)

    def give_back(self) -> None:
        self._worker.semaphore.release()

    def start(self, request: Any) -> None:
        self._waiting.line_has_started()
        self._worker._process_task(request)  # the pool releases the semaphore when it ends

    def pass_on(self, request: Any, by_turns: bool) -> None:
        self._waiting.tasks.append(request)
        self._worker.semaphore.acquire(self._use_slot)

    def forget_tasks(self) -> list[Any]:
        # Celery has cleared the semaphore, so the lines that waited at it are not granted any more.
        forgotten, self._waiting = self._waiting.tasks, _Waiting()
        return list(forgotten)

    def serve(self, by_turns: bool) -> float:
        return NEVER  # the semaphore calls

    def block_consumer(self) -> None: ...

    def _use_slot(self) -> None:
        waiting = self._waiting
        if waiting.is_turn_of_line():
            waiting.lines.popleft()()
        elif waiting.tasks:
            waiting.task_has_started()
            self._worker._process_task(waiting.tasks.popleft())
        else:
            self._worker.semaphore.release()


class CountedSlots:
    """For all other pools: threads, solo, gevent, eventlet, and prefork without an event loop.

    Those have no semaphore to wait at, so the tasks are counted that were given to the pool and
    have not ended. Celery's own set of reserved requests says which have ended, whatever ended
    them; the callbacks of the pool only say when to look: they call `wake`, in any thread.

    Without limited tasks all others go to the pool at once, as without a gate. While limited tasks
    are here, the others wait here too: what waits inside the pool cannot be overtaken.

    A pool of greenlets blocks whoever gives it a task while all its slots are taken, and Celery's
    consumer with it. A consumer that fetches on until its prefetch count is used up looks for
    messages again only after two seconds. So the consumer is blocked while a task waits here, too.
    """

    def __init__(self, worker: Any, wake: Callable[[], None]) -> None:
        self._pool = worker.pool
        self._process = worker.process_task
        self._wake = wake
        # The event loop of kombu before 5.6 may sleep a second after another thread has called it.
        is_woken = worker.hub is None or hasattr(worker.hub, "_waker")
        self._look_every_s = 1.0 if is_woken else 0.01
        self._in_pool: set[Any] = set()
        self._prune_at = _PRUNE_AT
        self._held = 0
        self._waiting = _Waiting()
        self._is_green = bool(getattr(worker.pool, "is_green", False))
        self._nothing_waits = threading.Event()
        # Celery's Request keeps this method of the pool for all its tasks.
        worker.pool.apply_async = self._wrap(worker.pool.apply_async)

    def take(self, grant: Callable[[], None]) -> None:
        self._waiting.lines.append(grant)
        self.serve(by_turns=True)

    def give_back(self) -> None:
        self._held -= 1
        self.serve(by_turns=True)

    def start(self, request: Any) -> None:
        self._held -= 1
        self._waiting.line_has_started()
        self._give_to_pool(request)

    def pass_on(self, request: Any, by_turns: bool) -> None:
        if by_turns or self._waiting.tasks:
            self._waiting.tasks.append(request)
            self.serve(by_turns)
        else:
            self._give_to_pool(request)

    def serve(self, by_turns: bool) -> float:
        waiting = self._waiting
        while waiting and (self._free() > 0 or not (by_turns or waiting.lines)):
            if waiting.is_turn_of_line():
                self._held += 1
                waiting.lines.popleft()()
            else:
                waiting.task_has_started()
                self._give_to_pool(waiting.tasks.popleft())
        if not waiting:
            self._nothing_waits.set()
            return NEVER
        return self._look_every_s

    def block_consumer(self) -> None:
        if self._is_green and self._waiting:
            self._nothing_waits.clear()
            self._nothing_waits.wait(_LONGEST_HOLD_S)

    def forget_tasks(self) -> list[Any]:
        forgotten, self._waiting.tasks = self._waiting.tasks, deque()
        self._nothing_waits.set()
        return list(forgotten)

    def _give_to_pool(self, request: Any) -> None:
        if len(self._in_pool) >= self._prune_at:
            # What ended without a callback, so that no request is kept for ever.
            self._prune()
            self._prune_at = max(_PRUNE_AT, 2 * len(self._in_pool))
        self._in_pool.add(request)
        self._process(request)
        if request not in state.reserved_requests:
            self._in_pool.discard(request)  # revoked, or run at once by a pool like solo

    def _free(self) -> int:
        self._prune()
        # For gevent in Celery 5.4 `num_processes` is how many greenlets run.
        size = int((self._pool.limit if self._is_green else self._pool.num_processes) or 1)
        return size - self._held - len(self._in_pool)

    def _prune(self) -> None:
        # Not a new set: another thread may remove from this one meanwhile.
        for request in list(self._in_pool):
            if request not in state.reserved_requests:
                self._in_pool.discard(request)

    def _wrap(self, apply_async: Callable[..., Any]) -> Callable[..., Any]:
        def then_serve(callback: Callable[..., Any] | None) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return callback(*args, **kwargs) if callback is not None else None
                finally:
                    # A method of the request, which has ended now.
                    self._in_pool.discard(getattr(callback, "__self__", None))
                    if self._waiting:
                        self._wake()

            return call

        def wrapped(*args: Any, **options: Any) -> Any:
            for name in ("callback", "error_callback"):
                options[name] = then_serve(options.get(name))
            return apply_async(*args, **options)

        return wrapped


PoolSlots: TypeAlias = SemaphoreSlots | CountedSlots


def make_slots(worker: Any, wake: Callable[[], None]) -> PoolSlots:
    """Return the slots of this worker's pool, which has been made. `wake` has `serve` called on the
    event loop.
    """
    if getattr(worker, "semaphore", None) is not None and (
        worker.process_task == worker._process_task_sem
    ):
        return SemaphoreSlots(worker)
    return CountedSlots(worker, wake)
