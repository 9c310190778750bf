"""A gate lets everybody through once it is open, in threads and in tasks."""

from __future__ import annotations

import asyncio
import threading

from distwindow import StoreTimeout
from distwindow.operations.completion import Gate


def test_an_open_gate_is_not_waited_for() -> None:
    gate = Gate()
    gate.open(StoreTimeout("late"))
    gate.wait(60)
    asyncio.run(gate.await_(60))
    assert isinstance(gate.failure, StoreTimeout)


def test_a_gate_that_stays_closed_is_waited_for_no_longer_than_said() -> None:
    gate = Gate()
    gate.wait(0.001)
    asyncio.run(gate.await_(0.001))
    assert gate.failure is None


def test_a_thread_lets_tasks_and_threads_through() -> None:
    gate = Gate()
    passed: list[str] = []

    async def tasks() -> None:
        async def one() -> None:
            await gate.await_(60)
            passed.append("task")

        waiting = asyncio.gather(*(one() for _ in range(3)))
        await asyncio.sleep(0)
        threading.Thread(target=gate.open).start()
        await waiting

    def wait() -> None:
        gate.wait(60)
        passed.append("thread")

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(tasks())
    thread.join(10)
    assert sorted(passed) == ["task"] * 3 + ["thread"]
