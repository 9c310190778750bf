"""The limits of one application of Flask: what they see of a request, what they answer, and what is
settled when a response has been sent.
"""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import flask
from flask import Blueprint, Response, current_app
from werkzeug.exceptions import HTTPException, ServiceUnavailable, TooManyRequests

from ...errors import ConfigurationError
from ...ring.decision import Decision
from .. import http

LIMITED_REQUEST = "distwindow.limited_request"
"""Where what was decided for a request is kept in its WSGI environment."""


class _Refusal(HTTPException, http.RateLimited):
    def __init__(self, *arguments: Any) -> None:
        http.RateLimited.__init__(self, *arguments)  # and not Werkzeug's, which calls this one
        body, kind = json.dumps(self.problem), http.PROBLEM_MEDIA_TYPE
        self.response = Response(body, self.status_code, self.headers, content_type=kind)
        self.description = self.problem["detail"]


class RateLimited(_Refusal, TooManyRequests):  # type: ignore[misc]  # `retry_after` is ours
    """A request was refused. `@app.errorhandler(429)` takes it; otherwise `.response` is sent."""


class RateLimitUnavailable(_Refusal, ServiceUnavailable):  # type: ignore[misc]  # likewise
    """The store was away, and `on_store_error` is "deny". `@app.errorhandler(503)` takes it."""


class ClientAddress(http.ClientAddress):
    __doc__ = http.ClientAddress.__doc__

    def peer(self, request: Any) -> str | None:
        return cast("str | None", request.environ.get("REMOTE_ADDR"))

    def header_values(self, request: Any, name: str) -> Sequence[str]:
        return cast("list[str]", request.headers.getlist(name))

    def __call__(self, request: Any = None) -> str:
        """Return the address of the client of `request`, by default of Flask's current one."""
        return super().__call__(flask.request if request is None else request)


class _CurrentAddress(ClientAddress):
    def __call__(self, request: Any = None) -> str:
        """Return the address of the client by the `trusted_proxies` of the application's
        `RateLimits`, if it has one.
        """
        rate_limits = current_app.extensions.get("distwindow")
        return super().__call__(request) if rate_limits is None else rate_limits.client_address()


client_address = _CurrentAddress()


class RequestLimit(http.RequestLimit):
    """One limit in one application."""

    blueprint: Blueprint | None = None

    takes_request = False

    def name_of(self, request: Any) -> str:
        """Return the name that the limited blueprint was registered with, or else methods and rule
        of the route: a view has one window for its methods.
        """
        if self.blueprint is not None:
            all_of = current_app.blueprints
            return str(next(one for one in request.blueprints if all_of[one] is self.blueprint))
        rule = request.url_rule
        if rule is None:
            raise ConfigurationError(
                "a limit outside of a route has no name of its own; write limit(..., name=...)"
            )
        counted = {"GET" if method == "HEAD" else method for method in rule.methods}
        methods = "|".join(sorted(counted - {"OPTIONS"} or counted))
        return f"{methods} {rule.host or rule.subdomain or ''}{rule.rule}"


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
