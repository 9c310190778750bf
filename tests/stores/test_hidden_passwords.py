"""No error and no repr shows a password."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import ConfigurationError, StoreUnavailable
from tests.limiter.first_call import SECRET, all_texts_of, each_limiter, error_of


@each_limiter
@pytest.mark.parametrize(
    "store",
    [
        f"redis://:{SECRET}@host".encode(),
        [f"redis://:{SECRET}@host"],
        {"password": SECRET},
        f"unix://u:a/{SECRET}@/tmp/x.sock",
    ],
)
def test_no_password_of_what_is_no_store(limiter_class: type, store: Any) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, store))


@each_limiter
def test_no_password_where_a_limit_or_a_clock_should_be(limiter_class: type) -> None:
    url = f"redis://:{SECRET}@host"
    assert SECRET not in all_texts_of(error_of(limiter_class, "1/second", limits=url))
    assert SECRET not in all_texts_of(error_of(limiter_class, "memory://", clock=url))


@each_limiter
@pytest.mark.parametrize(
    "url",
    [
        "redis://user:{0}@127.0.0.1:1/0",
        "redis://:{0}@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password={0}",
        "redis://user:{0}@127.0.0.1:x/0",
        "redis://user:{0}@127.0.0.1:99999/0",
        "redis://user:{0}@127.0.0.1/db",
        "redis://user:{0}@127.0.0.1/0?db=x",
        "redis://user:{0}@127.0.0.1:1/0?colour=blue",
        "reddis://user:{0}@127.0.0.1:1/0",
        "rediss://user:{0}@127.0.0.1:1/0",
        "unix://user:{0}@/tmp/there-is-no-such.sock?db=0",
        "redis+cluster://user:{0}@127.0.0.1:1",
        "redis+cluster://user:{0}@127.0.0.1:x",
        "redis+cluster://user:{0}@127.0.0.1:1/7",
        "redis+cluster://user:{0}@127.0.0.1:1?colour=blue",
        "redis+sentinel://user:{0}@127.0.0.1:1",
        "redis+sentinel://user:{0}@127.0.0.1:1/service",
        "redis+sentinel://127.0.0.1:1/service?sentinel_password={0}",
        "redis+sentinel://user:{0}@127.0.0.1:1/service/x",
        "redis+sentinel://user:{0}@127.0.0.1:1/service?colour=blue",
    ],
)
def test_no_password_in_any_message(limiter_class: type, url: str) -> None:
    exc = error_of(limiter_class, url.format(SECRET), timeout=10)
    assert isinstance(exc, (ConfigurationError, StoreUnavailable))
    assert SECRET not in all_texts_of(exc)


@each_limiter
def test_no_password_in_the_message_of_memory_either(limiter_class: type) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, f"memory://user:{SECRET}@host"))


@each_limiter
def test_no_password_in_any_repr(limiter_class: type) -> None:
    limiter = limiter_class(f"redis://user:{SECRET}@127.0.0.1:1/0", "5/minute", name="me")
    for thing in (limiter, limiter._store, vars(limiter._store)):
        assert SECRET not in repr(thing)
