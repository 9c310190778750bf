"""In a child: exceptions of a signal handler at random moments, and the check that they arrive.

A timer of the kernel sends SIGALRM some microseconds after a round has begun, and the handler
raises an exception of the application if the round is armed. CPython runs signal handlers when a
Python function begins, at the backward jump of a loop, and after a call. It never interrupts an
assignment, so the code here keeps its state by assignments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import distwindow

OURS = f"{Path(distwindow.__file__).parent}{os.sep}"


class Interruption(Exception):
    """An exception of the application, such as Celery's SoftTimeLimitExceeded."""


class SlowRequest(TimeoutError):
    """An exception of the application that is a `TimeoutError`, like those of the library."""


class Hangup(ConnectionError):
    """An exception of the application that is a `ConnectionError`, as a lost connection raises."""


class Outcome:
    """The result of a round: the exception that arrived, and whether the handler has raised."""

    __slots__ = ("caught", "interrupted")

    def __init__(self, caught: BaseException | None, interrupted: bool) -> None:
        self.caught = caught
        self.interrupted = interrupted


class Interrupter:
    """Makes calls that are interrupted, and counts what happened to the exceptions."""

    KINDS: tuple[type[BaseException], ...] = (Interruption, SlowRequest, Hangup, KeyboardInterrupt)

    def __init__(self, rng: random.Random) -> None:
        self.figures: Counter[str] = Counter()
        self.history: list[dict[str, Any]] = []
        """The first few faults of each kind."""
        self._rng = rng
        self._armed = False
        self._kind: type[BaseException] = Interruption
        self._pending: BaseException | None = None
        self.where = ""
        """The innermost lines of the code that was interrupted last."""
        self._destroying = False
        signal.signal(signal.SIGALRM, self._handle)
        sys.unraisablehook = self._unraisable

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self._pending = exc = self._kind("of the application")
            self.where = _where(frame)
            self._destroying = _is_destroying(frame)
            raise exc

    def round(self, name: str, work: Callable[[], object], within: float) -> Outcome:
        """Call `work`, and interrupt it at a random moment `within` so many seconds."""
        self._kind = self._rng.choice(self.KINDS)
        self._pending = None
        delay = max(1e-6, self._rng.random() * within)
        caught: BaseException | None = None
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                self._armed = True
                work()
            finally:
                self._armed = False
        except BaseException as exc:  # one of `KINDS` is KeyboardInterrupt
            caught = exc
        signal.setitimer(signal.ITIMER_REAL, 0)
        pending = self._pending
        self.figures["rounds"] += 1
        if pending is None:
            return Outcome(caught, False)
        self.figures["interruptions"] += 1
        if caught is not pending and self._destroying:
            self.figures["lost in destructors of other packages"] += 1
        elif caught is not pending:
            wrong = "swallowed" if caught is None else f"replaced by {type(caught).__name__}"
            self.wrong(wrong, call=name, kind=type(pending).__name__, where=self.where)
        return Outcome(caught, True)

    def wrong(self, what: str, **facts: Any) -> None:
        """Record a fault."""
        self.figures[f"wrong: {what}"] += 1
        if self.figures[f"wrong: {what}"] <= 5:
            self.history.append({"wrong": what, **facts})

    def _unraisable(self, args: Any) -> None:
        """Take an exception of a finalizer or of a weak reference's callback, which the interpreter
        drops. It is a fault only if the finalizer is distwindow's.
        """
        ours = _is_ours(args.object)
        if args.exc_value is not None and args.exc_value is self._pending:
            self._pending = None
            if ours:
                self.wrong("lost in a finalizer", of=repr(args.object)[:200], where=self.where)
            else:
                self.figures["lost in destructors of other packages"] += 1
        elif ours:
            self.wrong("unraisable", error=repr(args.exc_value), of=repr(args.object)[:200])


def _is_destroying(frame: FrameType | None) -> bool:
    """True inside a destructor of redis-py or of the standard library; some drop exceptions."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" and not _is_ours(frame):
            return True
        frame = frame.f_back
    return False


def _is_ours(finalizer: Any) -> bool:
    """True for code of distwindow."""
    codes = (getattr(finalizer, name, None) for name in ("__code__", "gi_code", "f_code"))
    return any(code.co_filename.startswith(OURS) for code in codes if code)


def _where(frame: FrameType | None) -> str:
    """Return the innermost lines of the interrupted code, outermost last."""
    lines: list[str] = []
    while frame is not None and len(lines) < 6:
        lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def now_s() -> float:
    return time.monotonic()
