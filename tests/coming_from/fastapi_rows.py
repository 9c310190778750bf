"""slowapi, fastapi-limiter and fastapi-redis-sdk, beside `distwindow.contrib.fastapi`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from distwindow.contrib.fastapi import RateLimited, RateLimitMiddleware, RateLimits

from .page import Row, differs, shows
from .world import AWAY, World, ask, names_of, statuses

SLOWAPI, FASTAPI_LIMITER, SDK = "slowapi", "fastapi-limiter", "fastapi-redis-sdk"
SECTION = "slowapi, fastapi-limiter, fastapi-redis-sdk"


def view(name: str = "answer") -> Callable[..., Any]:
    """Return a view with a name, by which slowapi tells them apart, and the argument it needs."""

    async def answer(request: Request) -> str:
        return name

    answer.__name__ = name
    return answer


def slowapi() -> dict[str, Any]:
    return names_of("slowapi", "slowapi.errors", "slowapi.middleware", "slowapi.util")


def of_slowapi(url: str = "memory://", **options: Any) -> tuple[Any, FastAPI]:
    """Return a limiter of slowapi, and an application that has it."""
    names, app = slowapi(), FastAPI()
    app.state.limiter = names["Limiter"](names["get_remote_address"], storage_uri=url, **options)
    app.add_exception_handler(names["RateLimitExceeded"], names["_rate_limit_exceeded_handler"])
    return app.state.limiter, app


def ours(store: Any, **options: Any) -> tuple[Any, FastAPI]:
    rate_limits = RateLimits(store, **{"on_store_error": "raise", **options})
    app = FastAPI()
    rate_limits.install(app)
    return rate_limits, app


def limited(app: FastAPI, *limits: Any, path: str = "/a") -> FastAPI:
    """Add a route with limits that are dependencies."""
    app.get(path, dependencies=[Depends(limit) for limit in limits])(view(path[1:]))
    return app


# -- slowapi --------------------------------------------------------------------------------------


@shows(SLOWAPI, "key_func=get_remote_address")
def an_application(row: Row, world: World) -> None:
    app, mine = of_slowapi()[1], FastAPI()
    limiter = row.theirs(0, **slowapi(), url="memory://")
    row.theirs(1, app=app, limiter=limiter)
    app.get("/a")(limiter.limit("2/minute")(view()))
    rate_limits = row.ours(0, RateLimits=RateLimits, url=world.store(), on_store_error="raise")
    row.ours(1, rate_limits=rate_limits, app=mine)
    limited(mine, rate_limits.limit("2/minute"))
    for site in (app, mine):
        assert statuses(site, *["/a"] * 3) == [200, 200, 429]
        assert statuses(site, "/a", client="8.8.8.8") == [200]


@shows(SLOWAPI, '@limiter.limit("5/minute")')
def a_route(row: Row, world: World) -> None:
    limiter, app = of_slowapi()
    app.get("/a")(row.theirs(limiter=limiter)(view()))
    rate_limits, mine = ours(world.store())
    mine.get("/a", **row.ours(rate_limits=rate_limits, Depends=Depends))(view())
    for site in (app, mine):
        assert statuses(site, *["/a"] * 6) == [200] * 5 + [429]
    with pytest.raises(Exception, match='No "request" or "websocket" argument'):
        limiter.limit("5/minute")(lambda: None)


@shows(SLOWAPI, "add_exception_handler")
def a_handler(row: Row, world: World) -> None:
    limiter, app = of_slowapi()
    app.exception_handlers.clear()
    app.get("/a")(limiter.limit("1/minute")(view()))
    row.theirs(app=app, **slowapi())
    rate_limits, mine = ours(world.store())
    limited(mine, rate_limits.limit("1/minute"))
    bodies = [ask(site, "/a", "/a")[1].json() for site in (app, mine)]
    assert bodies[0] == {"error": "Rate limit exceeded: 1 per 1 minute"}
    assert bodies[1]["status"] == 429

    async def own(request: Request, refused: Exception) -> PlainTextResponse:
        return PlainTextResponse("later", 420)

    mine = FastAPI(exception_handlers={row.ours(1, RateLimited=RateLimited): own})
    rate_limits.install(mine)
    assert statuses(limited(mine, rate_limits.limit("1/minute")), "/a") == [420]


@shows(SLOWAPI, "application_limits")
def of_an_application(row: Row, world: World) -> None:
    sites = {"slowapi": of_slowapi(application_limits=["3/minute"])[1]}
    sites["slowapi"].add_middleware(slowapi()["SlowAPIMiddleware"])
    for name in ("each route", "all"):
        rate_limits, _ = ours(world.store())
        limit = rate_limits.limit("3/minute", name=None if name == "each route" else name)
        sites[name] = row.ours(FastAPI=FastAPI, Depends=Depends, limit=limit)
        rate_limits.install(sites[name])
    rate_limits, sites["middleware"] = ours(world.store())
    middleware = row.ours(2, RateLimitMiddleware=RateLimitMiddleware)
    sites["middleware"].add_middleware(middleware, rate_limits=rate_limits, limits="3/minute")
    for site in sites.values():
        for path in ("/a", "/b"):
            site.get(path)(view(path[1:]))
    found = {name: statuses(site, "/a", "/a", "/b", "/b") for name, site in sites.items()}
    assert found.pop("each route") == [200] * 4
    assert [*found.values()] == [[200, 200, 200, 429]] * 3


@shows(SLOWAPI, "shared_limit")
def a_shared_limit(row: Row, world: World) -> None:
    limiter, app = of_slowapi()
    rate_limits, mine = ours(world.store())
    shared, limit = row.theirs(limiter=limiter), row.ours(limit=rate_limits.limit)
    for path in ("/a", "/b"):
        app.get(path)(shared(view(path[1:])))
        limited(mine, limit, path=path)
    for site in (app, mine):
        assert statuses(site, *["/a", "/b"] * 3) == [200] * 5 + [429]


@shows(SLOWAPI, "default_limits")
def default_limits(row: Row, world: World) -> None:
    default: dict[str, Any] = {name: ["3/minute"] for name in row.theirs()}
    besides = row.theirs(1)
    limiter, app = of_slowapi(**default)
    app.add_middleware(slowapi()["SlowAPIMiddleware"])
    rate_limits, mine = ours(world.store(), **default)
    app.get("/plain")(view("plain"))
    limited(mine, path="/plain")
    for path, options in (("/own", {}), ("/both", besides)):
        app.get(path)(limiter.limit("5/minute", **options)(view(path[1:])))
        limited(mine, rate_limits.limit("5/minute", **options), path=path)
    for site in (app, mine):
        paths = ("/plain", "/own", "/both")
        assert [statuses(site, *[path] * 6).count(200) for path in paths] == [3, 5, 3]


@shows(SLOWAPI, "`@limiter.exempt`")
def exempt_routes(row: Row, world: World) -> None:
    limiter, app = of_slowapi(default_limits=["1/minute"])
    app.add_middleware(slowapi()["SlowAPIMiddleware"])
    rate_limits, mine = ours(world.store(), default_limits="1/minute")
    app.get("/a")(row.theirs(limiter=limiter)(view("a")))
    mine.get("/a")(row.ours(rate_limits=rate_limits)(view("a")))
    row.ours(rate_limits=rate_limits)(mine.get("/b")(view("b")))  # above the route
    assert statuses(app, "/a", "/a") == [200, 200]
    assert statuses(mine, "/a", "/a", "/b", "/b") == [200] * 4


@shows(SLOWAPI, "exempt_when=")
def exempt(row: Row, world: World) -> None:
    def by_field(request: Request) -> bool:
        return "internal" in request.headers

    async def in_task(request: Request) -> bool:
        return by_field(request)

    limiter, app = of_slowapi()
    app.get("/a")(limiter.limit("1/minute", exempt_when=by_field)(view()))
    for function in (by_field, in_task):
        rate_limits, mine = ours(world.store())
        limited(mine, rate_limits.limit("1/minute", exempt=function))
        for site in (app, mine):
            assert statuses(site, "/a", "/a", internal="yes") == [200, 200]
        assert statuses(mine, "/a", "/a") == [200, 429]
    assert statuses(app, "/a", "/a") == [200, 429]


def of_slowapi_without_redis(**options: Any) -> list[int]:
    limiter, app = of_slowapi(AWAY, **options)
    app.get("/a")(limiter.limit("1/minute")(view()))
    return statuses(app, "/a", "/a")


@shows(SLOWAPI, "swallow_errors")
def while_redis_is_away(row: Row, world: World) -> None:
    assert of_slowapi_without_redis() == [500, 500]
    rate_limits, mine = ours(AWAY, **row.ours())
    assert statuses(limited(mine, rate_limits.limit("1/minute")), "/a", "/a") == [200, 200]


@differs(SECTION, "a limited route of slowapi is 500, also with `swallow_errors=True`")
def swallowed(world: World) -> None:
    assert of_slowapi_without_redis(swallow_errors=True) == [500, 500]


@differs(SECTION, "finds none that came by `include_router`")
def included_routes(world: World) -> None:
    rate_limits, mine = ours(world.store())
    sites = [of_slowapi(application_limits=["1/minute"])[1], mine]
    sites[0].add_middleware(slowapi()["SlowAPIMiddleware"])
    routers = [APIRouter(), APIRouter(dependencies=[Depends(rate_limits.limit("1/minute"))])]
    for site, router in zip(sites, routers, strict=True):
        router.get("/a")(view())
        site.include_router(router)
    assert [statuses(site, "/a", "/a") for site in sites] == [[200, 200], [200, 429]]


@differs(SECTION, "those of the IETF's draft, on every response of a limited route")
def header_fields(world: World) -> None:
    limiter, app = of_slowapi(headers_enabled=True)
    rate_limits, mine = ours(world.store())

    async def answer(request: Request) -> PlainTextResponse:  # slowapi asks for a response
        return PlainTextResponse("")

    app.get("/a")(limiter.limit("1/minute")(answer))
    limited(mine, rate_limits.limit("1/minute"))
    fields = {"ratelimit", "ratelimit-policy"}
    known = fields | {"retry-after", "x-ratelimit-limit"}
    assert [known & {*each.headers} for each in ask(app, "/a", "/a")] == [known - fields] * 2
    found = [known & {*each.headers} for each in ask(mine, "/a", "/a")]
    assert found == [fields, fields | {"retry-after"}]


@differs(SECTION, "slowapi's default counts by fixed windows")
def fixed_windows(world: World) -> None:
    limiter, app = of_slowapi()
    rate_limits, mine = ours(world.store())
    app.get("/a")(limiter.limit("5/minute")(view()))
    limited(mine, rate_limits.limit("5/minute strict"))
    admitted = []
    for site in (app, mine):
        statuses(site, "/a")
        world.clock.advance(59)
        at_once = statuses(site, *["/a"] * 5)
        world.clock.advance(2)
        admitted.append([*at_once, *statuses(site, *["/a"] * 5)].count(200))
    assert admitted == [9, 5]


# -- fastapi-limiter ------------------------------------------------------------------------------


def fastapi_limiter(world: World) -> dict[str, Any]:
    """Return what fastapi-limiter has, by name, with the clock for its limits."""
    clock = import_module("pyrate_limiter.clocks")
    world.patch.setattr(clock, "monotonic_ns", lambda: round(world.clock.monotonic() * 1e9))
    return names_of("pyrate_limiter", "fastapi_limiter.depends", "fastapi_limiter.identifier")


@shows(FASTAPI_LIMITER, "of 0.1, `RateLimiter(times=2, seconds=5)`")
def by_time(row: Row, world: World) -> None:
    names = fastapi_limiter(world)
    with pytest.raises(TypeError, match="times"):
        row.theirs(1, **names)
    rate_limits, mine = ours(world.store())
    theirs = limited(FastAPI(), row.theirs(**names))
    limited(mine, row.ours(rate_limits=rate_limits))
    for site in (theirs, mine):
        assert statuses(site, "/a", "/a", "/a") == [200, 200, 429]
        world.clock.advance(6)
        assert statuses(site, "/a") == [200]


@shows(FASTAPI_LIMITER, "identifier=...")
def by_user(row: Row, world: World) -> None:
    names, asked = fastapi_limiter(world), []

    async def user(request: Request) -> str:
        asked.append(request.headers["user"])
        return asked[-1]

    names["limiter"] = names["Limiter"](names["Rate"](2, names["Duration"].MINUTE))
    rate_limits, mine = ours(world.store())
    theirs = limited(FastAPI(), row.theirs(**names, identifier=user))
    limited(mine, rate_limits.limit("2/minute", **{row.right.strip("`="): user}))
    found = [
        [statuses(site, "/a", user=name)[0] for name in ("eve", "eve", "eve", "bob")]
        for site in (theirs, mine)
    ]
    assert asked == ["eve", "eve", "eve", "bob"] * 2
    # The last is the difference "one for all users".
    assert found == [[200, 200, 429, 429], [200, 200, 429, 200]]


@shows(FASTAPI_LIMITER, "WebSocketRateLimiter")
def messages(row: Row, world: World) -> None:
    names = fastapi_limiter(world)
    limiter = names["Limiter"](names["Rate"](2, names["Duration"].MINUTE))
    rate_limits, mine = ours(world.store())
    limit, app = rate_limits.limit("2/minute", name="messages"), FastAPI()
    checks = {
        app: row.theirs(**names, given=limiter),
        mine: lambda websocket: row.ours(limit=limit, websocket=websocket),
    }

    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            try:
                await checks[websocket.app](websocket)
            except HTTPException as refused:
                await websocket.send_text(str(refused.status_code))
            else:
                await websocket.send_text(text)

    for site in checks:
        site.websocket("/ws")(echo)
        with TestClient(site).websocket_connect("/ws") as socket:
            answers = []
            for text in "abc":
                socket.send_text(text)
                answers.append(socket.receive_text())
        assert answers == ["a", "b", "429"]


@differs(SECTION, "fastapi-limiter 0.2.0 has one for all users")
def clients(world: World) -> None:
    names = fastapi_limiter(world)
    limiter = names["Limiter"](names["Rate"](1, names["Duration"].MINUTE))
    rate_limits, mine = ours(world.store())
    theirs = limited(FastAPI(), names["RateLimiter"](limiter))
    limited(mine, rate_limits.limit("1/minute"))
    found = [
        [statuses(site, "/a", client=client)[0] for client in ("1.1.1.1", "2.2.2.2")]
        for site in (theirs, mine)
    ]
    assert found == [[200, 429], [200, 200]]


@differs(SECTION, "the leftmost entry of `X-Forwarded-For`, which fastapi-limiter reads")
def forwarded(world: World) -> None:
    identify, keys = fastapi_limiter(world)["default_identifier"], []
    rate_limits, app = ours(world.store())

    @app.get("/a")
    async def answer(request: Request) -> None:
        keys.append((await identify(request), rate_limits.client_address(request)))

    ask(app, "/a", x_forwarded_for="6.6.6.6, 7.7.7.7")
    assert keys == [("6.6.6.6:/a", "9.9.9.9")]


# -- fastapi-redis-sdk ----------------------------------------------------------------------------


def sdk(world: World, url: str) -> dict[str, Any]:
    """Return what fastapi-redis-sdk has, by name, for this server."""
    world.patch.setenv("REDIS_URL", url)
    world.patch.setenv("REDIS_PREFIX", world.prefix)
    names = vars(import_module("redis_fastapi"))
    names["get_settings"].cache_clear()
    return names


@shows(SDK, ".rate_limiting()")
def of_redis(row: Row, world: World) -> None:
    names, app, mine = sdk(world, world.redis_url), FastAPI(), FastAPI()
    row.theirs(0, **names, app=app)
    rate_limits = RateLimits(world.redis_url, on_store_error="raise", prefix=world.prefix)
    row.ours(0, rate_limits=rate_limits, app=mine)
    app.get("/a", dependencies=[Depends(names["rate_limit"]("2/hour"))])(view())
    depends = row.ours(1, Depends=Depends, rate_limits=rate_limits, given="2/hour")
    mine.get("/a", dependencies=[depends])(view())
    for site in (app, mine):
        assert statuses(site, "/a", "/a", "/a") == [200, 200, 429]
        assert statuses(site, "/a", client="8.8.8.8") == [200]


@shows(SDK, "fail_closed=True")
def closed_while_redis_is_away(row: Row, world: World) -> None:
    names = sdk(world, AWAY)
    found: list[list[int]] = []
    without: dict[str, Any] = {}
    for options in (row.theirs(), without):
        app = FastAPI()
        names["FastAPIRedis"](app).lifespan().rate_limiting()
        app.get("/a", dependencies=[Depends(names["rate_limit"]("2/hour", **options))])(view())
        found.append(statuses(app, "/a"))
    rate_limits, mine = ours(AWAY, **row.ours())
    assert [*found, statuses(limited(mine, rate_limits.limit("2/hour")), "/a")] == [
        [429], [200], [503],
    ]  # fmt: skip
