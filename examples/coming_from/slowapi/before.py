"""A FastAPI application with limits of slowapi.

uvicorn examples.coming_from.slowapi.before:app
"""

import os

from fastapi import FastAPI, Request
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

limiter = Limiter(get_remote_address, storage_uri=URL)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type,unused-ignore]


def user(request: Request) -> str:
    return request.headers["x-user"]


def is_internal(request: Request) -> bool:
    return "x-internal" in request.headers


@app.get("/search")
@limiter.limit("5/minute", exempt_when=is_internal)
async def search(request: Request) -> str:
    return "found"


@app.get("/reports/daily")
@limiter.shared_limit("3/minute", scope="reports", key_func=user)
async def daily(request: Request) -> str:
    return "today"


@app.get("/reports/weekly")
@limiter.shared_limit("3/minute", scope="reports", key_func=user)
async def weekly(request: Request) -> str:
    return "this week"
