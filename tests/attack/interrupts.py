"""In a child: exceptions out of a signal handler, at random moments, and who must see them.

A timer of the kernel sends SIGALRM some microseconds after a round has begun; the handler raises an
exception of the application where the round is armed. CPython checks for signals when a Python
function begins, when a loop goes back and after a call: assignments are never interrupted, and so
the bookkeeping here consists of those.
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


class Interrupt(Exception):
    """An application's own, such as Celery's SoftTimeLimitExceeded."""


class SlowRequest(TimeoutError):
    """An application's own that looks like a timeout of the library's."""


class Hangup(ConnectionError):
    """An application's own that looks like a lost connection."""


class Outcome:
    """What a round came to. `interrupted`: the handler raised, and this arrived."""

    __slots__ = ("caught", "interrupted")

    def __init__(self, caught: BaseException | None, interrupted: bool) -> None:
        self.caught = caught
        self.interrupted = interrupted


class Interrupts:
    """Rounds that are interrupted, and a tally of what became of the exceptions."""

    KINDS: tuple[type[BaseException], ...] = (Interrupt, SlowRequest, Hangup, KeyboardInterrupt)

    def __init__(self, rng: random.Random) -> None:
        self.tally: Counter[str] = Counter()
        self.history: list[dict[str, Any]] = []
        """Of each kind of wrong the first few."""
        self._rng = rng
        self._armed = False
        self._kind: type[BaseException] = Interrupt
        self._pending: BaseException | None = None
        self._where = ""
        self._destroying = False
        signal.signal(signal.SIGALRM, self._handle)
        sys.unraisablehook = self._unraisable

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self._pending = exc = self._kind("of the application")
            self._where = _where(frame)
            self._destroying = _is_destroying(frame)
            raise exc

    def round(self, name: str, work: Callable[[], object], within: float) -> Outcome:
        """Do `work`, and interrupt it `within` so many seconds, unless it is done before."""
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
        except BaseException as exc:
            caught = exc
        signal.setitimer(signal.ITIMER_REAL, 0)
        pending = self._pending
        self.tally["rounds"] += 1
        if pending is None:
            return Outcome(caught, False)
        self.tally["interrupts"] += 1
        if caught is None and self._destroying:
            self.tally["lost in destructors of others"] += 1
        elif caught is not pending:
            wrong = "swallowed" if caught is None else f"replaced by {type(caught).__name__}"
            self.wrong(wrong, call=name, kind=type(pending).__name__, where=self._where)
        return Outcome(caught, True)

    def wrong(self, what: str, **facts: Any) -> None:
        """Something that must not be."""
        self.tally[f"wrong: {what}"] += 1
        if self.tally[f"wrong: {what}"] <= 5:
            self.history.append({"wrong": what, **facts})

    def _unraisable(self, args: Any) -> None:
        """An exception in a finalizer or a weak reference's callback: the interpreter drops it.
        Where the finalizer is redis-py's or the standard library's, nobody could have kept it.
        """
        ours = _is_ours(args.object)
        if args.exc_value is not None and args.exc_value is self._pending:
            self._pending = None
            if ours:
                self.wrong("lost in a finalizer", of=repr(args.object)[:200], where=self._where)
            else:
                self.tally["lost in destructors of others"] += 1
        elif ours:
            self.wrong("unraisable", error=repr(args.exc_value), of=repr(args.object)[:200])


def _is_destroying(frame: FrameType | None) -> bool:
    """Is it a destructor of redis-py or the standard library? Some drop exceptions themselves."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" and not _is_ours(frame):
            return True
        frame = frame.f_back
    return False


def _is_ours(finalizer: Any) -> bool:
    """Is it code of distwindow?"""
    codes = (getattr(finalizer, name, None) for name in ("__code__", "gi_code", "f_code"))
    return any(code.co_filename.startswith(OURS) for code in codes if code)


def _where(frame: FrameType | None) -> str:
    """The innermost lines of the code that was interrupted, outermost last."""
    lines: list[str] = []
    while frame is not None and len(lines) < 6:
        lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def now_s() -> float:
    return time.monotonic()
