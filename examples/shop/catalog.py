"""The catalog, a FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request

from distwindow.contrib.fastapi import RateLimits

from .limits import NAME, PER_CUSTOMER, REDIS_URL

rate_limits = RateLimits(REDIS_URL, on_store_error="allow")


def customer(request: Request) -> str:
    return request.headers.get("x-customer") or rate_limits.client_address(request)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rate_limits:
        yield


app = FastAPI(lifespan=lifespan)
rate_limits.install(app)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@app.get(
    "/items/{number}",
    dependencies=[Depends(rate_limits.limit(PER_CUSTOMER, name=NAME, key=customer))],
)
async def item(number: int) -> dict[str, int]:
    return {"item": number, "price": 100 + number}
