"""Limits as dependencies of FastAPI, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Annotated, Any

import fastapi
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Header, HTTPException, Request, WebSocket
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.testclient import TestClient
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.websockets import WebSocketDisconnect

from distwindow import ConfigurationError, Decision
from distwindow.contrib import fastapi as integration
from distwindow.contrib.fastapi import LimitOfRoutes, RateLimited, RateLimitMiddleware, RateLimits
from distwindow.testing import ManualClock
from tests.web.openapi_429 import faults, limited_operations

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""
FIELDS = {"ratelimit", "ratelimit-policy"}
VERSION = tuple(int(part) for part in version("fastapi").split(".")[:3])
TREE_WITHOUT_WALK = (0, 137, 0) <= VERSION < (0, 137, 2)
"""FastAPI of these versions cannot list its routes."""


@pytest.fixture
def rate_limits() -> RateLimits:
    clock = ManualClock(1_000_020_000)  # the begin of a minute
    return RateLimits("memory://", on_store_error="raise", time=clock)


@pytest.fixture
def app(rate_limits: RateLimits) -> FastAPI:
    made = FastAPI()
    rate_limits.install(made)
    return made


def asked(app: FastAPI, *paths: str, **options: Any) -> list[int]:
    client = TestClient(app, raise_server_exceptions=False)
    return [client.get(path, **options).status_code for path in paths]


async def one() -> int:
    return 1


# -- routes and routers ----------------------------------------------------------------------------


def test_a_route(app: FastAPI, rate_limits: RateLimits) -> None:
    app.get("/a/{n}", dependencies=[Depends(rate_limits.limit("2/minute"))])(one)
    app.get("/free")(one)
    assert asked(app, "/a/1", "/a/2", "/a/3") == [200, 200, 429]
    assert asked(app, *["/free"] * 5) == [200] * 5


def test_each_route_of_a_router_wherever_it_is_included(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    inner = APIRouter(prefix="/inner", dependencies=[Depends(rate_limits.limit("1/minute"))])
    inner.get("/items/{n}")(one)
    inner.get("/others/{n}")(one)
    outer = APIRouter(prefix="/outer")
    outer.include_router(inner, prefix="/mid")
    app.include_router(outer)
    app.include_router(outer, prefix="/v1")
    app.include_router(inner)
    paths = [
        "/outer/mid/inner/items/", "/v1/outer/mid/inner/items/", "/inner/items/",
        "/outer/mid/inner/others/",
    ]  # fmt: skip
    for path in paths:
        assert asked(app, f"{path}1", f"{path}2") == [200, 429], path


def test_a_mounted_application_has_names_of_its_own(app: FastAPI, rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")
    inner = FastAPI(dependencies=[Depends(limit)])
    inner.get("/x")(one)
    app.mount("/one", inner)
    app.mount("/two", inner)
    app.get("/x", dependencies=[Depends(limit)])(one)
    assert asked(app, "/one/x", "/two/x", "/x") == [200] * 3
    assert asked(app, "/one/x", "/two/x", "/x") == [429] * 3


@pytest.mark.parametrize("installed", ["above", "below"])
@pytest.mark.parametrize("way", ["dependency", "check"])
def test_a_refusal_in_a_mounted_application_has_a_problem_body(
    rate_limits: RateLimits, installed: str, way: str
) -> None:
    above, below = FastAPI(), FastAPI()
    rate_limits.install(above if installed == "above" else below)
    limit = rate_limits.limit("1/minute")

    async def handler(request: Request) -> None:
        await limit.check(request)

    if way == "check":
        below.get("/x")(handler)
    else:
        below.get("/x", dependencies=[Depends(limit)])(one)
    above.mount("/below", below)
    client = TestClient(above)
    assert client.get("/below/x").status_code == 200
    refused = client.get("/below/x")
    assert (refused.status_code, refused.json()["status"]) == (429, 429)
    assert refused.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("kind", [RateLimited, HTTPException, StarletteHTTPException, 429])
@pytest.mark.parametrize("where", ["mounted", "with install", "without install"])
def test_a_handler_of_the_application_is_asked(
    rate_limits: RateLimits, kind: Any, where: str
) -> None:
    """With `install`, one for `HTTPException` is not: ours is nearer. Fields are always there."""
    above, app = FastAPI(), FastAPI()

    @app.exception_handler(kind)
    async def own(request: Request, exc: RateLimited) -> PlainTextResponse:
        return PlainTextResponse(f"slow down, {exc.retry_after:.0f}", exc.status_code)

    app.get("/x", dependencies=[Depends(rate_limits.limit("1/minute"))])(one)
    if where == "without install":
        app.add_middleware(RateLimitMiddleware, rate_limits=rate_limits)
    else:
        rate_limits.install(above if where == "mounted" else app)
    above.mount("/below", app)
    client = TestClient(above)
    client.get("/below/x")
    refused = client.get("/below/x")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    assert refused.headers.keys() >= FIELDS
    if where != "with install" or kind in (RateLimited, 429):
        assert refused.text == "slow down, 60"


@pytest.mark.parametrize("way", ["dependency", "middleware"])
def test_a_refusal_has_the_fields_of_cors_that_stands_outside(
    app: FastAPI, rate_limits: RateLimits, way: str
) -> None:
    """Whoever is added last stands outside; `install` was called before."""
    dependencies = [Depends(rate_limits.limit("1/minute"))] if way == "dependency" else []
    app.get("/a", dependencies=dependencies)(one)
    if way == "middleware":
        app.add_middleware(RateLimitMiddleware, rate_limits=rate_limits, limits="1/minute")
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop.example"])
    client = TestClient(app, headers={"origin": "https://shop.example"})
    for status in (200, 429):
        answer = client.get("/a")
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://shop.example"


def test_an_object_without_a_name_is_a_limit_of_each_route(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    each, both = rate_limits.limit("1/minute"), rate_limits.limit("1/minute", name="both")
    for path in ("/a", "/b"):
        app.get(path, dependencies=[Depends(each)])(one)
        app.get(f"{path}/both", dependencies=[Depends(both)])(one)
    assert asked(app, "/a", "/b", "/a", "/b") == [200, 200, 429, 429]
    assert asked(app, "/a/both", "/b/both") == [200, 429]


def test_the_same_object_on_a_router_and_its_route_is_asked_once(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    limit = rate_limits.limit("2/minute")
    router = APIRouter(dependencies=[Depends(limit)])
    router.get("/a", dependencies=[Depends(limit)])(one)
    app.include_router(router, dependencies=[Depends(limit)])
    assert asked(app, "/a", "/a", "/a") == [200, 200, 429]


def test_limits_of_websockets(app: FastAPI, rate_limits: RateLimits) -> None:
    router = APIRouter(prefix="/r", dependencies=[Depends(rate_limits.limit("1/minute"))])

    @router.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    app.include_router(router)
    app.include_router(router, prefix="/two")
    client = TestClient(app)
    for path in ("/r/ws", "/two/r/ws"):
        with client.websocket_connect(path):
            pass
        with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect(path):
            pass
        response = getattr(refused.value, "status_code", 1013)  # where Starlette has responses
        assert response in (429, 1013)


def test_a_route_that_cannot_be_named_needs_a_name(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")
    with pytest.raises(ConfigurationError, match="name="):
        limit.name_of({"type": "http", "method": "GET", "path": "/a"})


# -- keys ------------------------------------------------------------------------------------------


def user(x_user: Annotated[str, Header()]) -> str | None:
    return None if x_user == "root" else x_user


@pytest.mark.parametrize(
    "key",
    [lambda connection: connection.headers["x-user"], Depends(user)],
    ids=["plain", "Depends"],
)
def test_each_user_has_a_window(app: FastAPI, rate_limits: RateLimits, key: Any) -> None:
    app.get("/a", dependencies=[Depends(rate_limits.limit("2/minute", key=key))])(one)
    for name in "abc":
        assert asked(app, *["/a"] * 3, headers={"x-user": name}) == [200, 200, 429]


def test_a_key_that_is_a_dependency_is_checked_and_may_be_none(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    """None is the address of the client."""
    app.get("/a", dependencies=[Depends(rate_limits.limit("2/minute", key=Depends(user)))])(one)
    assert asked(app, "/a") == [422]
    assert asked(app, *["/a"] * 3, headers={"x-user": "root"}) == [200, 200, 429]


def test_head_counts_as_get(app: FastAPI, rate_limits: RateLimits) -> None:
    limited = Depends(rate_limits.limit("2/minute"))
    app.api_route("/a", methods=["GET", "HEAD"], dependencies=[limited])(one)
    client = TestClient(app)
    assert [client.request(method, "/a").status_code for method in ("GET", "HEAD", "GET")] == [
        200, 200, 429,
    ]  # fmt: skip
    assert {each.name for each in rate_limits.limits_of(app)} == {"GET /a"}


def test_a_key_that_is_a_dependency_is_resolved_by_fastapi_alone(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    limit = rate_limits.limit("1/minute", key=Depends(user))

    @app.get("/a")
    async def handler(request: Request) -> None:
        await limit.check(request)

    with pytest.raises(ConfigurationError, match=r"Depends\(user\)"):
        TestClient(app).get("/a")


# -- what a handler gets ---------------------------------------------------------------------------


def test_the_handler_may_have_the_decision(app: FastAPI, rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("5/minute")

    @app.get("/a")
    async def handler(decision: Decision = Depends(limit)) -> int:  # noqa: B008  # FastAPI's way
        return decision.remaining

    assert TestClient(app).get("/a").json() == 4


def test_a_handler_may_ask_itself(app: FastAPI, rate_limits: RateLimits) -> None:
    tokens = rate_limits.limit("100/minute", name="tokens")

    @app.post("/a")
    async def handler(request: Request, count: Annotated[int, Body(embed=True)]) -> None:
        await rate_limits.check(request, tokens, cost=count)

    client = TestClient(app)
    answers = [client.post("/a", json={"count": count}) for count in (70, 40, 30)]
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert answers[0].headers["ratelimit"].startswith('"tokens";r=30')


# -- responses -------------------------------------------------------------------------------------


@pytest.fixture
def kinds(rate_limits: RateLimits) -> APIRouter:
    """Routes of all kinds of responses."""
    router = APIRouter(dependencies=[Depends(rate_limits.limit("99/minute", name="kinds"))])

    @router.get("/{kind}")
    async def kind(kind: str) -> Any:
        if kind == "stream":
            return StreamingResponse(iter(["a", "b"]))
        if kind == "response":
            return PlainTextResponse("text")
        if kind == "dict":
            return {}
        if kind == "raise":
            raise LookupError
        raise HTTPException(404, headers={"RateLimit-Policy": '"theirs";q=1'})

    return router


@pytest.mark.parametrize("kind", ["stream", "response", "dict", "missing"])
def test_every_response_has_the_fields(app: FastAPI, kinds: APIRouter, kind: str) -> None:
    app.include_router(kinds)
    answer = TestClient(app).get(f"/{kind}")
    assert answer.headers["ratelimit"] == '"kinds";r=98;t=60'
    theirs = '"theirs";q=1, ' if kind == "missing" else ""
    assert answer.headers["ratelimit-policy"] == f'{theirs}"kinds";q=99;w=60'
    assert "retry-after" not in answer.headers


def test_server_sent_events_have_the_fields(app: FastAPI, rate_limits: RateLimits) -> None:
    sse = pytest.importorskip("fastapi.sse")
    limit = rate_limits.limit("9/minute")

    @app.get("/events", response_class=sse.EventSourceResponse, dependencies=[Depends(limit)])
    async def events() -> AsyncIterator[dict[str, int]]:
        for number in range(3):
            yield {"number": number}

    answer = TestClient(app).get("/events")
    assert answer.text.count("data: ") == 3
    assert answer.headers["ratelimit"] == '"GET /events";r=8;t=60'


def test_the_refusal_is_a_problem(app: FastAPI, rate_limits: RateLimits) -> None:
    app.get("/a", dependencies=[Depends(rate_limits.limit("1/minute", name="n"))])(one)
    client = TestClient(app)
    client.get("/a")
    refused = client.get("/a")
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["detail"] == "1 request per minute is allowed; try again in 60 s"
    assert refused.headers.get_list("ratelimit") == ['"n";r=0;t=60']
    assert refused.headers.get_list("ratelimit-policy") == ['"n";q=1;w=60']
    assert refused.headers["retry-after"] == "60"


def test_without_install_the_status_and_the_fields_are_right(
    rate_limits: RateLimits, kinds: APIRouter, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    app.get("/a", dependencies=[Depends(rate_limits.limit("1/minute", name="n"))])(one)
    app.include_router(kinds)
    client = TestClient(app)
    assert client.get("/a").headers["ratelimit"] == '"n";r=0;t=60'
    refused = client.get("/a")
    assert (refused.status_code, set(refused.json())) == (429, {"detail"})
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["ratelimit"] == '"n";r=0;t=60'
    assert "ratelimit" in client.get("/dict").headers
    assert [line for line in caplog.messages if "install" in line] == caplog.messages[:1]


def test_while_the_store_is_away() -> None:
    app = FastAPI()
    away = RateLimits(AWAY, on_store_error="raise")
    away.install(app)
    for policy in ("allow", "deny", "raise"):
        limit = away.limit("1/minute", on_store_error=policy)
        app.get(f"/{policy}", dependencies=[Depends(limit)])(one)
    assert asked(app, "/allow", "/allow", "/deny", "/raise") == [200, 200, 503, 500]
    answer = TestClient(app).get("/deny")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["type"].endswith("#temporary-reduced-capacity")


# -- installed -------------------------------------------------------------------------------------


def test_install_twice_is_once(app: FastAPI, rate_limits: RateLimits) -> None:
    before = len(app.user_middleware)
    rate_limits.install(app)
    assert len(app.user_middleware) == before
    other = RateLimits("memory://", on_store_error="allow")
    other.install(app)
    assert len(app.user_middleware) == before + 1


@pytest.mark.parametrize("options", [{}, {"limits": "100/second"}], ids=["bare", "limits"])
def test_install_holds_whatever_middleware_was_added_before(
    defaults: RateLimits, options: dict[str, Any]
) -> None:
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, rate_limits=defaults, **options)
    defaults.install(app)
    app.get("/a")(one)
    client = TestClient(app)
    codes = [client.get("/a").status_code for _ in range(4)]
    assert codes[0] == 200
    assert codes[-1] == 429
    assert "429" in app.openapi()["paths"]["/a"]["get"]["responses"]


def test_the_middleware_for_all_routes_takes_functions_of_the_connection(
    rate_limits: RateLimits,
) -> None:
    app = FastAPI()
    app.add_middleware(
        integration.RateLimitMiddleware,
        rate_limits=rate_limits,
        limits="1/minute",
        key=lambda connection: connection.headers.get("x-user", "none"),
    )
    app.get("/a")(one)
    assert asked(app, "/a", "/b", headers={"x-user": "a"}) == [200, 429]
    assert asked(app, "/b", headers={"x-user": "b"}) == [404]


@pytest.mark.skipif(TREE_WITHOUT_WALK, reason="this FastAPI cannot list its routes")
def test_openapi(app: FastAPI, rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")
    app.get("/free")(one)
    app.get("/a/{n}", dependencies=[Depends(limit)])(one)
    app.get("/own", dependencies=[Depends(limit)], responses={429: {"description": "own"}})(one)
    app.get("/hidden", dependencies=[Depends(limit)], include_in_schema=False)(one)
    deny = rate_limits.limit("1/minute", on_store_error="deny")
    router = APIRouter(prefix="/r")
    router.get("/b", dependencies=[Depends(deny)])(one)
    router.post("/b", dependencies=[Depends(deny)])(one)
    nested = APIRouter(dependencies=[Depends(limit)])
    nested.get("/c")(one)
    router.include_router(nested)
    app.include_router(router, prefix="/v1")
    client = TestClient(app)
    schema = client.get("/openapi.json").json()
    assert client.get("/openapi.json").json() == schema
    found = limited_operations(schema)
    assert set(found) == {"GET /a/{n}", "GET /own", "GET /v1/r/b", "POST /v1/r/b", "GET /v1/r/c"}
    assert found.pop("GET /own") == {"description": "own"}
    assert not any(map(faults, found.values()))
    refusals = schema["paths"]["/v1/r/b"]["get"]["responses"]
    assert set(refusals["503"]["headers"]) == {"Retry-After"}
    assert "503" not in schema["paths"]["/a/{n}"]["get"]["responses"]


def test_openapi_may_be_left_alone(rate_limits: RateLimits) -> None:
    app = FastAPI()
    rate_limits.install(app, openapi=False)
    app.get("/a", dependencies=[Depends(rate_limits.limit("1/minute"))])(one)
    assert limited_operations(TestClient(app).get("/openapi.json").json()) == {}


def test_an_entry_that_cannot_be_read_costs_the_schema_and_no_limit(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    class Unreadable:
        def matches(self, scope: Any) -> Any:
            from starlette.routing import Match

            return Match.NONE, {}

    app.get("/a", dependencies=[Depends(rate_limits.limit("1/minute"))])(one)
    app.router.routes.append(Unreadable())  # type: ignore[arg-type]  # that is the test
    assert asked(app, "/a", "/a") == [200, 429]
    with pytest.raises((ConfigurationError, AttributeError), match=r"openapi=False|Unreadable"):
        app.openapi()


@pytest.mark.skipif(TREE_WITHOUT_WALK, reason="this FastAPI cannot list its routes")
def test_the_limits_of_an_application(app: FastAPI, rate_limits: RateLimits) -> None:
    named = rate_limits.limit("9/hour;2/s", name="named")
    each = rate_limits.limit("1/minute")
    app.get("/a", dependencies=[Depends(named), Depends(each)])(one)
    router = APIRouter(prefix="/r", dependencies=[Depends(named)])
    router.get("/b")(one)

    @router.websocket("/ws")
    async def echo(websocket: WebSocket) -> None: ...

    app.include_router(router)
    inner = FastAPI()
    inner.get("/x", dependencies=[Depends(each)])(one)
    app.mount("/inner", inner)
    assert rate_limits.limits_of(app) == [
        LimitOfRoutes("named", "2/second; 9/hour", ("GET /a", "GET /r/b", "WEBSOCKET /r/ws")),
        LimitOfRoutes("GET /a", "1/minute", ("GET /a",)),
        LimitOfRoutes("GET /inner/x", "1/minute", ("GET /inner/x",)),
    ]


# -- default limits and exempt routes --------------------------------------------------------------


@pytest.fixture
def defaults() -> RateLimits:
    clock = ManualClock(1_000_020_000)
    return RateLimits("memory://", on_store_error="raise", time=clock, default_limits=["2/minute"])


@pytest.fixture
def default_app(defaults: RateLimits) -> FastAPI:
    made = FastAPI(dependencies=[Depends(defaults.limit("9/minute", name="all"))])
    defaults.install(made)
    made.get("/one")(one)
    router = APIRouter(prefix="/r")
    router.get("/two/{n}")(one)
    router.get("/own", dependencies=[Depends(defaults.limit("3/minute"))])(one)
    made.include_router(router)
    return made


def test_each_route_without_a_limit_has_the_default_one_by_itself(default_app: FastAPI) -> None:
    assert asked(default_app, "/one", "/one", "/one") == [200, 200, 429]
    assert asked(default_app, "/r/two/1", "/r/two/2", "/r/two/1") == [200, 200, 429]
    assert asked(default_app, *["/r/own"] * 4) == [200] * 3 + [429]
    assert asked(default_app, *["/missing", "/docs"] * 3) == [404, 200] * 3


def test_a_websocket_has_the_default_limit(default_app: FastAPI, defaults: RateLimits) -> None:
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    router = APIRouter(prefix="/in")
    for place in (default_app, router):
        place.websocket("/ws")(echo)
    default_app.include_router(router)
    client = TestClient(default_app)
    for path in ("/ws", "/in/ws"):
        for _ in range(2):
            with client.websocket_connect(path):
                pass
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass


@pytest.mark.skipif(TREE_WITHOUT_WALK, reason="this FastAPI cannot list its routes")
def test_the_schema_knows_what_default_limits_hold_for(
    default_app: FastAPI, defaults: RateLimits
) -> None:
    default_app.get("/health")(defaults.exempt(lambda: None))
    listed = {
        (each.limits, route) for each in defaults.limits_of(default_app) for route in each.routes
    }
    paths = ["/one", "/r/two/{n}", "/r/own"]
    assert listed == {
        *(("9/minute", f"GET {path}") for path in paths),
        *(("2/minute", f"GET {path}") for path in paths[:2]),
        ("3/minute", "GET /r/own"),
    }
    schema = TestClient(default_app).get("/openapi.json").json()
    assert set(limited_operations(schema)) == {f"GET {path}" for path in paths}


def test_install_comes_before_the_routes_of_default_limits(defaults: RateLimits) -> None:
    app = FastAPI()
    defaults.install(app)
    app.get("/one")(one)
    defaults.install(app)  # again
    late = FastAPI()
    late.get("/one")(one)
    with pytest.raises(ConfigurationError, match="/one was added before; call it first"):
        defaults.install(late)


async def test_default_limits_without_install_are_found_at_the_start(defaults: RateLimits) -> None:
    with pytest.raises(ConfigurationError, match="hold for no route"):
        await defaults.__aenter__()
    defaults.install(FastAPI())
    async with defaults:
        pass


def test_default_limits_may_have_the_options_of_a_limit() -> None:
    defaults = RateLimits(
        "memory://",
        on_store_error="raise",
        default_limits={"limits": "1/hour", "key": Depends(user), "name": "each"},
    )
    app = FastAPI()
    defaults.install(app)
    app.get("/a")(one)
    app.get("/b")(one)
    assert asked(app, "/a", "/b", headers={"x-user": "ada"}) == [200, 429]
    assert asked(app, "/b", headers={"x-user": "eve"}) == [200]
    with pytest.raises(TypeError, match="limit"):
        RateLimits("memory://", on_store_error="raise", default_limits={"limit": "1/hour"})


@pytest.mark.parametrize("above", [False, True])
def test_an_exempt_route(default_app: FastAPI, defaults: RateLimits, above: bool) -> None:
    async def health() -> int:
        return 1

    several = defaults.all_of(defaults.limit("1/minute"), defaults.limit("5/hour"))
    add = default_app.get("/health", dependencies=[Depends(several)])
    defaults.exempt(add(health)) if above else add(defaults.exempt(health))
    client = TestClient(default_app)
    responses = [client.get("/health") for _ in range(12)]
    assert {response.status_code for response in responses} == {200}
    assert not FIELDS & set(responses[0].headers)


def test_limits_of_another_object_neither_replace_nor_exempt(
    default_app: FastAPI, defaults: RateLimits, rate_limits: RateLimits
) -> None:
    other = rate_limits.limit("9/minute")
    default_app.get("/other", dependencies=[Depends(other)])(rate_limits.exempt(lambda: 1))
    assert asked(default_app, *["/other"] * 3) == [200, 200, 429]


@pytest.mark.parametrize("wrong", ["/health", None, APIRouter(), TestClient])
def test_exempt_takes_a_view(rate_limits: RateLimits, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="function of a route"):
        rate_limits.exempt(wrong)


# -- switched off ----------------------------------------------------------------------------------


def test_switched_off_by_enabled_or_by_an_override(app: FastAPI, rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")
    app.get("/a", dependencies=[Depends(limit)])(one)
    app.dependency_overrides[limit] = lambda: None
    assert asked(app, *["/a"] * 3) == [200] * 3
    app.dependency_overrides.clear()
    rate_limits.enabled = False
    assert asked(app, *["/a"] * 3) == [200] * 3
    rate_limits.enabled = True
    assert asked(app, *["/a"] * 3) == [200, 429, 429]


@pytest.fixture
def on_redis(redis_url: str, prefix: str) -> RateLimits:
    return RateLimits(redis_url, on_store_error="raise", prefix=prefix, timeout=10)


def test_test_clients_with_and_without_lifespan_on_several_loops(on_redis: RateLimits) -> None:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with on_redis:
            yield

    app = FastAPI(lifespan=lifespan)
    on_redis.install(app)
    app.get("/a", dependencies=[Depends(on_redis.limit("4/minute"))])(one)
    assert asked(app, "/a", "/a") == [200, 200]  # each request has a loop of its own
    for expected in ([200], [200, 429]):
        with TestClient(app) as client:
            assert [client.get("/a").status_code for _ in expected] == expected


@pytest.mark.parametrize("together", [False, True])
def test_limits_and_cost_may_be_dependencies(
    app: FastAPI, rate_limits: RateLimits, together: bool
) -> None:
    def plan(x_plan: Annotated[str, Header()] = "free") -> str | None:
        return {"free": "3/minute", "paid": "9/minute"}.get(x_plan)

    def tokens(n: Annotated[int, fastapi.Query(ge=1)]) -> int:
        return n

    limit: Any = rate_limits.limit(
        Depends(plan), cost=Depends(tokens), key=Depends(plan), name="tokens"
    )
    if together:
        limit = rate_limits.all_of(rate_limits.limit("100/minute", name="all"), limit)
    app.get("/", dependencies=[Depends(limit)])(one)
    assert asked(app, "/?n=2", "/?n=2", "/?n=1") == [200, 429, 200]
    assert asked(app, "/?n=2", "/?n=9", headers={"x-plan": "paid"}) == [200, 429]
    assert asked(app, "/?n=500", "/?n=500", headers={"x-plan": "staff"}) == [200, 200]
    assert asked(app, "/?n=0", "/?n=x", "/") == [422] * 3
    refused = TestClient(app).get("/?n=4")
    assert (refused.status_code, "retry-after" in refused.headers) == (429, False)
    assert refused.json()["detail"] == "3 units per minute are allowed; this request takes 4"


def test_a_client_cannot_write_itself_a_limit_by_the_path_of_a_mount(
    app: FastAPI, rate_limits: RateLimits
) -> None:
    shop = FastAPI()
    limit = rate_limits.limit("3/minute")
    shop.get("/{page}", dependencies=[Depends(limit)])(one)
    app.mount("/shops/{shop}/of/{town}", shop)
    paths = [f"/shops/{number}/of/{number}/{number}" for number in range(6)]
    assert asked(app, *paths) == [200] * 3 + [429] * 3
    policy = TestClient(app).get("/shops/7/of/8/9").headers["ratelimit-policy"]
    assert policy == '"GET /shops/{shop}/of/{town}/{page}";q=3;w=60'
