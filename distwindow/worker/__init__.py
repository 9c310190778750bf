"""The worker that carries what limiters keep in memory to their stores: one thread in a process for
all of them, and one task in each event loop.

Both start with the first thing there is to carry. The thread stays asleep when there is nothing,
the task ends. What is left is sent when the interpreter exits, when a task is cancelled because its
loop shuts down, and at SIGTERM where nobody else handles that: see `ending.py`.
"""

from __future__ import annotations

from ..connect import survive_fork
from .shutdown import ENDING
from .tasks import Tasks
from .thread import Thread

survive_fork(ENDING)
THREAD = survive_fork(Thread())
TASKS = survive_fork(Tasks())
