"""`Limiter` and `AsyncLimiter` have the same names and signatures."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter


def public(limiter_class: type) -> dict[str, Any]:
    return {
        name: value for name, value in inspect.getmembers(limiter_class) if not name.startswith("_")
    }


def test_both_limiters_have_the_same_names() -> None:
    blocking, asynchronous = public(Limiter), public(AsyncLimiter)
    assert blocking.keys() - asynchronous.keys() == {"close"}
    assert asynchronous.keys() - blocking.keys() == {"aclose"}


@pytest.mark.parametrize("name", sorted(public(Limiter).keys() - {"close"} | {"__init__"}))
def test_both_limiters_have_the_same_signatures(name: str) -> None:
    blocking, asynchronous = getattr(Limiter, name), getattr(AsyncLimiter, name)
    if isinstance(blocking, property):
        blocking, asynchronous = blocking.fget, asynchronous.fget
    one, other = inspect.signature(blocking), inspect.signature(asynchronous)
    assert str(one.parameters) == str(other.parameters).replace("AsyncEntry", "Entry")
    returned = str(other.return_annotation).replace("AsyncEntry", "Entry")
    assert str(one.return_annotation) == re.sub(r"Unawaited\[?(\w*)\]?", r"\1", returned)


def test_methods_that_use_the_store_are_awaited() -> None:
    coroutines = {
        name
        for name, function in public(AsyncLimiter).items()
        if inspect.iscoroutinefunction(function)
        or "Unawaited" in str(getattr(function, "__annotations__", {}).get("return"))
    }
    calls = {"try_acquire", "try_acquire_all", "acquire", "peek", "stats", "refund", "reset"}
    calls |= {"try_reserve", "reserve", "reserve_all"}
    assert coroutines == calls | {"minute", "origins", "flush", "aclose"}
    assert not any(inspect.iscoroutinefunction(f) for f in public(Limiter).values())
