"""Limits of FastAPI applications, for the whole fleet, as dependencies.

rate_limits = RateLimits("redis://localhost:6379/0", on_store_error="allow")
rate_limits.install(app)

@app.get("/search", dependencies=[Depends(rate_limits.limit("10/minute"))])
async def search(q: str): ...
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, RateLimitExceeded, short_repr
from ...ring.decision import Decision
from ...support.callables import function_name
from .. import asgi, http, needs
from ..asgi import EXPOSED_HEADERS, ClientAddress, RateLimitMiddleware, client_address

with needs("fastapi"):
    import fastapi
    from fastapi.params import Depends
    from starlette.requests import HTTPConnection
    from starlette.responses import JSONResponse, Response

    from .dependencies import (
        WRITE,
        AllOf,
        Dependency,
        DependencyMethod,
        limited_request,
        no_dependency,
    )
    from .routes import (
        LimitOfRoutes,
        document,
        first_with_dependencies,
        limits_after,
        limits_of,
        path_of,
        route_of,
    )

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("distwindow")


class RateLimited(fastapi.HTTPException, http.RateLimited):  # type: ignore[misc]  # `headers`
    """A request was refused: an `HTTPException` of status 429, or 503 where the store was away and
    `on_store_error` is "deny". `.decision`, `.retry_after`, `.headers`, `.problem`.
    """

    def __init__(self, decision: Decision, answers: Sequence[Any], unit: str) -> None:
        http.RateLimited.__init__(self, decision, answers, unit)
        detail, headers = self.problem["detail"], self.headers
        fastapi.HTTPException.__init__(self, self.status_code, detail, headers)


class RequestLimit(Dependency, asgi.RequestLimit):
    """One limit: a dependency of routes and websockets, which is the decision in their functions.

    It is None where the request is not limited: it is exempt, or the limits are switched off.
    """

    rate_limits: RateLimits

    def __init__(self, rate_limits: RateLimits, limits: Any, **options: Any) -> None:
        parameters = [
            inspect.Parameter("connection", _KEYWORD, annotation=HTTPConnection),
            inspect.Parameter("response", _KEYWORD, annotation=Response),
        ]
        options["limits"] = limits
        for name in ("key", "cost", "limits"):
            option = options.get(name)
            if isinstance(option, Depends):
                parameters.append(inspect.Parameter(name, _KEYWORD, default=option))
                options[name] = _resolved_by_fastapi(name, option.dependency)
        # FastAPI asks for the values of these, which it finds by their types.
        self.__signature__ = inspect.Signature(parameters)
        try:
            super().__init__(rate_limits, **options)
        except ConfigurationError as exc:
            if not inspect.isfunction(limits):
                raise
            raise ConfigurationError(f"{exc}; if it is the function of a route, {WRITE}") from None

    async def _ask(
        self, *, connection: HTTPConnection, response: Response, **given: Any
    ) -> Decision | None:
        """Ask this limit for a request; for FastAPI."""
        of = self.rate_limits
        is_default = self is of.default_limit
        if (is_default or of.has_exemptions) and not of.holds(self, connection.scope):
            return None
        limited = limited_request(connection, self)
        if given.keys() <= {"key"}:
            known = self.decide_at_once(connection, limited, **given)
        else:
            known = self.decide(connection, limited, **given)
        if limited.is_watched and isinstance(known, Decision):
            return known
        return await of.decision_of(known, connection, response, limited)

    __call__ = DependencyMethod(_ask)

    def name_of(self, request: Any) -> str:
        """Return the method and the whole path template of the route of `request`."""
        scope = asgi.scope_of(request)
        route = route_of(scope)
        return self.name_of_route(scope, getattr(route, "path", None) or path_of(route))


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _resolved_by_fastapi(option: str, dependency: Any) -> Callable[..., Any]:
    """Return what stands for an option that is a dependency."""

    def resolved(request: object) -> Any:
        raise ConfigurationError(
            f"{option}={resolved.__qualname__} is resolved where the limit is a dependency; in a "
            f"handler, ask a limit whose {option} is a function of the request"
        )

    resolved.__qualname__ = f"Depends({function_name(dependency)})"
    return resolved


class _InstalledMiddleware(RateLimitMiddleware):
    """The middleware that `RateLimits.install` adds."""


class RateLimits(http.ExemptsViews, asgi.AsgiRateLimits[RequestLimit]):
    __doc__ = http.AsyncRateLimits.__doc__
    limit_type = RequestLimit
    address_type = ClientAddress
    error_type = RateLimited
    install_hint = "rate_limits.install(app)"
    request_type = HTTPConnection
    knows_routes = True
    _has_logged = False
    _has_default_routes = False
    limit = no_dependency(asgi.AsgiRateLimits[RequestLimit].limit)

    async def __aenter__(self) -> Self:
        if self.default_limit is not None and not self._has_default_routes:
            raise ConfigurationError(
                "default_limits hold for no route before rate_limits.install(app); call it where "
                "the application is made"
            )
        return await super().__aenter__()

    @cached_property
    def _own_limits(self) -> dict[int, tuple[Any, list[RequestLimit]]]:
        """By the id of a route: itself, and its limits that may replace the default one."""
        return {}

    def holds(self, limit: RequestLimit, scope: Any) -> bool:
        """Return whether a limit is asked at the route of a request: not where that is exempt, and
        not the default one where the route has one of its own.
        """
        if self.is_exempt(scope.get("endpoint")):
            return False
        if limit is not self.default_limit:
            return True
        route = route_of(scope)
        if not path_of(route):  # files of a frontend
            return False
        known = self._own_limits.get(id(route))
        if known is None:
            own = [each for each in limits_after(limit, route) if each.rate_limits is self]
            known = self._own_limits[id(route)] = route, own
        return not http.replace_default(known[1], asgi.method_of(scope))

    async def _check(
        self, connection: Any, limits: tuple[RequestLimit, ...], cost: int | None
    ) -> Decision | None:
        try:
            return await super()._check(connection, limits, cost)
        except RateLimited:
            _answer_in_mounted(asgi.scope_of(connection))
            raise

    def all_of(self, *limits: RequestLimit) -> AllOf:
        """Return a dependency that asks several limits, which this object has made, each with its
        key and cost: all or none, in one round trip where that can be. Its value is the decision
        on all.
        """
        if not limits or not all(isinstance(limit, RequestLimit) for limit in limits):
            raise ConfigurationError(
                "all_of takes limits that rate_limits.limit(...) has made, not "
                f"{short_repr(limits)}"
            )
        return AllOf(self, limits)

    async def decision_of(
        self, known: Any, connection: Any, response: Response, limited: http.LimitedRequest
    ) -> Decision | None:
        """Return the decision of a dependency, which may be known already."""
        try:
            if not isinstance(known, Decision):
                known = await http.decided(known, limited)
        except RateLimited:
            _answer_in_mounted(connection.scope)
            raise
        if not limited.is_watched and limited:
            self.log_missing_install()
            response.headers.update(limited.fields_to_set(200, lambda name: None))
        decision: Decision | None = known
        return decision

    def install(self, app: fastapi.FastAPI, *, openapi: bool = True) -> None:
        """Add to `app`, once: the middleware that writes header fields, a handler that answers
        refusals with a problem body, unless it has one for `RateLimited`, and one for what limiters
        raise in handlers (`RateLimitExceeded`), and with `openapi` the
        responses 429 and 503 of limited routes, unless a route documents them itself. With
        `default_limits`, which hold for the routes that are added afterwards, it raises
        `ConfigurationError` if there are some already.
        """
        for each in app.user_middleware:
            entry: tuple[Any, ...] = tuple(each)  # the class, and its options last
            if entry[0] is _InstalledMiddleware and entry[-1]["rate_limits"] is self:
                return
        if self.default_limit is not None:
            early = first_with_dependencies(app.routes)
            if early is not None:
                raise ConfigurationError(
                    "default_limits hold for the routes that are added after "
                    f"rate_limits.install(app), and {early} was added before; call it first"
                )
            app.router.dependencies.append(Depends(self.default_limit))
            self._has_default_routes = True
        app.add_middleware(_InstalledMiddleware, rate_limits=self)
        app.exception_handlers.setdefault(RateLimited, _respond)
        app.exception_handlers.setdefault(RateLimitExceeded, self._respond_exceeded)
        if openapi:
            without_limits = app.openapi

            def with_limits() -> dict[str, Any]:
                if not app.openapi_schema:
                    document(app, without_limits(), self.headers)
                return without_limits()

            app.openapi = with_limits  # type: ignore[method-assign]  # as FastAPI's docs have it

    async def _respond_exceeded(self, connection: HTTPConnection, exceeded: Exception) -> Response:
        """Answer what a limiter has raised in a handler."""
        assert isinstance(exceeded, RateLimitExceeded)
        return await _respond(connection, self.refusal_of(exceeded))

    def limits_of(self, app: fastapi.FastAPI) -> list[LimitOfRoutes]:
        """Return the limits that are dependencies of routes of `app`, in their order."""
        return limits_of(app)

    def log_missing_install(self) -> None:
        """Log once that responses may lack the header fields."""
        if not self._has_logged:
            self._has_logged = True
            _LOG.warning(
                "responses of routes that return a Response have no RateLimit fields, and refusals "
                "no problem body: call rate_limits.install(app)"
            )


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


__all__ = [
    "EXPOSED_HEADERS",
    "ClientAddress",
    "LimitOfRoutes",
    "RateLimitMiddleware",
    "RateLimited",
    "RateLimits",
    "client_address",
]
