"""Which limits the routes of an application have, and what OpenAPI says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import fastapi
import fastapi.routing
from starlette.routing import BaseRoute, Host, Mount, Route, WebSocketRoute

from ...errors import ConfigurationError
from .. import asgi, http
from ..http.scopes import Scope
from .dependencies import AllOf


class LimitOfRoutes(NamedTuple):
    """One limit of an application, as `RateLimits.limits_of` lists them."""

    name: str
    limits: str
    """As text; the name of the function that returns them, if there is one."""
    routes: tuple[str, ...]
    """Method and path template of each."""


def limits_of(app: fastapi.FastAPI) -> list[LimitOfRoutes]:
    """Return the limits that are dependencies of routes of `app`, in their order."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, route in _walk(app.routes):
        for method in sorted(getattr(route, "methods", None) or {"WEBSOCKET"}):
            for limit in _limits_of(route, method):
                name = limit.name or f"{asgi.method_of({'method': method})} {path}"
                found.setdefault((name, limit.text), []).append(f"{method} {path}")
    return [LimitOfRoutes(*key, tuple(routes)) for key, routes in found.items()]


def document(app: fastapi.FastAPI, schema: dict[str, Any], headers: http.Headers) -> None:
    """Add the refusals of limited routes to an OpenAPI schema."""
    for _, route in _walk(app.routes, into_mounts=False):
        operations = schema.get("paths", {}).get(getattr(route, "path_format", None), {})
        for method in getattr(route, "methods", None) or ():
            limits = list(_limits_of(route, method))
            responses = operations.get(method.lower(), {}).get("responses")
            if limits and responses is not None:
                responses.setdefault("429", _response(headers, "Too Many Requests", fields=True))
                if any(limit.on_store_error == "deny" for limit in limits):
                    responses.setdefault("503", _response(headers, "Service Unavailable"))


def _response(headers: http.Headers, description: str, *, fields: bool = False) -> dict[str, Any]:
    policy, limit, retry_after, *older = http.EXPOSED_HEADERS
    names = [policy, limit] if fields and headers in ("ietf", "both") else []
    names += older if fields and headers in ("x-ratelimit", "both") else []
    integers = {retry_after, *older}
    types = {name: "integer" if name in integers else "string" for name in [*names, retry_after]}
    return {
        "description": description,
        "headers": {name: {"schema": {"type": kind}} for name, kind in types.items()},
        "content": {http.PROBLEM_MEDIA_TYPE: {"schema": http.PROBLEM_SCHEMA}},
    }


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
        elif isinstance(entry, (Route, WebSocketRoute, BaseRoute)) and path_of(route) is not None:
            yield f"{prefix}{path_of(route)}", route
        else:
            raise ConfigurationError(
                f"the routes of this FastAPI {fastapi.__version__} cannot be read "
                f"({type(entry).__name__}): update FastAPI, or rate_limits.install(app, "
                "openapi=False); limits hold in either case"
            )


def path_of(route: Any) -> str | None:
    """Return the path template of a route or of its context, with the prefixes of routers."""
    path = getattr(_effective(route), "path", None)
    return path if isinstance(path, str) else None


def route_of(scope: Scope) -> Any:
    """Return the route of a request, or its context in a router; None where there is none."""
    context = (scope.get("fastapi") or {}).get("effective_route_context")
    return scope.get("route") if context is None else context


def first_with_dependencies(routes: Sequence[BaseRoute]) -> str | None:
    """Return the path template of the first route that may have dependencies, if there is one."""
    found = _walk(routes, into_mounts=False)
    return next((path for path, route in found if hasattr(_effective(route), "dependant")), None)


def limits_after(limit: Any, route: Any) -> list[Any]:
    """Return the limits at `route` behind `limit`, one of the application: also of routers."""
    dependencies = _dependencies_of(route)
    calls = [each.call for each in dependencies]
    return list(_limits_in(dependencies[calls.index(limit) + 1 :] if limit in calls else ()))


def _limits_of(route: Any, method: str) -> Iterator[Any]:
    """Yield the limits that are asked at a route, or at its context, for a method."""
    counted = asgi.method_of({"method": method})
    for limit in _limits_in(_dependencies_of(route)):
        of = limit.rate_limits
        is_replaced = limit is of.default_limit and http.replace_default(
            limits_after(limit, route), counted
        )
        if not is_replaced and not of.is_exempt(getattr(_effective(route), "endpoint", None)):
            yield limit


def _limits_in(dependencies: Sequence[Any]) -> Iterator[Any]:
    """Yield the limits among dependencies, and those that these depend on."""
    left = [*dependencies]
    for each in left:
        if isinstance(each.call, asgi.RequestLimit):
            yield each.call
        elif isinstance(each.call, AllOf):
            yield from each.call.limits
        left += each.dependencies


def _dependencies_of(route: Any) -> Sequence[Any]:
    """Return the dependencies of a route or of its context, of the application first."""
    dependant = getattr(_effective(route), "dependant", None)
    dependencies: Sequence[Any] = getattr(dependant, "dependencies", ())
    return dependencies


def _effective(route: Any) -> Any:
    """Return what has the path and the dependencies: of a websocket, the route in its context."""
    inner = getattr(route, "starlette_route", None)
    return route if inner is None else inner
