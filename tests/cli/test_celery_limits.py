"""`distwindow stats` shows the keys of limited Celery tasks, and no more of what is stored."""

from __future__ import annotations

from distwindow import Limiter
from distwindow.contrib.celery.stored_limits import StoredLimits

from .conftest import Cli


def test_stats_shows_the_keys_of_tasks(cli: Cli, redis_url: str, prefix: str) -> None:
    for application in ("proj", None):
        stored = StoredLimits(redis_url, prefix, application, 5.0)
        stored.set("proj.fetch", "10/s")
        stored.close()
    with Limiter(redis_url, "1/second", prefix=prefix, timeout=5.0) as limiter:
        assert limiter.try_acquire_all([("tenant:acme", "5/hour", 1)])
    shown = cli("stats")
    assert "tenant:acme" in shown.out
    assert "skipped" not in shown.out + shown.err
