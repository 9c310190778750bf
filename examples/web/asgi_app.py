"""An ASGI application with one limit around it, and others inside.

    uvicorn examples.web.asgi_app:app --workers 2
    for i in $(seq 25); do curl -s -o /dev/null -w '%{http_code} ' localhost:8000/; done

The application is Starlette's; the middleware goes around any other as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from distwindow.contrib.asgi import RateLimited, RateLimitMiddleware, RateLimits

TICK_S = float(os.environ.get("TICK_S", "0.5"))
FILE = os.environ.get("SENT_FILE", __file__)
done: list[str] = []
"""What background tasks have done."""

rate_limits = RateLimits(
    os.environ.get("DISTWINDOW_URL", "redis://localhost:6379/0"),
    on_store_error="allow",
    trusted_proxies=os.environ.get("TRUSTED_PROXIES", "").split(),
)
allow = rate_limits.limit("1000/minute", name="allow")
deny = rate_limits.limit("1000/minute", name="deny", on_store_error="deny")
raises = rate_limits.limit("1000/minute", name="raise", on_store_error="raise")
handshakes = rate_limits.limit("5/minute", name="handshakes")
messages = rate_limits.limit("5/minute", name="messages", key=lambda websocket: str(id(websocket)))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with rate_limits:
        yield


async def home(request: Request) -> PlainTextResponse:
    return PlainTextResponse("home")


async def chunks(request: Request) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        for number in range(5):
            yield f"{number}\n"
            await asyncio.sleep(TICK_S)

    return StreamingResponse(body(), media_type="text/plain")


async def file(request: Request) -> FileResponse:
    return FileResponse(FILE)


async def background(request: Request) -> PlainTextResponse:
    async def work() -> None:
        await asyncio.sleep(TICK_S)
        done.append(request.query_params.get("name", ""))

    return PlainTextResponse("begun", background=BackgroundTask(work))


async def show_done(request: Request) -> JSONResponse:
    return JSONResponse(done)


async def by_policy(request: Request) -> PlainTextResponse:
    limit = {"/allow": allow, "/deny": deny, "/raise": raises}[request.url.path]
    await limit.check(request)  # RateLimited becomes the response
    return PlainTextResponse("served")


async def echo(websocket: WebSocket) -> None:
    await handshakes.check(websocket)
    await websocket.accept()
    async for text in websocket.iter_text():
        try:
            await messages.check(websocket)
        except RateLimited as refused:
            await websocket.send_text(f"slow down: {refused}")
        else:
            await websocket.send_text(text)


app = Starlette(
    routes=[
        Route("/", home),
        Route("/free", home),
        Route("/stream", chunks),
        Route("/file", file),
        Route("/background", background),
        Route("/done", show_done),
        *(Route(path, by_policy) for path in ("/allow", "/deny", "/raise")),
        WebSocketRoute("/ws", echo),
    ],
    middleware=[
        Middleware(
            RateLimitMiddleware,
            rate_limits,
            "20/minute",
            exempt_paths=["/free", "/done", "/allow", "/deny", "/raise", "/ws"],
        )
    ],
    lifespan=lifespan,
)
