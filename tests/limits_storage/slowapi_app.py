"""An application with slowapi, in the ways that its pages show, on the storage of this library:

    export DISTWINDOW_URL=redis://localhost:6379/0
    uvicorn --factory tests.limits_storage.slowapi_app:sample

STRATEGY chooses the strategy, and DISTWINDOW_TIMEOUT how long calls wait for the store.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler, wrappers
from slowapi.errors import RateLimitExceeded
from slowapi.middleware import SlowAPIASGIMiddleware, SlowAPIMiddleware
from slowapi.util import get_remote_address

import distwindow.contrib.limits  # noqa: F401 - the line that is added
from tests.limits_storage.common import STRATEGIES, settings


def user(request: Request) -> str:
    """Who calls, for tests that are several clients at one address."""
    return request.headers.get("X-User") or get_remote_address(request)


def plan(request: Request) -> str:
    return request.headers.get("X-Plan", "free")


def by_plan(key: str) -> str:
    return "20/year" if key == "gold" else "4/year"


def cost(request: Request) -> int:
    return int(request.headers.get("X-Cost", "1"))


def is_internal(request: Request) -> bool:
    return "X-Internal" in request.headers


TAKES_REQUEST = callable(wrappers.Limit.is_exempt)
"""Whether `exempt_when` may look at the request, as it may not in slowapi 0.1.9."""


def application(limiter: Limiter, middleware: Any = None) -> FastAPI:
    """Return an application with the handler, and perhaps a middleware, of slowapi."""
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)
    if middleware is not None:
        app.add_middleware(middleware)
    return app


def waits(strategy: str) -> FastAPI:
    """A route with a limit of few seconds."""
    limiter = Limiter(user, **settings(strategy=strategy))
    app = application(limiter)

    @app.get("/wait")
    @limiter.limit("2 per 2 second")
    async def wait(request: Request, response: Response) -> str:
        return "passed"

    return app


def sample() -> FastAPI:
    """Routes that block, and routes that await."""
    limiter = Limiter(user, **settings())
    app = application(limiter)

    @app.get("/free")
    async def free() -> int:
        return os.getpid()

    @app.get("/five")
    @limiter.limit("5/minute")
    async def five(request: Request, response: Response) -> int:
        return os.getpid()

    @app.get("/threads")
    @limiter.limit("5/minute")
    def threads(request: Request, response: Response) -> int:
        return os.getpid()

    for strategy in STRATEGIES:
        app.mount(f"/{strategy}", waits(strategy))
    return app


def down() -> FastAPI:
    """A route for each answer to a store that is away."""
    app = application(Limiter(user, **settings(in_memory_fallback_enabled=True)))
    fallback = app.state.limiter
    swallow = Limiter(user, **settings(swallow_errors=True, headers_enabled=False))
    neither = Limiter(user, **settings(headers_enabled=False))

    @app.get("/free")
    async def free() -> int:
        return os.getpid()

    @app.get("/in_memory_fallback_enabled")
    @fallback.limit("5/day")
    async def in_memory_fallback_enabled(request: Request, response: Response) -> str:
        return "served"

    @app.get("/swallow_errors")
    @swallow.limit("5/day")
    async def swallow_errors(request: Request) -> str:
        # slowapi looks at this, and sets it where it has counted only.
        request.state.view_rate_limit = getattr(request.state, "view_rate_limit", None)
        return "served"

    @app.get("/neither")
    @neither.limit("5/day")
    async def of_neither(request: Request) -> str:
        return "served"

    return app


MIDDLEWARES: dict[str, Any] = {
    "none": None,
    "http": SlowAPIMiddleware,
    "asgi": SlowAPIASGIMiddleware,
}


def kitchen_sink(middleware: str = "none", **more: Any) -> FastAPI:
    """What the pages of slowapi show. Intervals are long against a test."""
    limiter = Limiter(
        user, default_limits=["9/year", "1000/year"], application_limits=["70/year"],
        **settings(**more),
    )  # fmt: skip
    app = application(limiter, MIDDLEWARES[middleware])
    shared = limiter.shared_limit("7/year", scope="shared")

    def add(path: str, *limits: Any) -> None:
        """Add a route with limits that are decorators, the first above the others."""

        async def view(request: Request, response: Response) -> str:
            return f"{request.method} {path}"

        view.__name__ = path  # slowapi tells views apart by it
        limited: Any = view
        for limit in reversed(limits):
            limited = limit(limited)
        app.api_route(path, methods=["GET", "POST"])(limited)

    add("/limit", limiter.limit("5/year"))
    add("/default")
    add("/exempt", limiter.exempt)
    add("/dynamic", limiter.limit(by_plan, key_func=plan))
    exempt_when = is_internal if TAKES_REQUEST else lambda: True
    add("/exempt-when", limiter.limit("3/year", exempt_when=exempt_when))
    add("/cost", limiter.limit("10/year", cost=cost))
    add("/cost-3", limiter.limit("10/year", cost=3))
    add("/methods", limiter.limit("4/year", per_method=True))
    add("/posts", limiter.limit("4/year", methods=["POST"]))
    add("/shared-1", shared)
    add("/shared-2", limiter.limit("5/year"), shared)

    @app.get("/several")
    @limiter.limit("8/year;6 per 3 year")
    @limiter.limit("3/year", key_func=plan)
    def several(request: Request, response: Response) -> str:
        return "several"

    @app.get("/items/{item}")
    @limiter.limit("4/year")
    async def items(item: str, request: Request, response: Response) -> str:
        return item

    return app
