"""For programs inside uvicorn, which handles SIGTERM itself: when it has shut down, it restores the
action that it found, and raises SIGTERM again at once, before its event loop has ended.

If it found distwindow's handler, nothing has to be done. If it found the default action, because it
was there first (`--workers`), that signal would end the process before the last flush. Therefore a
limiter that is made while uvicorn's handler is installed wraps that handler:

    main thread    uvicorn's handler | SIGTERM is blocked .. uvicorn restores the default action,
                                     |                       and raises SIGTERM: it stays pending
    watch thread                     | is started .......... sees the default action, flushes, and
                                     |                       ends the process
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

Handler = Callable[[int, "FrameType | None"], Any]

_POLL_S = 0.005
"""Seconds between two looks at the action of SIGTERM."""


class UvicornHandler:
    """Wraps uvicorn's handler of SIGTERM, so that the shutdown flushes before the process ends."""

    def __init__(self, shut_down: Callable[[int], None]) -> None:
        """`shut_down`: flushes in the thread that calls it, and ends the process by the signal of
        this number.
        """
        self._shut_down = shut_down
        self._watched = False
        self._sigterm_blocked = False
        """True while SIGTERM is blocked in the main thread."""

    def after_fork(self) -> None:
        """Begin without the watch thread, and with SIGTERM unblocked: a child inherits the mask."""
        self._watched = False
        self._unblock()

    def wrap(self, handler: object) -> None:
        """Install the wrapper if `handler`, which is installed now, is uvicorn's."""
        if callable(handler) and _is_uvicorns(handler) and hasattr(signal, "pthread_sigmask"):
            signal.signal(signal.SIGTERM, partial(self._on_sigterm, handler))

    def end_process_if_blocked(self) -> None:
        """Unblock SIGTERM in the main thread when everything is sent as the process exits. The main
        thread may get here before the watch thread looks again; the pending SIGTERM then ends the
        process, as uvicorn intended.
        """
        if threading.current_thread() is threading.main_thread():
            self._unblock()

    def _on_sigterm(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        if not self._watched:
            self._watched = True
            with suppress(RuntimeError):  # no thread can be started: uvicorn ends the process
                # Start the thread before SIGTERM is blocked, because threads inherit the mask.
                _thread.start_new_thread(self._watch, (number, signal.getsignal(number)))
                self._sigterm_blocked = True
                signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def _watch(self, number: int, wrapper: Any) -> None:
        """Wait until uvicorn restores the action that it found, and then end the process."""
        while (action := signal.getsignal(number)) == wrapper:
            time.sleep(_POLL_S)
        if action == signal.SIG_DFL:
            self._shut_down(number)
        else:  # another handler, which would not be called while the signal is blocked
            interrupt_main(signal.Signals(number))

    def _unblock(self) -> None:
        if self._sigterm_blocked:
            self._sigterm_blocked = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _is_uvicorns(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("uvicorn.")
