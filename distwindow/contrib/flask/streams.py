"""Responses that are still being sent, which decide about charges when they end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

from flask import Response


class OpenStreams:
    """What is to be settled when streams end: by themselves, with the process, or by `end_all`."""

    def __init__(self) -> None:
        self._settle: dict[int, Callable[[], object]] = {}
        """By the id of the response."""
        self._is_registered = False

    def add(self, response: Response, settle: Callable[[], object]) -> None:
        """Call `settle` once, when `response` ends, or before that by `end_all`."""
        if not self._is_registered:
            # After the first call of a limiter, whose own function has to run later.
            self._is_registered = True
            atexit.register(_end_at_exit, weakref.ref(self))
        self._settle[id(response)] = settle
        response.call_on_close(lambda: self._end(id(response)))

    def end_all(self) -> None:
        """Settle all by what they have sent so far."""
        for of_response in [*self._settle]:
            self._end(of_response)

    def _end(self, of_response: int) -> None:
        settle = self._settle.pop(of_response, None)  # one thread has it
        if settle is not None:
            settle()


def _end_at_exit(this: weakref.ref[OpenStreams]) -> None:
    streams = this()
    if streams is not None:
        streams.end_all()
