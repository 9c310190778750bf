"""Limits of FastAPI applications, for the whole fleet, as dependencies.

rate_limits = RateLimits("redis://localhost:6379/0", on_store_error="allow")
rate_limits.install(app)

@app.get("/search", dependencies=[Depends(rate_limits.limit("10/minute"))])
async def search(q: str): ...
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import fastapi
import fastapi.routing
from fastapi.params import Depends
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Host, Mount, Route, WebSocketRoute

from ..callables import function_name
from ..errors import ConfigurationError, RateLimitExceeded
from ..ring.decision import Decision
from . import asgi, http
from .asgi import EXPOSED_HEADERS, ClientAddress, RateLimitMiddleware, client_address

_LOG = logging.getLogger("distwindow")
_PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "violated-policies": {"type": "array", "items": {"type": "string"}},
    },
}


class RateLimited(fastapi.HTTPException, http.RateLimited):  # type: ignore[misc]  # `headers`
    """A request was refused: an `HTTPException` of status 429, or 503 where the store was away and
    `on_store_error` is "deny". `.decision`, `.retry_after`, `.headers`, `.problem`.
    """

    def __init__(self, decision: Decision, answers: Sequence[Any], unit: str) -> None:
        http.RateLimited.__init__(self, decision, answers, unit)
        detail, headers = self.problem["detail"], self.headers
        fastapi.HTTPException.__init__(self, self.status_code, detail, headers)


class RequestLimit(asgi.RequestLimit):
    """One limit: a dependency of routes and websockets, which is the decision in their functions.

    It is None where the request is not limited: it is exempt, or the limits are switched off.
    """

    rate_limits: RateLimits

    def __init__(
        self, rate_limits: RateLimits, limits: Any, *, key: Any = None, **options: Any
    ) -> None:
        parameters = [
            inspect.Parameter("connection", _KEYWORD, annotation=HTTPConnection),
            inspect.Parameter("response", _KEYWORD, annotation=Response),
        ]
        if isinstance(key, Depends):
            parameters.append(inspect.Parameter("key", _KEYWORD, default=key))
            key = _resolved_by_fastapi(key.dependency)
        # FastAPI asks for the values of these, which it finds by their types.
        self.__signature__ = inspect.Signature(parameters)
        super().__init__(rate_limits, limits, key=key, **options)

    async def __call__(
        self, *, connection: HTTPConnection, response: Response, key: Any = http.NOT_GIVEN
    ) -> Decision | None:
        """Ask this limit for a request; for FastAPI."""
        limited = connection.scope.get(asgi.SCOPE_KEY)
        if limited is None:
            limited = connection.scope[asgi.SCOPE_KEY] = http.UnwatchedRequest()
        if self.settles and not limited.is_watched:
            self.raise_without_middleware()
        known = self.decide_at_once(connection, limited, key)
        try:
            decision = known if isinstance(known, Decision) else await known
        except RateLimited:
            _answer_in_mounted(connection.scope)
            raise
        if not limited.is_watched and limited:
            self.rate_limits.log_missing_install()
            response.headers.update(limited.fields_to_set(200, lambda name: None))
        return decision

    def name_of(self, request: Any) -> str:
        """Return the method and the whole path template of the route of `request`."""
        scope = asgi.scope_of(request)
        context = (scope.get("fastapi") or {}).get("effective_route_context")
        route = scope.get("route") if context is None else context
        return self.name_of_route(scope, getattr(route, "path", None) or _path_of(route))


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _resolved_by_fastapi(dependency: Any) -> Callable[..., Any]:
    """Return what stands for a key that is a dependency."""

    def key(request: object) -> str:
        raise ConfigurationError(
            f"{key.__qualname__} is resolved where the limit is a dependency; in a handler, ask a "
            "limit whose key is a function of the request"
        )

    key.__qualname__ = f"Depends({function_name(dependency)})"
    return key


class LimitOfRoutes(NamedTuple):
    """One limit of an application, as `RateLimits.limits_of` lists them."""

    name: str
    limits: str
    """As text; the name of the function that returns them, if there is one."""
    routes: tuple[str, ...]
    """Method and path template of each."""


class RateLimits(asgi.AsgiRateLimits[RequestLimit]):
    __doc__ = http.AsyncRateLimits.__doc__
    limit_type = RequestLimit
    address_type = ClientAddress
    error_type = RateLimited
    install_hint = "rate_limits.install(app)"
    request_type = HTTPConnection
    _has_logged = False

    async def _check(
        self, connection: Any, limits: tuple[RequestLimit, ...], cost: int | None
    ) -> Decision | None:
        try:
            return await super()._check(connection, limits, cost)
        except RateLimited:
            _answer_in_mounted(asgi.scope_of(connection))
            raise

    def install(self, app: fastapi.FastAPI, *, openapi: bool = True) -> None:
        """Add to `app`, once: the middleware that writes header fields, a handler that answers
        refusals with a problem body, unless it has one for `RateLimited`, and one for what limiters
        raise in handlers (`RateLimitExceeded`), and with `openapi` the
        responses 429 and 503 of limited routes, unless a route documents them itself.
        """
        for each in app.user_middleware:
            entry: tuple[Any, ...] = tuple(each)  # the class, and its options last
            if entry[0] is RateLimitMiddleware and entry[-1].get("rate_limits") is self:
                return
        app.add_middleware(RateLimitMiddleware, rate_limits=self)
        app.exception_handlers.setdefault(RateLimited, _respond)
        app.exception_handlers.setdefault(RateLimitExceeded, self._respond_exceeded)
        if openapi:
            without_limits = app.openapi

            def with_limits() -> dict[str, Any]:
                if not app.openapi_schema:
                    self._document(app, without_limits())
                return without_limits()

            app.openapi = with_limits  # type: ignore[method-assign]  # as FastAPI's docs have it

    async def _respond_exceeded(self, connection: HTTPConnection, exceeded: Exception) -> Response:
        """Answer what a limiter has raised in a handler."""
        assert isinstance(exceeded, RateLimitExceeded)
        return await _respond(connection, self.refusal_of(exceeded))

    def limits_of(self, app: fastapi.FastAPI) -> list[LimitOfRoutes]:
        """Return the limits that are dependencies of routes of `app`, in their order."""
        found: dict[tuple[str, str], list[str]] = {}
        for path, route in _walk(app.routes):
            for limit in _limits_of(route):
                for method in sorted(getattr(route, "methods", None) or {"WEBSOCKET"}):
                    name = limit.name or f"{asgi.method_of({'method': method})} {path}"
                    found.setdefault((name, limit.text), []).append(f"{method} {path}")
        return [LimitOfRoutes(*key, tuple(routes)) for key, routes in found.items()]

    def log_missing_install(self) -> None:
        """Log once that responses may lack the header fields."""
        if not self._has_logged:
            self._has_logged = True
            _LOG.warning(
                "responses of routes that return a Response have no RateLimit fields, and refusals "
                "no problem body: call rate_limits.install(app)"
            )

    def _document(self, app: fastapi.FastAPI, schema: dict[str, Any]) -> None:
        """Add the refusals of limited routes to an OpenAPI schema."""
        for _, route in _walk(app.routes, into_mounts=False):
            limits = list(_limits_of(route))
            operations = schema.get("paths", {}).get(getattr(route, "path_format", None), {})
            for method in getattr(route, "methods", None) or ():
                responses = operations.get(method.lower(), {}).get("responses")
                if limits and responses is not None:
                    responses.setdefault("429", self._response("Too Many Requests", fields=True))
                    if any(limit.on_store_error == "deny" for limit in limits):
                        responses.setdefault("503", self._response("Service Unavailable"))

    def _response(self, description: str, *, fields: bool = False) -> dict[str, Any]:
        policy, limit, retry_after, *older = EXPOSED_HEADERS
        names = [policy, limit] if fields and self.headers in ("ietf", "both") else []
        names += older if fields and self.headers in ("x-ratelimit", "both") else []
        integers = {retry_after, *older}
        return {
            "description": description,
            "headers": {
                name: {"schema": {"type": "integer" if name in integers else "string"}}
                for name in [*names, retry_after]
            },
            "content": {http.PROBLEM_MEDIA_TYPE: {"schema": _PROBLEM_SCHEMA}},
        }


def _answer_in_mounted(scope: Any) -> None:
    """Have a refusal answered by a problem body in an application that is mounted below the one
    where `install` was called: it would answer it as any `HTTPException` before that sees it. A
    handler of its own for `HTTPException` is left to answer it.
    """
    limited = scope.get(asgi.SCOPE_KEY)
    if limited is None or not limited.is_watched:
        return
    handlers = scope.get("starlette.exception_handlers", ({},))[0]
    asked = next((handlers[each] for each in RateLimited.__mro__ if each in handlers), None)
    if getattr(asked, "__module__", "").startswith(("fastapi.", "starlette.")):
        handlers[RateLimited] = _respond


async def _respond(connection: HTTPConnection, refused: Exception) -> Response:
    assert isinstance(refused, RateLimited)
    if connection.scope["type"] == "websocket":
        raise refused  # which the middleware answers
    return JSONResponse(
        refused.problem, refused.status_code, refused.headers, http.PROBLEM_MEDIA_TYPE
    )


def _walk(
    routes: Sequence[BaseRoute], prefix: str = "", *, into_mounts: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the whole path template and the route, or its context, of all routes.

    Raises `ConfigurationError` for an entry that it cannot read: FastAPI 0.137.0 and 0.137.1 have
    such, and no function that walks their routes.
    """
    iter_contexts = getattr(fastapi.routing, "iter_route_contexts", iter)
    for route in iter_contexts(routes):
        entry = getattr(route, "original_route", route)
        if isinstance(entry, (Mount, Host)):
            if into_mounts and isinstance(entry, Mount):
                yield from _walk(entry.routes or (), prefix + entry.path)
        elif isinstance(entry, (Route, WebSocketRoute, BaseRoute)) and _path_of(route) is not None:
            yield f"{prefix}{_path_of(route)}", route
        else:
            raise ConfigurationError(
                f"the routes of this FastAPI {fastapi.__version__} cannot be read "
                f"({type(entry).__name__}): update FastAPI, or rate_limits.install(app, "
                "openapi=False); limits hold in either case"
            )


def _path_of(route: Any) -> str | None:
    """Return the path template of a route or of its context, with the prefixes of routers."""
    path = getattr(_effective(route), "path", None)
    return path if isinstance(path, str) else None


def _limits_of(route: Any) -> Iterator[RequestLimit]:
    """Yield the limits in the tree of dependencies of a route or of its context."""
    dependants = [getattr(_effective(route), "dependant", None)]
    for dependant in dependants:
        for each in getattr(dependant, "dependencies", ()):
            if isinstance(each.call, RequestLimit):
                yield each.call
            dependants.append(each)


def _effective(route: Any) -> Any:
    """Return what has the path and the dependencies: of a websocket in a router, a route that its
    context has.
    """
    inner = getattr(route, "starlette_route", None)
    return route if inner is None else inner


__all__ = [
    "EXPOSED_HEADERS",
    "ClientAddress",
    "LimitOfRoutes",
    "RateLimitMiddleware",
    "RateLimited",
    "RateLimits",
    "client_address",
]
