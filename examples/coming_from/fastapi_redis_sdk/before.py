"""A FastAPI application with limits of fastapi-redis-sdk, which reads REDIS_URL.

uvicorn examples.coming_from.fastapi_redis_sdk.before:app
"""

from fastapi import Depends, FastAPI, Request
from redis_fastapi import FastAPIRedis, rate_limit


def user(request: Request) -> str:
    return request.headers["x-user"]


app = FastAPI()
FastAPIRedis(app).lifespan().rate_limiting()


@app.get("/search", dependencies=[Depends(rate_limit("5/minute"))])
async def search() -> str:
    return "found"


@app.get(
    "/reports",
    dependencies=[Depends(rate_limit("3/minute", identifier=user, fail_closed=True))],
)
async def reports() -> str:
    return "today"
