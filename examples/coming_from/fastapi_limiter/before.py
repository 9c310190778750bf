"""A FastAPI application with limits of fastapi-limiter 0.2, whose clients share each of them.

uvicorn examples.coming_from.fastapi_limiter.before:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi_limiter.depends import RateLimiter
from pyrate_limiter import Duration, Limiter, Rate, RedisBucket
from redis.asyncio import Redis

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

limits: list[RateLimiter] = []


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Redis.from_url(URL) as redis:
        bucket = await RedisBucket.init([Rate(5, Duration.MINUTE)], redis, "search")
        limits[:] = [RateLimiter(Limiter(bucket))]
        yield


async def of_search(request: Request, response: Response) -> None:
    await limits[0](request, response)


app = FastAPI(lifespan=lifespan)


@app.get("/search", dependencies=[Depends(of_search)])
async def search() -> str:
    return "found"
