"""The first call of a new limiter of either kind, and every text of the error that it raises."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter

SECRET = "hunter2-x9"


async def attempt(
    limiter_class: type, store: Any, key: Any = "key", limits: Any = "5/minute", **options: Any
) -> Any:
    """Make the first call of a new limiter."""
    options = {"timeout": 5.0, **options}
    if limiter_class is Limiter:
        with Limiter(store, limits, **options) as limiter:
            return limiter.try_acquire(key)
    async with AsyncLimiter(store, limits, **options) as async_limiter:
        return await async_limiter.try_acquire(key)


def error_of(limiter_class: type, store: Any, **options: Any) -> BaseException:
    """Return what the first call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the callers check the type
        asyncio.run(attempt(limiter_class, store, **options))
    return caught.value


def all_texts_of(exc: BaseException) -> str:
    """Return the message, the repr, and what a log would show, with all causes and contexts."""
    texts = [str(exc), repr(exc), *traceback.format_exception(exc)]
    seen: BaseException | None = exc
    while seen is not None:
        texts += [str(seen), repr(seen), repr(seen.args)]
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)


each_limiter = pytest.mark.parametrize(
    "limiter_class", [Limiter, AsyncLimiter], ids=["blocking", "asyncio"]
)
