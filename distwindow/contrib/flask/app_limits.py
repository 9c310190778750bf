"""The limits of one application of Flask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flask

from ...ring.decision import Decision
from .. import http
from .requests import ClientAddress, RateLimited, RateLimitUnavailable, RequestLimit
from .streams import OpenStreams

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
