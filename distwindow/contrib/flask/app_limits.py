"""The limits of one application of Flask, and what is settled when a response has been sent."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import flask
from flask import Response

from ...ring.decision import Decision
from .. import http
from .requests import ClientAddress, RateLimited, RateLimitUnavailable, RequestLimit

LIMITED_REQUEST = "distwindow.limited_request"
"""Where what was decided for a request is kept in its WSGI environment."""


class AppRateLimits(http.BlockingRateLimits[RequestLimit]):
    """The limits of one application, with its configuration."""

    limit_type = RequestLimit
    address_type = ClientAddress
    knows_routes = True

    def __init__(self, store: Any, **options: Any) -> None:
        super().__init__(store, **options)
        self.by_declaration: dict[tuple[object, str], RequestLimit] = {}
        self.is_checked = False
        self.streams = OpenStreams()

    def close(self) -> None:
        """See `BlockingRateLimits.close`; streams are settled before, by what they have sent."""
        self.streams.end_all()
        super().close()

    def decide(self, limit: RequestLimit) -> None:
        """Ask `limit` for the current request."""
        earlier = flask.request.environ.setdefault(LIMITED_REQUEST, http.LimitedRequest())
        self.run(limit.decide(flask.request, earlier))

    @staticmethod
    def error_type(decision: Decision, answers: Sequence[Any], unit: str) -> Exception:
        kind = RateLimited if answers[-1].is_shown else RateLimitUnavailable
        return kind(decision, answers, unit)


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
