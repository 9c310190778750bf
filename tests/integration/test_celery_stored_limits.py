"""Limits of Celery tasks that an operator has set, in each kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from distwindow import ConfigurationError
from distwindow.contrib.celery.stored_limits import StoredLimits


@pytest.fixture(params=["memory", "url", "client", "text client", "cluster", "sentinel"])
def stored(request: pytest.FixtureRequest, prefix: str) -> Iterator[StoredLimits]:
    if request.param == "memory":
        yield StoredLimits("memory://", prefix, 5.0)
    elif request.param in ("cluster", "sentinel"):
        yield StoredLimits(request.getfixturevalue(f"{request.param}_url"), prefix, 5.0)
    elif request.param == "url":
        yield StoredLimits(request.getfixturevalue("redis_url"), prefix, 5.0)
    else:
        url, is_text = request.getfixturevalue("redis_url"), request.param == "text client"
        with redis.Redis.from_url(url, decode_responses=is_text) as client:
            yield StoredLimits(client, prefix, 5.0)


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


def test_what_is_no_store() -> None:
    with pytest.raises(ConfigurationError, match="takes a URL or a redis-py client, not object"):
        StoredLimits(object(), "p", 1.0)
