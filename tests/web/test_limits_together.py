"""Limits that are asked together: in one round trip, all of them or none."""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import pytest
import redis
from fastapi import Depends, FastAPI, Header
from fastapi.testclient import TestClient

from distwindow import ConfigurationError, Key, StoreError
from distwindow.away.policy import Answer
from distwindow.contrib import asgi, fastapi
from distwindow.runtime.options import Consistency
from tests.web.test_asgi import call, http_scope

SCRIPTS = ("evalsha", "eval", "fcall")


@pytest.fixture(params=["memory", "Redis"])
def options(request: pytest.FixtureRequest, prefix: str) -> dict[str, Any]:
    is_redis = request.param == "Redis"
    store = request.getfixturevalue("redis_url") if is_redis else "memory://"
    return {"store": store, "prefix": prefix, "on_store_error": "raise", "timeout": 10.0}


def by_client(scope: Any) -> str:
    return str(dict(asgi.scope_of(scope)["headers"])[b"client"].decode())


class Site:
    """One application whose handler checks some limits together."""

    def __init__(self, rate_limits: asgi.RateLimits) -> None:
        self.rate_limits = rate_limits
        self.limits: list[Any] = []
        self.status = 200

    def limit(self, limits: str, **options: Any) -> Any:
        name = f"n{len(self.limits)}"
        self.limits.append(self.rate_limits.limit(limits, **{"name": name, **options}))
        return self.limits[-1]

    async def ask(self, client: str = "a") -> tuple[int, dict[str, str]]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.rate_limits.check(scope, *self.limits)
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": b"four"})

        scope = http_scope(headers=[(b"client", client.encode())])
        start, *_ = await call(asgi.RateLimitMiddleware(app, self.rate_limits), scope)
        return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}

    async def admits(self, times: int, client: str = "a") -> int:
        return [(await self.ask(client))[0] for _ in range(times)].count(200)


EACH = [("memory", "direct"), *(("Redis", each) for each in get_args(Consistency))]


@pytest.fixture(params=EACH, ids=", ".join)
async def site(request: pytest.FixtureRequest, redis_url: str, prefix: str) -> AsyncIterator[Site]:
    store, consistency = request.param
    async with asgi.RateLimits(
        redis_url if store == "Redis" else "memory://", prefix=prefix, on_store_error="raise",
        timeout=10.0, consistency=consistency,
    ) as rate_limits:  # fmt: skip
        yield Site(rate_limits)


def scripts_run(url: str) -> int:
    """Return how many calls of scripts the server has executed."""
    with redis.Redis.from_url(url) as client:
        stats: Any = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in SCRIPTS)


async def test_one_round_trip_decides_on_all(site: Site, redis_url: str) -> None:
    site.limit("9/hour", key=by_client)
    site.limit("1000/hour", cost=300)
    site.limit("9/day", key=lambda scope: None)
    await site.ask()  # connects
    before = scripts_run(redis_url)
    status, fields = await site.ask()
    assert status == 200
    assert scripts_run(redis_url) == before + (0 if "memory" in repr(site.rate_limits) else 1)
    assert fields["ratelimit-policy"] == '"n0";q=9;w=3600, "n1";q=1000;w=3600, "n2";q=9;w=86400'
    assert fields["ratelimit"].startswith('"n0";r=7;')


async def test_what_one_refuses_costs_nothing(site: Site) -> None:
    site.limit("8/hour")
    site.limit("3/hour", key=by_client)
    assert [await site.admits(5, client) for client in "abcd"] == [3, 3, 2, 0]
    status, fields = await site.ask("d")
    assert status == 429
    assert fields["ratelimit"].startswith('"n0";r=0;')


# With "eventual" a process learns of what was decided in the store at the next sync.
EXACT = pytest.mark.parametrize("site", EACH[:-1], ids=", ".join, indirect=True)


@EXACT
async def test_a_burst_takes_what_there_is(site: Site) -> None:
    """A refusal by one never makes another refuse a request."""
    site.limit("60/hour")
    site.limit("1000/hour", cost=300)
    answers = await asyncio.gather(*(site.ask() for _ in range(50)))
    assert [status for status, _ in answers].count(200) == 3
    assert {fields["ratelimit"].split(";")[0] for status, fields in answers if status == 429} == {
        '"n1"'
    }
    site.limits.pop()
    assert await site.admits(60) == 57


@EXACT
async def test_each_has_its_own_cost_afterwards(site: Site) -> None:
    site.limit("100/hour", cost=50, cost_after=lambda scope, response: response.body_bytes)
    site.limit("9/hour", count_when=lambda response: response.status_code == 401)
    site.limit("9/day")
    assert (await site.ask())[0] == 200
    site.status = 401
    assert (await site.ask())[0] == 401
    left = [await limit.check(http_scope()) for limit in site.limits[2:]]
    assert [each.remaining for each in left] == [6]
    peeked = [await limit._limiter.peek(f"{limit.name}:9.9.9.9") for limit in site.limits]
    assert [each.remaining for each in peeked] == [92, 8, 6]


async def test_a_guess_above_the_limit_is_cut(site: Site) -> None:
    site.limit("100/hour", cost=500, cost_after=lambda scope, response: 0)
    site.limit("9/hour")
    assert await site.admits(3) == 3


async def test_equal_ones_are_asked_once_and_others_of_one_window_never(site: Site) -> None:
    site.limit("3/hour", name="n")
    site.limit("3/hour", name="n")
    assert await site.admits(5) == 3
    site.limit("9/hour", name="n")
    with pytest.raises(ConfigurationError, match="name of its own"):
        await site.ask()


async def test_equal_ones_that_tasks_ask_at_once_charge_once(site: Site) -> None:
    """As where they are asked one after the other; one limit that is asked twice charges twice."""
    limits = [site.rate_limits.limit("9/hour", name="n") for _ in range(3)]
    other = site.rate_limits.limit("9/hour", name="other")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        of = [limits[0], limits[0], limits[1], limits[2], other]
        await asyncio.gather(*(each.check(scope) for each in of))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"four"})

    wrapped = asgi.RateLimitMiddleware(app, site.rate_limits)
    await call(wrapped, http_scope())
    left: list[Any] = [await limit.check(http_scope()) for limit in (limits[0], other)]
    assert [each.remaining for each in left] == [9 - 2 - 1, 9 - 1 - 1]


# With "leased" the windows have what is leased, and not yet spent.
@pytest.mark.parametrize("site", EACH[:2], ids=", ".join, indirect=True)
async def test_tasks_that_ask_at_once_charge_in_shadow_as_if_it_were_enforced(site: Site) -> None:
    """A request, and what it asks at one moment, drawn at random."""
    chance = random.Random(repr(site.rate_limits))
    names = "aaabc"
    plans = [chance.choices(range(len(names)), k=5) for _ in range(8)]
    used = []
    for shadow in (False, True):
        limits = [site.rate_limits.limit("999/hour", name=each, shadow=shadow) for each in names]
        for plan in plans:

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await asyncio.gather(*[limits[number].check(scope) for number in plan])  # noqa: B023
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"four"})

            await call(asgi.RateLimitMiddleware(app, site.rate_limits), http_scope())
        stats = [await limit._limiter.stats(f"{limit.name}:9.9.9.9") for limit in limits[2:]]
        used.append([each.passed for each in stats])
    assert used[0] == used[1]
    assert used[0][0] > 0


async def test_of_equal_ones_that_tasks_ask_at_once_each_is_refused(site: Site) -> None:
    limits = [site.rate_limits.limit("1/hour", name="n") for _ in range(2)]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = [each.check(scope) for each in limits]
        seen.append(await asyncio.gather(*asked, return_exceptions=True))

    wrapped = asgi.RateLimitMiddleware(app, site.rate_limits)
    for _ in range(2):
        await call(wrapped, http_scope())
    assert [each.allowed for each in seen[0]] == [True, True]
    assert [type(each) for each in seen[1]] == [asgi.RateLimited] * 2


async def test_those_that_cannot_be_asked_together_are_asked_in_turn(site: Site) -> None:
    site.limit("9/hour", on_store_error="allow")
    site.limit("3/hour", on_store_error="deny", key=by_client)
    assert [await site.admits(5, client) for client in "abcd"] == [3, 3, 3, 0]


async def test_limits_of_different_objects_are_asked_in_turn(site: Site, redis_url: str) -> None:
    """Each has its own store and prefix."""
    site.limit("9/hour", name="n")
    async with asgi.RateLimits(
        redis_url, on_store_error="raise", prefix=uuid.uuid4().hex, timeout=10.0
    ) as other:
        site.limits.append(other.limit("3/hour", name="n"))
        assert await site.admits(5) == 3
        decision = await site.limits[1]._limiter.peek("n:9.9.9.9")
        assert (decision.allowed, decision.remaining) == (False, 0)


async def test_a_request_leaves_nothing_to_the_garbage_collector(site: Site) -> None:
    site.limit("9/hour", cost_after=lambda scope, response: 1)
    site.limit("3/hour", name="full")
    for limits in (site.limits, site.limits[1:]):
        site.limits = [*limits, site.limit("900/hour")]
        await site.ask()
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):  # admitted, and refused
                await site.ask()
            assert gc.collect() < 10
        finally:
            gc.enable()


async def test_two_names_that_are_alike_are_told_apart_in_the_fields(site: Site) -> None:
    site.limit("9/hour", name="n")
    site.limit("5/minute", name="n")
    policies = (await site.ask())[1]["ratelimit-policy"].split(", ")
    assert policies == ['"n 9/hour";q=9;w=3600', '"n 5/minute";q=5;w=60']


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("policy", get_args(Answer))
async def test_while_the_store_is_away_the_policy_decides_on_all(
    policy: Any, settles: bool
) -> None:
    options: dict[str, Any] = {"share": 1.0} if policy == "local" else {}
    async with asgi.RateLimits(
        "redis://127.0.0.1:1/0",
        on_store_error=policy,
        **options,
    ) as rate_limits:
        site = Site(rate_limits)
        site.limit("9/hour", **({"count_when": lambda response: True} if settles else {}))
        site.limit("3/hour", key=by_client)
        if policy == "raise":
            with pytest.raises(StoreError):
                await site.ask()
            return
        answers = [(await site.ask(client))[0] for client in "abcd" for _ in range(5)]
    of_local = ([200] * 3 + [429] * 2) * 3 + [429] * 5
    assert answers == {"allow": [200] * 20, "deny": [503] * 20, "local": of_local}[policy]


# -- as a dependency ------------------------------------------------------------------------------


def user(x_user: str = Header()) -> str:
    return x_user


def application(rate_limits: fastapi.RateLimits, dependency: Callable[..., Any]) -> TestClient:
    app = FastAPI()
    rate_limits.install(app)
    app.get("/", dependencies=[Depends(dependency)])(lambda: "home")
    return TestClient(app)


def test_a_dependency_with_keys_of_their_own(options: Any) -> None:
    rate_limits = fastapi.RateLimits(**options)
    each = rate_limits.limit("3/hour", key=Depends(user))
    every = rate_limits.limit("8/hour", key=lambda request: "all")
    client = application(rate_limits, rate_limits.all_of(each, every))
    answers = [
        [client.get("/", headers={"x-user": name}).status_code for _ in range(5)] for name in "abcd"
    ]
    assert [codes.count(200) for codes in answers] == [3, 3, 2, 0]
    assert client.get("/").status_code == 422  # without the header of the key
    app: Any = client.app
    assert [(one.name, one.limits) for one in rate_limits.limits_of(app)] == [
        ("GET /", "3/hour"),
        ("GET /", "8/hour"),
    ]
    assert "429" in client.get("/openapi.json").json()["paths"]["/"]["get"]["responses"]


@pytest.mark.parametrize("given", [(), ("5/minute",), (None,)])
def test_all_of_takes_limits(options: Any, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="all_of takes limits"):
        fastapi.RateLimits(**options).all_of(*given)


# -- on a cluster ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tagged", [True, False])
async def test_on_a_cluster_keys_without_a_common_tag_are_asked_in_turn(
    cluster_url: str, prefix: str, tagged: bool
) -> None:
    def key(name: str) -> Callable[[Any], Any]:
        return lambda scope: Key(name, tag=prefix) if tagged else name

    async with asgi.RateLimits(
        cluster_url, on_store_error="raise", prefix=prefix, timeout=10.0
    ) as rate_limits:
        site = Site(rate_limits)
        for number in range(6):
            site.limit("3/hour" if number == 3 else "9/hour", key=key(f"k{number}"))
        assert await site.admits(5) == 3
        fields = (await site.ask())[1]
        assert fields["ratelimit"].startswith('"n3";r=0;')
        del site.limits[3]
        assert await site.admits(9) == 6
