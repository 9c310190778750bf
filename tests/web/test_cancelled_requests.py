"""A request that is cancelled while one of its limits is asked is charged nothing by any of them:
its client has gone, or its time is over, and nothing was served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from fastapi import Depends, FastAPI

pytest.importorskip("django")

from django.http import HttpResponse
from django.test import AsyncClient, override_settings

from distwindow.contrib import asgi, fastapi
from tests.web import django_project as project
from tests.web.test_asgi import BODY, START, call, http_scope

from distwindow.contrib.django import rate_limit, rate_limits  # isort: skip  # after the settings

AMOUNT = 99
OUTER, INNER = f"{AMOUNT}/hour", f"{AMOUNT}/day"
UNCOUNTED = {"count_when": lambda response: False}


class Site(NamedTuple):
    """An application with two limits of all requests together."""

    ask: Callable[[], Any]
    """A coroutine function that sends one request."""
    served: list[None]
    """One entry for each request that has reached the handler."""
    rate_limits: Any


@asynccontextmanager
async def on_asgi(options: Any, outer: Any) -> AsyncIterator[Site]:
    served: list[None] = []
    key: Any = {"key": lambda scope: "all"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(None)
        await send(START)
        await send(BODY)

    async with asgi.RateLimits(**options) as of:
        inner = asgi.RateLimitMiddleware(app, of, INNER, **key)
        wrapped = asgi.RateLimitMiddleware(inner, of, OUTER, **key, **outer)
        yield Site(lambda: call(wrapped, http_scope()), served, of)


@asynccontextmanager
async def on_fastapi(options: Any, outer: Any, installed: bool = True) -> AsyncIterator[Site]:
    served: list[None] = []

    async def home() -> None:
        served.append(None)

    async with fastapi.RateLimits(**options) as of:
        application, inner = (
            of.limit(limits, key=lambda request: "all", **more)
            for limits, more in ((OUTER, outer), (INNER, {}))
        )
        app = FastAPI(dependencies=[Depends(application)])
        if installed:
            of.install(app)
        app.get("/", dependencies=[Depends(inner)])(home)
        yield Site(lambda: call(app, {**http_scope(), "query_string": b""}), served, of)


def on_fastapi_alone(options: Any, outer: Any) -> Any:
    return on_fastapi(options, outer, installed=False)


@asynccontextmanager
async def on_django(options: Any, outer: Any) -> AsyncIterator[Site]:
    served: list[None] = []

    async def home(request: Any) -> HttpResponse:
        served.append(None)
        return HttpResponse("home")

    given: Any = {"key": lambda request: "all"}
    view = rate_limit(OUTER, **given, **outer)(rate_limit(INNER, **given)(home))
    with override_settings(DISTWINDOW=options), project.routes(view=view):
        client = AsyncClient()
        yield Site(lambda: client.get("/view"), served, rate_limits(awaits=True))
        await rate_limits(awaits=True).aclose()


SITES = [on_asgi, on_fastapi, on_fastapi_alone, on_django]


@pytest.mark.parametrize("outer", [{}, UNCOUNTED], ids=["plain", "count_when"])
@pytest.mark.parametrize("consistency", ["direct", "leased"])
@pytest.mark.parametrize("site", SITES)
async def test_what_is_not_served_is_not_charged(
    redis_url: str, prefix: str, site: Any, consistency: Any, outer: Any
) -> None:
    if outer and site is on_fastapi_alone:
        return  # without a middleware there is no `count_when`
    options = {"store": redis_url, "prefix": prefix, "on_store_error": "raise", "timeout": 10.0}
    async with site({**options, "consistency": consistency}, outer) as made:
        await made.ask()  # connects
        not_served = 0
        for passes in range(40):
            before = len(made.served)
            request = asyncio.ensure_future(made.ask())
            for _ in range(passes):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
            not_served += len(made.served) == before
            for _ in range(3):
                await asyncio.sleep(0)
                await made.rate_limits.opened.store.drain()
        assert not_served
        await made.rate_limits.aclose()
        for _ in range(AMOUNT + 1):
            await made.ask()
        assert len(made.served) == AMOUNT
