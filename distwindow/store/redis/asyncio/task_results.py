"""The results of tasks that may go on although they were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def result_within(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of `coroutine`, or cancel it and raise `asyncio.TimeoutError`.

    If this is cancelled, it ends at once. `asyncio.wait_for` would wait for `coroutine`, and
    redis-py may drop a cancellation and go on.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of `task` as retrieved: asyncio logs an error for one that is not."""
    if not task.cancelled():
        task.exception()
