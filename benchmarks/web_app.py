"""The applications that benchmarks/web.py serves, one in each process: a FastAPI route that answers
with a small JSON object, without a limit and under one that is never reached.

`make(NAME)` with the server's URL in BENCHMARK_REDIS_URL; all keys are the address of the caller.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response

LIMIT = 100_000_000
"""Requests per minute: all are admitted."""


def make() -> FastAPI:
    """Return the application that BENCHMARK_APP names, for `uvicorn --factory`."""
    return APPS[os.environ["BENCHMARK_APP"]](os.environ["BENCHMARK_REDIS_URL"])


def _answer() -> dict[str, str]:
    return {"message": "hello"}


def _bare(url: str) -> FastAPI:
    app = FastAPI()
    _add_route(app)
    return app


def _add_route(app: FastAPI, *dependencies: Any) -> None:
    @app.get("/", dependencies=[Depends(one) for one in dependencies])
    async def answer() -> dict[str, str]:
        return _answer()


def _empty_dependency(url: str) -> FastAPI:
    async def nothing(request: Request) -> None: ...

    app = FastAPI()
    _add_route(app, nothing)
    return app


def _by_hand(consistency: Any) -> Callable[[str], FastAPI]:
    """Return an application as one would write it without an integration: no fields, no names."""

    def make(url: str) -> FastAPI:
        from distwindow import AsyncLimiter

        limiter = AsyncLimiter(url, f"{LIMIT}/minute", consistency=consistency)

        async def limit(request: Request) -> None:
            assert request.client is not None
            if not await limiter.try_acquire(request.client.host):
                raise HTTPException(429)

        app = FastAPI(lifespan=_closing(limiter))
        _add_route(app, limit)
        return app

    return make


def _closing(resource: Any) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with resource:
            yield

    return lifespan


def _dependency(consistency: Any) -> Callable[[str], FastAPI]:
    def make(url: str) -> FastAPI:
        from distwindow.contrib.fastapi import RateLimits

        rate_limits = RateLimits(url, on_store_error="allow", consistency=consistency)
        app = FastAPI(lifespan=_closing(rate_limits))
        rate_limits.install(app)
        _add_route(app, rate_limits.limit(f"{LIMIT}/minute"))
        return app

    return make


def _frozen(make: Callable[[str], FastAPI]) -> Callable[[str], FastAPI]:
    """Return the same application, with modules that the garbage collector leaves alone."""

    def make_frozen(url: str) -> FastAPI:
        app = make(url)
        gc.collect()
        gc.freeze()
        return app

    return make_frozen


def _middleware(consistency: Any) -> Callable[[str], FastAPI]:
    def make(url: str) -> FastAPI:
        from distwindow.contrib.asgi import RateLimitMiddleware, RateLimits

        rate_limits = RateLimits(url, on_store_error="allow", consistency=consistency)
        app = FastAPI(lifespan=_closing(rate_limits))
        app.add_middleware(RateLimitMiddleware, rate_limits=rate_limits, limits=f"{LIMIT}/minute")
        _add_route(app)
        return app

    return make


class _TwoFields:
    """A middleware that only adds two constant header fields, as many as ours."""

    FIELDS = ((b"ratelimit-policy", b'"default";q=1000;w=60'), (b"ratelimit", b'"default";r=9;t=9'))

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_fields(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.FIELDS]
            await send(message)

        await self.app(scope, receive, send_with_fields)


def _two_fields(url: str) -> FastAPI:
    app = FastAPI()
    app.add_middleware(_TwoFields)
    _add_route(app)
    return app


def _fastapi_redis_sdk(url: str) -> FastAPI:
    os.environ["REDIS_URL"] = url  # read once by its settings
    from redis_fastapi import FastAPIRedis
    from redis_fastapi.ratelimit import rate_limit

    app = FastAPI()
    FastAPIRedis(app).lifespan().rate_limiting()
    _add_route(app, rate_limit(limit=LIMIT, window=60))
    return app


def _slowapi(url: str) -> FastAPI:
    from slowapi import Limiter
    from slowapi.util import get_remote_address

    limiter = Limiter(get_remote_address, storage_uri=url)  # fixed windows, its fastest
    app = FastAPI()
    app.state.limiter = limiter

    @app.get("/")
    @limiter.limit(f"{LIMIT}/minute")  # type: ignore[untyped-decorator, unused-ignore]  # older ones are not annotated
    async def answer(request: Request) -> dict[str, str]:
        return _answer()

    return app


def _fastapi_limiter(url: str) -> FastAPI:
    from fastapi_limiter.depends import RateLimiter
    from pyrate_limiter import Limiter, Rate, RedisBucket
    from redis.asyncio import Redis

    limiters: list[RateLimiter] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        bucket = await RedisBucket.init([Rate(LIMIT, 60_000)], Redis.from_url(url), "bench")
        limiters.append(RateLimiter(Limiter(bucket)))
        yield

    async def limit(request: Request, response: Response) -> None:
        await limiters[0](request, response)

    app = FastAPI(lifespan=lifespan)
    _add_route(app, limit)
    return app


APPS: dict[str, Callable[[str], FastAPI]] = {
    "bare": _bare,
    "an empty dependency": _empty_dependency,
    "a middleware that adds two header fields": _two_fields,
    "a dependency on AsyncLimiter by hand, direct": _by_hand("direct"),
    "a dependency on AsyncLimiter by hand, leased": _by_hand("leased"),
    "contrib.fastapi, direct": _dependency("direct"),
    "contrib.fastapi, direct, after gc.freeze()": _frozen(_dependency("direct")),
    "contrib.fastapi, leased": _dependency("leased"),
    "RateLimitMiddleware, direct": _middleware("direct"),
    "RateLimitMiddleware, leased": _middleware("leased"),
    "fastapi-redis-sdk": _fastapi_redis_sdk,
    "slowapi": _slowapi,
    "fastapi-limiter": _fastapi_limiter,
}
