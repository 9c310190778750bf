"""Signals and the exceptions that their handlers raise, for tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from queue import Empty
from types import FrameType
from typing import Any

_WATCHED = ("call", "c_return")
"""Where CPython may run a signal handler: as a function begins, and after a call of C has returned.
(Also where a loop goes back, and before 3.11 after any call: no profiler sees these.)
"""


def reachable() -> None:
    """For `subprocess.Popen(preexec_fn=...)`: children that SIGINT reaches. A shell that starts the
    tests in the background has it ignored, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interruption(
    KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, Empty
):
    """What the handler raises: of every kind at once that somebody may catch on the way."""


def interrupted_at(number: int, action: Callable[[], Any], package: str) -> str | None:
    """Call `action`, and raise `Interruption` at the `number`-th place in the code of `package`
    where a signal handler might; says where that was, None where there are fewer. What else
    `action` raises is passed on: the exception of a handler must never be replaced by another. Nor
    may it be lost, but where Python itself drops it, as a generator or an object is destroyed.
    """
    seen, place = 0, None
    dropped: list[Any] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen, place
        module = str(frame.f_globals.get("__name__"))
        # Python drops what is raised in a destructor, whoever raises it.
        if event in _WATCHED and module.startswith(package) and frame.f_code.co_name != "__del__":
            seen += 1
            if seen == number:
                sys.setprofile(None)
                place = f"{frame.f_code.co_filename}:{frame.f_lineno} {event} {arg}"
                raise Interruption

    before, sys.unraisablehook = sys.unraisablehook, dropped.append
    sys.setprofile(watch)
    try:
        action()
    except Interruption:
        return place
    finally:
        sys.setprofile(None)
        sys.unraisablehook = before
    assert place is None or dropped, f"swallowed: {place}"
    return place
