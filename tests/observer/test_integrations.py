"""Each integration has an observer, tells it the names of its limits, and counts nothing twice."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from distwindow import set_default_observer
from distwindow.contrib import http
from tests.observer.told import Told

LIMIT = "2/minute strict"
Ask = Callable[[Told], int]
"""Asks three times, and returns how often it was refused."""
REFUSED = 429


def asgi(told: Told) -> int:
    from distwindow.contrib import asgi
    from tests.web.test_asgi import http_scope, statuses

    of = asgi.RateLimits("memory://", on_store_error="raise", observer=told)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limited = asgi.RateLimitMiddleware(app, of, LIMIT, name="search")

    async def ask() -> int:
        found = await statuses(limited, *[http_scope() for _ in range(3)])
        await of.aclose()
        return found.count(REFUSED)

    return asyncio.run(ask())


def fastapi(told: Told) -> int:
    fastapi, ours = import_module("fastapi"), import_module("distwindow.contrib.fastapi")
    from tests.web.test_asgi import http_scope, statuses

    of = ours.RateLimits("memory://", on_store_error="raise", observer=told)
    app = fastapi.FastAPI()
    of.install(app)
    limit = fastapi.Depends(of.limit(LIMIT, name="search"))
    app.get("/", dependencies=[limit])(lambda: "ok")

    async def ask() -> int:
        found = await statuses(app, *[http_scope(query_string=b"") for _ in range(3)])
        await of.aclose()
        return found.count(REFUSED)

    return asyncio.run(ask())


def flask(told: Told) -> int:
    flask, ours = import_module("flask"), import_module("distwindow.contrib.flask")
    of = ours.RateLimits("memory://", on_store_error="raise", observer=told)
    app = flask.Flask("app")
    of.init_app(app)
    app.get("/")(of.limit(LIMIT, name="search")(lambda: "ok"))
    found = [app.test_client().get("/").status_code for _ in range(3)]
    of.close()
    return found.count(REFUSED)


def django(told: Told) -> int:
    pytest.importorskip("rest_framework")
    from django.test import Client

    from tests.web.django_project import distwindow, routes

    ours = import_module("distwindow.contrib.django")
    views = import_module("django.http")
    with distwindow(observer=told):
        view = ours.rate_limit(LIMIT, name="search")(lambda request: views.HttpResponse("ok"))
        with routes(view=view):
            found = [Client().get("/view").status_code for _ in range(3)]
        ours.rate_limits().close()
    return found.count(REFUSED)


def drf(told: Told) -> int:
    pytest.importorskip("rest_framework")
    from tests.web.django_project import distwindow
    from tests.web.test_drf import status, view

    ours = import_module("distwindow.contrib.drf")
    throttle = type("Search", (ours.AnonRateThrottle,), {"rate": LIMIT, "scope": "search"})
    with distwindow(observer=told):
        limited = view(throttle)
        found = [status(limited) for _ in range(3)]
        ours.rate_limits().close()
    return found.count(REFUSED)


def fastmcp(told: Told) -> int:
    pytest.importorskip("fastmcp")
    of_mcp = import_module("tests.agents.test_fastmcp")  # mypy is not to follow it

    async def ask() -> int:
        of = of_mcp.limits_in(observer=told)
        async with of_mcp.connected(of, of.tools({"search": LIMIT}, name="of")) as client:
            return [await of_mcp.search(client) is True for _ in range(3)].count(False)

    return asyncio.run(ask())


ASKED: dict[str, Ask] = {
    "asgi": asgi, "fastapi": fastapi, "flask": flask, "django": django, "drf": drf,
    "fastmcp": fastmcp,
}  # fmt: skip
NAMES = {"fastmcp": "of search"}


@pytest.fixture
def by_default() -> Iterator[Told]:
    told = Told()
    set_default_observer(told)
    yield told
    set_default_observer(None)


@pytest.mark.parametrize("integration", ASKED)
def test_each_integration_tells_its_observer(integration: str, by_default: Told) -> None:
    told = Told()
    assert ASKED[integration](told) == 1
    found = [(each.source_kind, each.name, each.result, each.calls) for each in told.counts]
    name = NAMES.get(integration, "search")
    assert sorted(found) == [("web", name, "allowed", 2), ("web", name, "refused", 1)]
    assert not by_default.counts, "its limiters have no observer, or all would be counted twice"


def test_the_default_observer_is_that_of_what_is_made_then(by_default: Told) -> None:
    from tests.web.test_rate_limits import Blocking

    of = Blocking("memory://", on_store_error="raise")
    set_default_observer(None)
    limit = of.limit(LIMIT, name="search")
    for _ in range(2):  # what is closed opens again, and tells the same
        of.run(limit.decide({}, http.LimitedRequest()))
        of.close()
    assert [(each.name, each.calls) for each in by_default.counts] == [("search", 1)] * 2


def test_each_kind_of_rate_limits_takes_an_observer() -> None:
    pytest.importorskip("rest_framework")
    import_module("tests.web.django_project")  # its settings come first
    names = [name for name in ASKED if name != "fastmcp" or find_spec("fastmcp")]
    modules = [import_module(f"distwindow.contrib.{name}") for name in names]
    for kind in [module.RateLimits for module in modules if hasattr(module, "RateLimits")]:
        assert {"observer", "key_label"} <= {*inspect.signature(kind).parameters}, kind
