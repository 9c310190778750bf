"""The pool of limiters, through all that have one: requests and tasks of queues, in threads and in
tasks.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from distwindow import Limiter
from distwindow.away import local_share
from distwindow.contrib.http import LimitedRequest
from distwindow.contrib.limiter_pool import AsyncLimiterPool, LimiterPool
from distwindow.contrib.tasks import AsyncTaskGate, TaskGate, TaskLimits
from tests.servers.proxy import Proxy
from tests.servers.wait import until
from tests.web.test_rate_limits import AWAY, Awaiting, Blocking

MAKERS = {
    "requests in threads": Blocking, "requests in tasks": Awaiting,
    "queue in threads": TaskGate, "queue in tasks": AsyncTaskGate,
}  # fmt: skip


def limit_of(name: str) -> str:
    return f"{ord(name)}/minute"


class User:
    """Asks by limits that are its own for each name, of one letter."""

    def __init__(self, maker: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.maker, self.loop = maker, loop
        self.is_web = maker in (Blocking, Awaiting)

    def open(self, store: str = "memory://", **options: Any) -> None:
        if self.is_web:
            options = {"on_store_error": "allow", **options}
        self.made = self.maker(store, timeout=10.0, **options)
        self.pool = self.made.opened if self.is_web else self.made._limiters
        if self.is_web:
            self.limit = self.made.limit(lambda asked: limit_of(asked), name="n", key=str)

    def done(self, result: Any) -> Any:
        return result if self.loop is None else self.loop.run_until_complete(result)

    def ask(self, names: str) -> None:
        for name in names:
            if self.is_web:
                self.done(self.made.run(self.limit.decide(name, LimitedRequest())))
                continue
            task = self.made.add(TaskLimits("n:" + name, lambda: None, limit_of(name)))
            if self.loop is None:
                self.made.delay(task, (), {})
            else:
                self.done(self.made.wait(task, (), {}, 0.0))

    @property
    def there(self) -> set[str]:
        """The names whose limiters are there."""
        if self.loop is not None:
            self.done(asyncio.sleep(0.001))
        gc.collect()
        return {chr(limiter.limits[0].amount) for limiter in self.pool.all()}


@pytest.fixture(params=MAKERS)
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    for pool in (LimiterPool, AsyncLimiterPool):
        monkeypatch.setattr(pool, "capacity", 3)
    loop = asyncio.new_event_loop() if "in tasks" in request.param else None
    made = User(MAKERS[request.param], loop)
    yield made
    made.done(made.pool.close() if loop is None else made.pool.aclose())
    if loop is not None:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.mark.parametrize("asked", ["ABC", "ABCD", "ABCAD", "ABCDABCDE", "AABBCCDDB"])
def test_the_least_recent_limiters_go(user: User, asked: str) -> None:
    user.open()
    user.ask(asked)
    assert user.there == set(list(dict.fromkeys(reversed(asked)))[:3])


def test_all_have_one_store_and_one_worker(user: User, proxy: Proxy, prefix: str) -> None:
    others = {each.ident for each in threading.enumerate()}  # of earlier tests
    user.open(proxy.url, prefix=prefix)
    user.ask("A")
    accepted = proxy.accepted
    user.ask("BCDEFABC")
    assert proxy.accepted == accepted
    own = [each.name for each in threading.enumerate() if each.ident not in others]
    assert own.count("distwindow") <= 1


@pytest.mark.parametrize("user", ["requests in threads", "requests in tasks"], indirect=True)
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("policy", ["raise", "local"])
def test_one_that_has_gone_has_sent_its_counts(
    user: User,
    consistency: str,
    policy: str,
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has a local share goes after it has told the store that this process is there."""
    monkeypatch.setattr(local_share, "_RENEW_EVERY_S", 0.1)
    user.open(redis_url, prefix=prefix, consistency=consistency, on_store_error=policy)
    user.ask("aaaaaBCD")
    until(lambda: user.there == set("BCD"))
    with Limiter(redis_url, limit_of("a"), prefix=prefix) as limiter:
        assert limiter.peek("n:a").remaining == ord("a") - 5


@pytest.mark.parametrize("user", ["requests in threads", "requests in tasks"], indirect=True)
def test_one_with_counts_to_send_is_the_one_for_its_limits(user: User, prefix: str) -> None:
    user.open(AWAY, prefix=prefix, consistency="eventual")
    user.ask("aBCD")
    assert user.there == set("aBCD")
    user.ask("a")
    [limiter] = [each for each in user.pool.all() if each.limits[0].amount == ord("a")]
    assert user.done(limiter.peek("n:a")).remaining == ord("a") - 2
