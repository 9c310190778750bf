"""The same application with limits of distwindow.

uvicorn examples.coming_from.slowapi.after:app
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


app = FastAPI(lifespan=lifespan)
rate_limits.install(app)


def user(request: Request) -> str:
    return request.headers["x-user"]


def is_internal(request: Request) -> bool:
    return "x-internal" in request.headers


of_search = rate_limits.limit("5/minute", exempt=is_internal)
of_reports = rate_limits.limit("3/minute", name="reports", key=user)


@app.get("/search", dependencies=[Depends(of_search)])
async def search() -> str:
    return "found"


@app.get("/reports/daily", dependencies=[Depends(of_reports)])
async def daily() -> str:
    return "today"


@app.get("/reports/weekly", dependencies=[Depends(of_reports)])
async def weekly() -> str:
    return "this week"
