"""How a process ends: what is left is carried before, at exit and at SIGTERM."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from _thread import start_new_thread
from contextlib import suppress
from types import FrameType
from typing import Protocol

from ..local.cell import FAR
from .agent import PATIENCE, monotonic


class Worker(Protocol):
    """Who has something to carry."""

    def finish(self) -> None:
        """Carry everything, as the process ends."""
        ...

    def go_on(self) -> None:
        """The process did not end, after all."""
        ...


_leaving: dict[Worker, int] = {}
"""Who is to finish at the exit of which process."""
_heeding: list[Worker] = []
"""Who is to finish at SIGTERM."""
_since = FAR
"""When the first SIGTERM came."""


def at_exit(worker: Worker) -> None:
    """Have `worker` finish once when this process ends, forked ones too."""
    if _leaving.get(worker) == os.getpid():
        return
    if worker not in _leaving:
        atexit.register(worker.finish)
    _leaving[worker] = os.getpid()
    # A forked child of these ends without atexit.
    for name in ("multiprocessing.util", "billiard.util"):
        if name in sys.modules:
            sys.modules[name].Finalize(None, worker.finish, exitpriority=100)


def heed_sigterm(worker: Worker) -> None:
    """SIGTERM would end the process on the spot: have `worker` finish before. Only where nobody
    handles it, and it can be.
    """
    if worker not in _heeding:
        _heeding.append(worker)
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _sigterm)


_LOCKING = re.compile(
    r"distwindow\.(background\..*|flow\.(near|leased|eventual)|local\..*|store\.redis\.(sync|aio))"
)
"""The rooms with locks that the worker takes, too."""


def _sigterm(number: int, frame: FrameType | None) -> None:
    global _since
    now = monotonic()
    _since = min(_since, now)
    if _is_locking(frame) and now - _since < PATIENCE:
        # The interrupted code cannot go on, and the worker would wait for its locks: come again.
        with suppress(RuntimeError):  # too late to start a thread
            start_new_thread(_again, (number,))
            return
    for worker in _heeding:
        worker.finish()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Still here: process 1 of a container is not ended by that.
    _since = FAR
    for worker in _heeding:
        worker.go_on()
    signal.signal(number, _sigterm)


def _again(number: int) -> None:
    time.sleep(0.001)
    os.kill(os.getpid(), number)


def _is_locking(frame: FrameType | None) -> bool:
    """Might what was interrupted hold a lock of ours? The innermost of our own code tells: what
    waits for a store holds none.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("distwindow."):
            return _LOCKING.fullmatch(name) is not None
        frame = frame.f_back
    return False
