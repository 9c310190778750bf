"""slowapi on uvicorn with two workers, over the storage of this library."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("slowapi")
pytest.importorskip("uvicorn")

import httpx

from tests.limits_storage import slowapi_app
from tests.limits_storage.common import STRATEGIES, new_user, refusal
from tests.servers import Standalone, until
from tests.web.burst import burst, get, statuses
from tests.web.server import Served, serve

pytestmark = pytest.mark.slow

MODULE = "tests.limits_storage.slowapi_app"
UVICORN = f"uvicorn --factory {MODULE}:{{factory}} --port {{port}}"
PASSWORD = "opensesame"
AWAY = {"in_memory_fallback_enabled": 200, "swallow_errors": 200, "neither": 500}
"""What is answered while the store is away, by route."""


@contextmanager
def served(
    factory: str, redis: Standalone, workers: int = 2, **environment: str
) -> Iterator[Served]:
    """Run uvicorn with what `factory` makes."""
    command = UVICORN.replace("{factory}", factory)
    command += f" --workers {workers}" if workers > 1 else ""
    with serve(command, MODULE, redis.url, **environment) as one:
        yield one


# -- counts ---------------------------------------------------------------------------------------


def test_a_burst_on_two_workers_is_limited_to_the_permit() -> None:
    with Standalone() as redis, served("sample", redis) as one:
        until(lambda: len({get(f"{one.url}/free").body for _ in range(20)}) == 2)
        for path in ("five", "threads"):
            headers = new_user()
            answers = burst(f"{one.url}/{path}", 60, headers)
            assert statuses(answers) == {200: 5, 429: 55}
            for answer in answers:
                assert answer.field("x-ratelimit-limit") == "5"
                assert float(answer.field("x-ratelimit-reset") or "") > time.time()
                assert 0 < int(answer.field("retry-after") or "") <= 63
            headers = new_user()
            found = [get(f"{one.url}/{path}", headers) for _ in range(7)]
            left = [int(answer.field("x-ratelimit-remaining") or "") for answer in found]
            assert left == [4, 3, 2, 1, 0, 0, 0]
        assert "Traceback" not in one.output


def test_who_waits_for_retry_after_is_served() -> None:
    """At the first try, whatever the strategy: 20 of 20 of each."""

    def is_served(strategy: str, delay: float) -> bool:
        time.sleep(delay)
        headers, url = new_user(), f"{one.url}/{strategy}/wait"
        answer = refusal(url, headers)
        time.sleep(int(answer.field("retry-after") or ""))
        return get(url, headers).status == 200

    chance = random.Random(5)
    calls = [(name, chance.uniform(0, 1)) for name in STRATEGIES for _ in range(20)]
    with Standalone() as redis, served("sample", redis) as one:
        with ThreadPoolExecutor(len(calls)) as pool:
            found = list(pool.map(lambda call: (call[0], is_served(*call)), calls))
    assert Counter(found) == {(name, True): 20 for name in STRATEGIES}


PATHS = ("/limit", "/several", "/default", "/exempt", "/dynamic", "/exempt-when", "/cost",
         "/cost-3", "/methods", "/posts", "/items/1", "/items/2", "/items/a%2Fb", "/shared-1",
         "/shared-2")  # fmt: skip
HEADERS = {
    "X-User": ["ann", "bob", "ann/60/1/year"],
    "X-Plan": ["gold", "free"],
    "X-Cost": ["0", "1", "2", "3", "50"],
    "X-Internal": ["1"],
}


async def answers(app: Any, made: list[tuple[str, str, dict[str, str]]]) -> list[tuple[Any, ...]]:
    transport = httpx.ASGITransport(app)
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for method, path, headers in made:
            answer = await client.request(method, path, headers=headers)
            fields = answer.headers
            assert (answer.status_code == 429) <= ("retry-after" in fields)
            found.append((answer.status_code, answer.content, fields.get("x-ratelimit-limit"),
                          fields.get("x-ratelimit-remaining")))  # fmt: skip
    return found


@pytest.mark.parametrize("middleware", slowapi_app.MIDDLEWARES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_request_is_answered_as_with_the_storage_of_limits(
    strategy: str,
    middleware: str,
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTWINDOW_URL", redis_url)
    options = {"key_style": "endpoint", "key_prefix": "a/b"} if middleware == "http" else {}
    chance = random.Random(f"{strategy} {middleware}")
    made = []
    few = chance.sample(PATHS, 5)
    for _ in range(120):
        headers = {
            name: chance.choice(values)
            for name, values in HEADERS.items()
            if name == "X-User" or chance.random() < 0.3
        }
        path = chance.choice(few if chance.random() < 0.7 else PATHS)
        made.append((chance.choice(["GET", "GET", "POST"]), path, headers))

    async def all_answers(uri: str, **of_storage: Any) -> list[tuple[Any, ...]]:
        app = slowapi_app.kitchen_sink(
            middleware, strategy=strategy, storage_uri=uri, storage_options=of_storage, **options
        )  # fmt: skip
        found = await answers(app, made)
        if redis_url in uri:
            app.state.limiter._storage._windows._pool.close()  # while the store is there
        return found

    expected = asyncio.run(all_answers("memory://"))
    assert {200, 429} <= {one[0] for one in expected}
    assert asyncio.run(all_answers("distwindow+memory://")) == expected
    uri = f"distwindow+{redis_url}"
    assert asyncio.run(all_answers(uri, prefix=prefix, timeout=30)) == expected


# -- a store that is away -------------------------------------------------------------------------


def test_a_store_that_is_frozen_lets_routes_without_a_limit_go_on() -> None:
    """slowapi blocks the loop of all routes: here until the store is known to be away, and with the
    storage of `limits` until it goes on.
    """
    with Standalone() as redis, served("down", redis, 1, DISTWINDOW_TIMEOUT="0.25") as one:
        for path, status in AWAY.items():
            assert get(f"{one.url}/{path}", new_user()).status == 200
            redis.pause()
            try:
                slowest, found = _while_called(one, path)
            finally:
                redis.resume()
            assert slowest < 1.5
            assert {*found} == {status}
        until(lambda: statuses(get(f"{one.url}/neither", new_user()) for _ in range(9)) == {200: 9})


def _while_called(one: Served, path: str) -> tuple[float, list[int]]:
    """Return how long a route without a limit took at most, while another is called, and with what
    this one was answered.
    """
    is_over = threading.Event()
    found: list[int] = []

    def call() -> None:
        while not is_over.is_set():
            found.append(get(f"{one.url}/{path}", new_user()).status)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert get(f"{one.url}/free").status == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.03)
    is_over.set()
    for caller in callers:
        caller.join()
    return slowest, found


def test_a_store_that_stops_is_answered_as_each_limiter_says_and_comes_back() -> None:
    with Standalone(password=PASSWORD) as redis, served("down", redis) as one:
        headers = new_user()
        for path in AWAY:
            answers = [get(f"{one.url}/{path}", headers) for _ in range(9)]
            assert statuses(answers) == {200: 5, 429: 4}
        redis.kill()
        headers = new_user()
        # Each of two workers admits five from its memory.
        found = statuses(burst(f"{one.url}/in_memory_fallback_enabled", 100, headers))
        assert {*found} == {200, 429}
        assert 5 <= found[200] <= 10
        for path in ("swallow_errors", "neither"):
            # One connection each, as uvicorn closes those on which it has answered 500.
            found = statuses(get(f"{one.url}/{path}", headers) for _ in range(20))
            assert found == {AWAY[path]: 20}
        assert "is not reachable" in one.output
        assert PASSWORD not in one.output

        redis.restart()

        def counts_in_the_store(path: str) -> bool:
            answers = burst(f"{one.url}/{path}", 40, new_user())
            return statuses(answers) == {200: 5, 429: 35}

        for path in AWAY:
            until(lambda path=path: counts_in_the_store(path), 20, every=0.2)  # type: ignore[misc]
