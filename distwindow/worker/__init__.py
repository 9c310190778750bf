"""The worker that carries what limiters keep in memory to their stores: one thread in a process for
all of them, and one task in each event loop.

Both start with the first thing there is to carry. The thread stays asleep when there is nothing,
the task ends. What is left is sent when the interpreter exits, when a task is cancelled because its
loop shuts down, and at SIGTERM where nobody else handles that: see `ending.py`.
"""

from __future__ import annotations

from .._fork import register_after_fork
from .patching import PATCHING
from .shutdown import SHUTDOWN
from .tasks import WorkerTasks
from .thread import WorkerThread

register_after_fork(SHUTDOWN)
register_after_fork(PATCHING)
THREAD = register_after_fork(WorkerThread())
TASKS = register_after_fork(WorkerTasks())
