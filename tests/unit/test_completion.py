"""A gate lets everybody through once it is open, in threads and in tasks."""

from __future__ import annotations

import asyncio
import threading

from distwindow import StoreTimeout
from distwindow.operations.completion import Completion


def test_an_open_gate_is_not_waited_for() -> None:
    gate = Completion()
    gate.complete(StoreTimeout("late"))
    gate.wait(60)
    asyncio.run(gate.wait_async(60))
    assert isinstance(gate.failure, StoreTimeout)


def test_a_gate_that_stays_closed_is_waited_for_no_longer_than_said() -> None:
    gate = Completion()
    gate.wait(0.001)
    asyncio.run(gate.wait_async(0.001))
    assert gate.failure is None


def test_a_thread_lets_tasks_and_threads_through() -> None:
    gate = Completion()
    passed: list[str] = []

    async def tasks() -> None:
        async def one() -> None:
            await gate.wait_async(60)
            passed.append("task")

        waiting = asyncio.gather(*(one() for _ in range(3)))
        await asyncio.sleep(0)
        threading.Thread(target=gate.complete).start()
        await waiting

    def wait() -> None:
        gate.wait(60)
        passed.append("thread")

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(tasks())
    thread.join(10)
    assert sorted(passed) == ["task"] * 3 + ["thread"]
