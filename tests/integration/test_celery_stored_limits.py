"""Limits of Celery tasks that an operator has set, in each kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from distwindow import ConfigurationError
from distwindow.contrib.celery import RateLimits
from distwindow.contrib.celery.stored_limits import StoredLimits


@pytest.fixture(params=["memory", "url", "client", "text client", "cluster", "sentinel"])
def stored(request: pytest.FixtureRequest, prefix: str) -> Iterator[StoredLimits]:
    if request.param == "memory":
        yield StoredLimits("memory://", prefix, "proj", 5.0)
    elif request.param in ("cluster", "sentinel"):
        yield StoredLimits(request.getfixturevalue(f"{request.param}_url"), prefix, "proj", 5.0)
    elif request.param == "url":
        yield StoredLimits(request.getfixturevalue("redis_url"), prefix, "proj", 5.0)
    else:
        url, is_text = request.getfixturevalue("redis_url"), request.param == "text client"
        with redis.Redis.from_url(url, decode_responses=is_text) as client:
            yield StoredLimits(client, prefix, "proj", 5.0)


def test_limits_are_kept_until_they_are_removed(stored: StoredLimits) -> None:
    assert stored.read() == {}
    stored.set("proj.fetch", "10/s")
    stored.set("proj.größe", "none")
    assert stored.read() == {"proj.fetch": "10/s", "proj.größe": "none"}
    stored.set("proj.fetch", "20/s; 100/m")
    stored.set("proj.größe", None)
    stored.set("unknown", None)
    assert stored.read() == {"proj.fetch": "20/s; 100/m"}
    stored.close()
    stored.close()


def test_applications_with_one_store_and_tasks_of_one_name_have_their_own(
    redis_url: str, prefix: str
) -> None:
    def stored_of(name: str | None) -> StoredLimits:
        limits = RateLimits(Celery(name, set_as_current=False), redis_url, prefix=prefix)
        return limits.stored_limits(limits.settings())

    for name in ("proj", "shop", None):
        stored = stored_of(name)
        assert stored.read() == {}
        stored.set("fetch", f"{name}")
        stored.close()
    for name in ("proj", "shop", None):
        stored = stored_of(name)
        assert stored.read() == {"fetch": f"{name}"}
        stored.close()


def test_what_is_no_store() -> None:
    with pytest.raises(ConfigurationError, match="takes a URL or a redis-py client, not object"):
        StoredLimits(object(), "p", None, 1.0)
