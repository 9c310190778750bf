"""A FastAPI application: limits of routes, of routers, by user, and by the response.

uvicorn examples.web.fastapi_app:app --workers 2
for i in $(seq 15); do curl -s -o /dev/null -w '%{http_code} ' localhost:8000/search?q=x; done
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from distwindow.contrib.fastapi import RateLimits

TICK_S = float(os.environ.get("TICK_S", "0.1"))
rate_limits = RateLimits(
    os.environ.get("DISTWINDOW_URL", "redis://localhost:6379/0"), on_store_error="allow"
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rate_limits:
        yield


app = FastAPI(lifespan=lifespan)
rate_limits.install(app)


# -- one route: ten a minute for each address ---------------------------------------------------


@app.get("/search", dependencies=[Depends(rate_limits.limit("10/minute"))])
async def search(q: str = "") -> dict[str, str]:
    return {"q": q}


# -- by user: a key that is a dependency --------------------------------------------------------


def current_user(x_user: Annotated[str, Header()]) -> str:
    return x_user


by_user = rate_limits.limit("10/minute", key=Depends(current_user), name="mine")


@app.get("/mine", dependencies=[Depends(by_user)])
async def mine(user: Annotated[str, Depends(current_user)]) -> dict[str, str]:
    return {"user": user}


# -- only wrong passwords count -----------------------------------------------------------------

attempts = rate_limits.limit(
    "5/minute", on_store_error="deny", count_when=lambda response: response.status_code == 401
)


@app.post("/login", dependencies=[Depends(attempts)])
async def login(password: Annotated[str, Body(embed=True)]) -> dict[str, str]:
    if password != "right":
        raise HTTPException(401, "wrong password")
    return {"token": "..."}


# -- a router: each of its routes has ten a minute, wherever it is included -----------------------

items = APIRouter(prefix="/items", dependencies=[Depends(rate_limits.limit("10/minute"))])


@items.get("/{item}")
async def item(item: int) -> int:
    return item


api = APIRouter(prefix="/api")
api.include_router(items)
app.include_router(api)
app.include_router(items, prefix="/v1")
app.include_router(items, prefix="/v2")


# -- all kinds of responses, and one limit for all of them ---------------------------------------

kinds = APIRouter(
    prefix="/kinds", dependencies=[Depends(rate_limits.limit("1000/hour", name="kinds"))]
)


@kinds.get("/{kind}")
async def kind(kind: str) -> Any:
    async def chunks() -> AsyncIterator[str]:
        for number in range(3):
            yield f"data: {number}\n\n"

    if kind == "stream":
        return StreamingResponse(chunks())
    if kind == "events":
        return StreamingResponse(chunks(), media_type="text/event-stream")
    if kind == "response":
        return PlainTextResponse("text")
    if kind == "dict":
        return {"kind": kind}
    if kind == "redirect":
        return Response(status_code=303, headers={"location": "/kinds/dict"})
    raise HTTPException(404)


app.include_router(kinds)


# -- the cost is known afterwards: what a stream has used ----------------------------------------

used = rate_limits.limit(
    "1000/minute",
    name="tokens",
    cost=100,  # is reserved before
    cost_after=lambda request, response: response.body_bytes // 10,
)


@app.get("/chat", dependencies=[Depends(used)])
async def chat() -> StreamingResponse:
    async def chunks() -> AsyncIterator[str]:
        for number in range(10):
            yield f"data: {number:032}\n\n"  # forty bytes
            await asyncio.sleep(TICK_S)

    return StreamingResponse(chunks(), media_type="text/event-stream")


# -- another application, all of whose routes have a limit together ------------------------------


def tenant(request: Request) -> str:
    return request.headers.get("x-tenant", "none")


admin = FastAPI(
    dependencies=[Depends(rate_limits.limit("10/minute", name="admin", key=tenant))],
)


@admin.get("/users")
async def users() -> list[str]:
    return []


@admin.get("/groups")
async def groups() -> list[str]:
    return []


app.mount("/admin", admin)


@app.get("/free")
async def free() -> str:
    return "not limited"
