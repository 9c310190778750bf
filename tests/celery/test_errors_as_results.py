"""What a task has raised is the same error where its result is asked for: Celery sends it as JSON,
by its `args`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend

from distwindow import (
    AuthorityDenied,
    ConcurrencyExceeded,
    DistwindowError,
    Key,
    Limiter,
    RateLimitExceeded,
    StoreTimeout,
    StoreUnavailable,
    SystemOverloaded,
)
from distwindow.breaker.record import BreakerOpen
from distwindow.contrib.upstream import UpstreamLimited


def exceeded(kind: Any = RateLimitExceeded, key: Any = "k", **options: Any) -> Any:
    with Limiter("memory://", "1/hour strict") as limiter:
        limiter.try_acquire(key)
        return kind(limiter.try_acquire(key), **options)


def errors() -> Iterator[DistwindowError]:
    yield exceeded()
    for name in ("aiohttp", "httpx", "httpx2", "requests"):
        client = import_module(f"distwindow.contrib.{name}")
        yield exceeded(client.UpstreamLimited, is_paused=True)
        yield client.UpstreamStoreError("away")
    yield exceeded(UpstreamLimited, is_paused=False)
    yield ConcurrencyExceeded("k", 2, 2, 1.5)
    yield BreakerOpen("k", "open", 1.5)
    yield AuthorityDenied("r", "o")
    yield SystemOverloaded("r", "qps", 2.0, 1.0)
    yield StoreUnavailable("away")
    yield StoreTimeout("late")


ERRORS = list(errors())
BY_NAME = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def sent(error: Any) -> Any:
    """Return `error` as `result.get()` raises it."""
    with Celery("results", set_as_current=False) as app:
        backend = Backend(app)
        stored = backend.encode(backend.prepare_exception(error, "json"))
        return backend.exception_to_python(backend.decode(stored))


@pytest.mark.parametrize("key", [Key("k", tag="t"), b"\xff", "\ud800"], ids=repr)
def test_a_key_that_is_no_text_is_sent_as_text(key: Any) -> None:
    error = exceeded(key=key)
    found = sent(error)
    assert isinstance(found.decision.key, str)
    assert found.decision._replace(key=key) == error.decision
    assert "rate limit 1/hour strict exceeded for " in str(found)


@BY_NAME
def test_an_error_is_the_same_where_the_result_is_asked_for(error: Any) -> None:
    found = sent(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in ("retry_after", "is_paused"):
        assert getattr(found, name, None) == getattr(error, name, None)


@BY_NAME
def test_an_error_can_be_pickled_and_copied(error: Any) -> None:
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert repr(found) == repr(error)
        assert getattr(found, "decision", None) == getattr(error, "decision", None)
