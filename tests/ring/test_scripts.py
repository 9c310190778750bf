"""Loading scripts before the first call."""

from __future__ import annotations

import pytest

from distwindow import Limiter
from distwindow.ring import command
from distwindow.stores.redis.urls import parse_url_text


def test_no_call_reads_files(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = command.script_names()
    command.load_script.cache_clear()
    with Limiter(redis_url, "10/second", prefix=prefix, timeout=10) as limiter:
        monkeypatch.setattr(command, "scripts_folder", None)
        assert command.load_script.cache_info().currsize == len(names)
        misses = command.load_script.cache_info().misses
        assert limiter.try_acquire("k")
        assert limiter.stats("k").passed == 1
        assert command.load_script.cache_info().misses == misses


def test_a_url_is_read_without_making_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is dropped has a destructor in Python, which drops what a handler raises."""
    monkeypatch.setattr("redis.ConnectionPool.__init__", None)
    assert parse_url_text("redis://localhost:6379/0?socket_keepalive=true").kind == "one"
