"""The same application with limits of distwindow.

uvicorn examples.coming_from.fastapi_redis_sdk.after:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request

from distwindow.contrib.fastapi import RateLimits

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

rate_limits = RateLimits(URL, on_store_error="allow", prefix="shop")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rate_limits:
        yield


def user(request: Request) -> str:
    return request.headers["x-user"]


app = FastAPI(lifespan=lifespan)
rate_limits.install(app)


@app.get("/search", dependencies=[Depends(rate_limits.limit("5/minute"))])
async def search() -> str:
    return "found"


@app.get(
    "/reports",
    dependencies=[Depends(rate_limits.limit("3/minute", key=user, on_store_error="deny"))],
)
async def reports() -> str:
    return "today"
