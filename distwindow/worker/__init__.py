"""The background worker, which flushes what limiters keep in memory: one thread for all blocking
limiters of a process, and one task in each event loop for its asyncio limiters.

Both start when a limiter has something to flush for the first time. With nothing to flush, the
thread sleeps and the task ends. Everything that is pending is flushed when the interpreter exits,
and when a task is cancelled because its loop shuts down: see `shutdown.py`.
"""

from __future__ import annotations

from .._fork import register_after_fork
from .patching import GEVENT_LISTENER
from .shutdown import SHUTDOWN
from .tasks import WorkerTasks
from .thread import WorkerThread

register_after_fork(SHUTDOWN)
register_after_fork(GEVENT_LISTENER)
THREAD_WORKER = register_after_fork(WorkerThread())
TASK_WORKER = register_after_fork(WorkerTasks())
