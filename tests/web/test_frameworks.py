"""A refusal that a handler does not catch is the response in each framework that the page names,
and each way to put the middleware around it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litestar
import pytest
import quart
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from distwindow.contrib.asgi import RateLimited, RateLimitMiddleware, RateLimits
from tests.web.test_asgi import http_scope, websocket_scope

Ask = Callable[[Any], Any]
WAYS = {
    "Starlette": ("around", "middleware=", "around a mounted one"),
    "Litestar": ("around", "middleware="),
    "Quart": ("around", "asgi_app"),
    "none": ("around",),
}


def starlette(way: str, ask: Ask, rate_limits: RateLimits) -> Any:
    async def home(request: Any) -> Any:
        await ask(request)
        return PlainTextResponse("home")

    async def socket(websocket: Any) -> None:
        await ask(websocket)
        await websocket.accept()

    routes = [Route("/", home), WebSocketRoute("/ws", socket)]
    if way == "middleware=":
        return Starlette(routes=routes, middleware=[Middleware(RateLimitMiddleware, rate_limits)])
    if way == "around a mounted one":
        mounted = Starlette(routes=[Mount("/", Starlette(routes=routes))])
        return RateLimitMiddleware(mounted, rate_limits)
    return RateLimitMiddleware(Starlette(routes=routes), rate_limits)


def of_litestar(way: str, ask: Ask, rate_limits: RateLimits) -> Any:
    @litestar.get("/")
    async def home(request: litestar.Request[Any, Any, Any]) -> str:
        await ask(request)
        return "home"

    @litestar.websocket("/ws")
    async def socket(socket: litestar.WebSocket[Any, Any, Any]) -> None:
        await ask(socket)
        await socket.accept()

    if way == "middleware=":
        limited = DefineMiddleware(RateLimitMiddleware, rate_limits=rate_limits)
        return litestar.Litestar([home, socket], middleware=[limited])
    return RateLimitMiddleware(litestar.Litestar([home, socket]), rate_limits)


def of_quart(way: str, ask: Ask, rate_limits: RateLimits) -> Any:
    app = quart.Quart("app")

    @app.get("/")
    async def home() -> str:
        await ask(quart.request.scope)
        return "home"

    @app.websocket("/ws")
    async def socket() -> None:
        await ask(quart.websocket.scope)
        await quart.websocket.accept()

    if way == "asgi_app":
        inner = app.asgi_app
        app.asgi_app = RateLimitMiddleware(inner, rate_limits)  # type: ignore[method-assign]  # as in its docs
        return app
    return RateLimitMiddleware(app, rate_limits)


def none(way: str, ask: Ask, rate_limits: RateLimits) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ask(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"home"})

    return RateLimitMiddleware(app, rate_limits)


MAKERS = {"Starlette": starlette, "Litestar": of_litestar, "Quart": of_quart, "none": none}
each_way = pytest.mark.parametrize(
    ("framework", "way"), [(name, way) for name, ways in WAYS.items() for way in ways]
)


def scope(**changes: Any) -> dict[str, Any]:
    more = {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
    headers = [(b"host", b"localhost")]
    return http_scope(**{"raw_path": b"/", "server": ("localhost", 80), "asgi": {"version": "3.0"},
                         **more, "headers": headers, **changes})  # fmt: skip


def handshake() -> dict[str, Any]:
    of = websocket_scope(**scope(path="/ws", raw_path=b"/ws", type="websocket", subprotocols=[]))
    return {**of, "scheme": "ws", "extensions": {"websocket.http.response": {}}}


async def call(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that `app` sends."""
    sent: list[dict[str, Any]] = []
    ended = asyncio.Event()
    is_socket = scope["type"] == "websocket"
    begin = {"type": "websocket.connect"} if is_socket else {"type": "http.request", "body": b""}
    received = [begin]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        is_body = message["type"].endswith("response.body") and not message.get("more_body")
        if is_body or message["type"] in ("websocket.accept", "websocket.close"):
            ended.set()

    async def receive() -> dict[str, Any]:
        if not received:
            await ended.wait()  # then a server says that the client has gone
            return {"type": f"{scope['type']}.disconnect"}
        return received.pop()

    await app(scope, receive, send)
    return sent


def serve(framework: str, way: str, ask: Callable[[Any, RateLimits], Any], *scopes: Any) -> Any:
    """Return what is sent for each scope. `ask` is called by the handlers."""

    async def run() -> list[list[dict[str, Any]]]:
        async with RateLimits("memory://", on_store_error="raise") as rate_limits:
            app = MAKERS[framework](way, lambda of: ask(of, rate_limits), rate_limits)
            return [await call(app, each) for each in scopes]

    return asyncio.run(run())


async def ask_a_limit(connection: Any, rate_limits: RateLimits) -> None:
    await rate_limits.limit("1/hour", name="home").check(connection)


@each_way
@pytest.mark.parametrize("in_except", [False, True])
def test_a_refusal_in_a_handler_is_the_response(framework: str, way: str, in_except: bool) -> None:
    """Also where the server runs in an `except`: `except ImportError: asyncio.run(...)`."""
    try:
        if in_except:
            raise ImportError("uvloop")
        admitted, refused = serve(framework, way, ask_a_limit, scope(), scope())
    except ImportError:
        admitted, refused = serve(framework, way, ask_a_limit, scope(), scope())
    assert admitted[0]["status"] == 200
    start, *bodies = refused
    assert start["status"] == 429
    names = dict(start["headers"])
    assert names[b"content-type"] == b"application/problem+json"
    assert names[b"retry-after"]
    assert json.loads(b"".join(each["body"] for each in bodies))["status"] == 429


@each_way
def test_a_refused_handshake_is_answered(framework: str, way: str) -> None:
    admitted, refused = serve(framework, way, ask_a_limit, handshake(), handshake())
    assert admitted[0]["type"] == "websocket.accept"
    assert [(each["type"], each.get("status")) for each in refused] == [
        ("websocket.http.response.start", 429), ("websocket.http.response.body", None),
    ]  # fmt: skip


@each_way
@pytest.mark.parametrize("allowed", [True, False])
def test_another_failure_is_no_refusal(framework: str, way: str, allowed: bool) -> None:
    """Neither after a limit that admitted, nor in the handling of a refusal."""
    if framework == "Quart" and not allowed:
        return  # it responds when it has handled the exception, and nobody knows which one that was

    async def ask(connection: Any, rate_limits: RateLimits) -> None:
        limit = rate_limits.limit("1/hour", name="home")
        try:
            for _ in range(1 if allowed else 2):
                await limit.check(connection)
        finally:
            raise ValueError("a mistake")

    try:
        ((start, *_),) = serve(framework, way, ask, scope())
    except ValueError:
        return
    assert start["status"] == 500


@each_way
def test_what_a_handler_makes_of_a_refusal_is_the_response(framework: str, way: str) -> None:
    async def ask(connection: Any, rate_limits: RateLimits) -> None:
        limit = rate_limits.limit("1/hour", name="home")
        await limit.check(connection)
        with pytest.raises(RateLimited):
            await limit.check(connection)

    ((start, *_),) = serve(framework, way, ask, scope())
    assert start["status"] == 200
