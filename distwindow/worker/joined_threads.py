"""The threads that Python joins before a process ends: all that are not daemons.

A script's `atexit` functions run when they have ended. The finalizers of a child of multiprocessing
run before Python joins them, while they may still call limiters:

    main thread    target returns | finalizers | joins the threads ................ | os._exit
    other threads  call limiters .................................. end |           |
    last flush                                 | is waiting for them .. | is sent   |

So the last flush is sent by one more thread, which waits for the others. Python joins it, too. The
finalizers cannot wait for them: later finalizers, or the functions by which Python ends executors,
may be what makes these threads end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def joined_threads() -> list[threading.Thread]:
    """Return the threads, besides the caller's, that Python has yet to join."""
    main = threading.main_thread()
    if not main.is_alive():  # they have been joined
        return []
    here = (main, threading.current_thread())
    return [one for one in threading.enumerate() if not one.daemon and one not in here]


def is_joined_later() -> bool:
    """True if Python has yet to join the calling thread."""
    main, current = threading.main_thread(), threading.current_thread()
    return main.is_alive() and current is not main and not current.daemon


def call_after_joined_threads(function: Callable[[], None]) -> bool:
    """Have `function` called when the threads that Python joins have ended, and again if others
    have been started and have ended meanwhile. False if no thread could be started for that.
    """

    def wait_and_call() -> None:
        while threads := joined_threads():
            for one in threads:
                one.join()
            function()

    try:
        threading.Thread(target=wait_and_call, name="distwindow-exit", daemon=False).start()
    except RuntimeError:
        return False
    return True


def are_joined_in_child(package: str) -> bool:
    """True if threads are joined after the finalizers of `package` in a child of it. Children that
    billiard has forked end by `os._exit`, which ends their threads.
    """
    return package == "multiprocessing" or sys.modules[package].get_start_method() == "spawn"
