"""What limits see of a request of Flask, and what they answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import flask
from flask import Blueprint, Response, current_app
from werkzeug.exceptions import HTTPException, ServiceUnavailable, TooManyRequests

from ...errors import ConfigurationError
from .. import http


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
        """Return the address by `trusted_proxies` of the application's `RateLimits`, if any."""
        rate_limits = current_app.extensions.get("distwindow")
        return super().__call__(request) if rate_limits is None else rate_limits.client_address()


client_address = _CurrentAddress()


class RequestLimit(http.RequestLimit):
    """One limit in one application."""

    blueprint: Blueprint | None = None
    takes_request = False

    def name_of(self, request: Any) -> str:
        """Return the registered name of the blueprint, or methods and rule of the route."""
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
