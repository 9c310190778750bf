"""One of several processes that share limits: it calls in each way that there is, first while the
store is up, until it knows how many processes there are, and then while it is away.

    python -m tests.away.sharing_process URL threads|tasks PROCESSES
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import flask

from distwindow import AsyncLimiter, DistwindowError, Limiter
from distwindow.away import local_share
from distwindow.contrib import asgi
from distwindow.contrib.flask import RateLimits

LIMIT = "100/hour"
CALLS = 60
Call = Callable[[Any, str], Any]

WAYS: dict[str, Call] = {
    "try_acquire": lambda limiter, key: limiter.try_acquire(key),
    "try_acquire+priority": lambda limiter, key: limiter.try_acquire(key, priority=True),
    "try_acquire+enqueue": lambda limiter, key: limiter.try_acquire(key, enqueue=True),
    "try_acquire_all": lambda limiter, key: limiter.try_acquire_all([(key, LIMIT, 1)]),
    "acquire": lambda limiter, key: limiter.acquire(key, timeout=0.0),
    "acquire+priority": lambda limiter, key: limiter.acquire(key, timeout=0.0, priority=True),
    "try_reserve": lambda limiter, key: limiter.try_reserve(key, 1),
    "reserve": lambda limiter, key: limiter.reserve(key, 1, timeout=0.0),
    "reserve_all": lambda limiter, key: limiter.reserve_all([(key, LIMIT, 1)]),
    "entry": lambda limiter, key: _entered(limiter.entry(key)),
    "limit": lambda limiter, key: _limited(limiter, key),
}
"""By the methods of a limiter that admit."""
UNASKED = ("another text", "another limiter", "a limit of RateLimits")
"""Limits that are asked for the first time while the store is away."""


def _entered(entry: Any) -> Any:
    if hasattr(entry, "__aenter__"):

        async def enter() -> bool:
            async with entry:
                return True

        return enter()
    with entry:
        return True


def _limited(limiter: Any, key: str) -> Any:
    if isinstance(limiter, AsyncLimiter):

        async def work() -> bool:
            return True

        return limiter.limit(key)(work)()
    return limiter.limit(key)(lambda: True)()


async def _is_admitted(answer: Callable[[], Any]) -> bool:
    try:
        found = answer()
        if isinstance(found, Awaitable):
            found = await found
    except DistwindowError:
        return False
    return bool(found)


def asking_of_web(url: str, tasks: bool, **options: Any) -> tuple[Callable[[str], Any], Any]:
    """Return a function that asks a limit of an integration with this text, and what closes it."""
    options = {"on_store_error": "local", "prefix": "web", **options}
    if tasks:
        of_asgi = asgi.RateLimits(url, **options)
        limit = of_asgi.limit(lambda scope: scope["text"], name="n", key=lambda scope: "k")
        return lambda text: limit.check({"text": text, "method": "GET"}), of_asgi.aclose
    app = flask.Flask("app")
    of_flask = RateLimits(url, **options)
    of_flask.init_app(app)

    @app.route("/<int:number>")
    @of_flask.limit(lambda: f"{flask.request.path[1:]}/hour", key=lambda: "k")
    def view(number: int) -> str:
        return "ok"

    client = app.test_client()

    def ask(text: str) -> bool:
        return client.get(f"/{text.partition('/')[0]}").status_code == 200

    return ask, of_flask.close


async def work(url: str, tasks: bool, processes: int) -> None:
    kind: Any = AsyncLimiter if tasks else Limiter

    def make(prefix: str) -> Any:
        return kind(url, LIMIT, prefix=prefix, on_store_error="local", timeout=1.0)

    limiters = {way: make(way) for way in WAYS}
    ask_web, _ = asking_of_web(url, tasks)
    ends_at = time.monotonic() + 20

    def is_known() -> bool:
        found = [each.count for each in local_share._COUNTS.values()]
        return found == [processes] * (len(WAYS) + 1)  # and that of the web

    while not is_known() and time.monotonic() < ends_at:
        for way, call in WAYS.items():
            await _is_admitted(lambda call=call, way=way: call(limiters[way], "warm"))  # type: ignore[misc]
        await _is_admitted(lambda: ask_web("90/hour"))
        await asyncio.sleep(0.05)
    print("ready" if is_known() else "the others were not found", flush=True)
    sys.stdin.readline()
    admitted = dict.fromkeys((*WAYS, *UNASKED), 0)
    another = make("try_acquire")
    for _ in range(CALLS):
        for way, call in WAYS.items():
            admitted[way] += await _is_admitted(lambda call=call, way=way: call(limiters[way], "k"))  # type: ignore[misc]
        for way, ask in (
            ("another text", lambda: another.try_acquire_all([("new", "100/day", 1)])),
            ("another limiter", lambda: another.try_acquire("another")),
            ("a limit of RateLimits", lambda: ask_web("100/hour")),
        ):
            admitted[way] += await _is_admitted(ask)
    print(json.dumps(admitted), flush=True)


if __name__ == "__main__":
    local_share._RENEW_EVERY_S = 0.1
    logging.disable()
    asyncio.run(work(sys.argv[1], sys.argv[2] == "tasks", int(sys.argv[3])))
    os._exit(0)  # the store is away, so nothing can be told to it
