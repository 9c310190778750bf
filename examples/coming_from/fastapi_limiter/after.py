"""The same application with limits of distwindow, of which each client has its own.

uvicorn examples.coming_from.fastapi_limiter.after:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from distwindow.contrib.fastapi import RateLimits

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

rate_limits = RateLimits(URL, on_store_error="allow", prefix="shop")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rate_limits:
        yield


app = FastAPI(lifespan=lifespan)
rate_limits.install(app)


@app.get("/search", dependencies=[Depends(rate_limits.limit("5/minute"))])
async def search() -> str:
    return "found"
