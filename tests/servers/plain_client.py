"""A client without retries for the tests of the servers and the proxy."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def plain(url: str, **options: Any) -> redis.Redis:
    """Return a client without retries, with a short timeout, so that tests see every failure."""
    options = {"socket_timeout": 5, "retry": Retry(NoBackoff(), 0), **options}
    return redis.Redis.from_url(url, **options)
