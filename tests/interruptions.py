"""Interruptions for tests: exceptions that a signal handler raises in the middle of other code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_WATCHED = ("call", "c_return")
"""The events of a profiler after which CPython may run a signal handler: a function begins, and a
function in C has returned. CPython also runs one at the backward jump of a loop, and before 3.11
after any call; no profiler is called there.
"""


def restore_sigint() -> None:
    """For `subprocess.Popen(preexec_fn=...)`: have SIGINT interrupt the child. A shell that starts
    the tests in the background ignores SIGINT in them, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interruption(Exception):
    """What the handler raises: a type of the application, like Celery's SoftTimeLimitExceeded."""


def interrupt_at(number: int, action: Callable[[], Any], package: str) -> str | None:
    """Call `action`, and raise `Interruption` at the `number`-th place in the code of `package`
    where a signal handler might raise. Return that place, or None where there are fewer.

    Other exceptions of `action` are passed on, because the exception of a handler must never be
    replaced by another one. It must not be lost either, except where Python itself drops it: while
    a generator or an object is destroyed.
    """
    seen, place = 0, None
    dropped: list[Any] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen, place
        module = str(frame.f_globals.get("__name__"))
        # Python drops every exception that is raised in a destructor.
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
        others = [one.exc_value for one in dropped if type(one.exc_value) is not Interruption]
        assert not others, f"Python has dropped {others!r}: {place}"
        return place
    finally:
        sys.setprofile(None)
        sys.unraisablehook = before
    assert place is None or dropped, f"the exception was swallowed: {place}"
    return place


def call_at(
    number: int, action: Callable[[], Any], other: Callable[[], Any], package: str
) -> str | None:
    """Call `action`, and `other` at the `number`-th place in the code of `package` where another
    thread might run. Return that place, or None where there are fewer.
    """
    seen, place = 0, None

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen, place
        if str(frame.f_globals.get("__name__")).startswith(package):
            seen += 1
            if seen == number:
                sys.setprofile(None)
                place = f"{frame.f_code.co_filename}:{frame.f_lineno} {event} {arg}"
                other()

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return place
