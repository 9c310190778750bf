"""An application of Litestar with one limit around it."""

from __future__ import annotations

import os

from litestar import Litestar, get

from distwindow.contrib.asgi import RateLimitMiddleware, RateLimits


@get("/")
async def home() -> str:
    return "home"


@get("/free")
async def free() -> str:
    return "free"


app = RateLimitMiddleware(
    Litestar([home, free]),
    RateLimits(os.environ["DISTWINDOW_URL"], on_store_error="allow"),
    "20/minute",
    exempt_paths=["/free"],
)
