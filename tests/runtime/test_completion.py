"""Threads and tasks wait for a completion until it is complete."""

from __future__ import annotations

import asyncio
import threading

from distwindow import StoreTimeout
from distwindow.runtime.steps import Completion


def test_what_is_complete_is_not_waited_for() -> None:
    completion = Completion()
    completion.complete(StoreTimeout("late"))
    completion.wait(60)
    asyncio.run(completion.wait_async(60))
    assert isinstance(completion.failure, StoreTimeout)


def test_what_is_not_completed_is_waited_for_no_longer_than_the_timeout() -> None:
    completion = Completion()
    completion.wait(0.001)
    asyncio.run(completion.wait_async(0.001))
    assert completion.failure is None


def test_a_thread_wakes_tasks_and_threads() -> None:
    completion = Completion()
    passed: list[str] = []

    async def tasks() -> None:
        async def one() -> None:
            await completion.wait_async(60)
            passed.append("task")

        waiting = asyncio.gather(*(one() for _ in range(3)))
        await asyncio.sleep(0)
        threading.Thread(target=completion.complete).start()
        await waiting

    def wait() -> None:
        completion.wait(60)
        passed.append("thread")

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(tasks())
    thread.join(10)
    assert sorted(passed) == ["task"] * 3 + ["thread"]
