"""One process of a fleet: threads or tasks that call, and write what came of it into a log.

A scenario gives a `Work`, which makes operations. A client of the kind "sync" calls them in
threads, and in its main thread with exceptions of a signal handler at random moments. One of the
kind "async" calls them in tasks, of which some are cancelled at random moments. In between a sync
client may fork; the child calls for a moment.

An operation remembers what it has done by assignments, as a signal handler may raise anywhere in
it, and writes that into the log when it has ended.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psutil

from distwindow import ConfigurationError, StoreError
from tests.attack.children import dump_stacks_on_sigquit, now_ms, read_plan, restart_watchdog
from tests.attack.interrupter import Interrupter

T = TypeVar("T")


class ServiceError(Exception):
    """The service that an operation calls has failed."""


CHECK_S = 0.02
FORKED_S = 0.7
HANG_S = 15.0


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing, as those of sync clients."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("a coroutine of a sync client waits for an event loop")


async def result_of(call: Any) -> Any:
    """Return what a call of an async limiter, or of a blocking one, returns."""
    return await call if inspect.isawaitable(call) else call


class ClientLog:
    """A file of JSON lines. Each is written by one system call, so the file of a killed process
    holds all that it has finished.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.numbers = itertools.count()
        # Plain `os` calls, as each line is written by one.
        self._file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: PTH118

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")

    def count(self, sure: Iterable[str] = (), unsure: Iterable[str] = ()) -> None:
        """Log what the store has counted for certain, and what it may have counted besides."""
        self.write(sure=dict.fromkeys(sure, 1), unsure=dict.fromkeys(unsure, 1))


class Op(ABC):
    """One operation: called once, by `run` or `run_async`, and then noted."""

    name = "op"
    expected: tuple[type[BaseException], ...] = ()
    """What it may raise."""

    def run(self) -> None:
        complete(self.run_async())

    @abstractmethod
    async def run_async(self) -> None: ...

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:  # noqa: B027
        """Log what it has done and not logged yet. `raised`: an exception of the library, one of
        `expected`, unless the operation was `interrupted` or cancelled.
        """

    def end(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        """Check the exception, and log."""
        if raised is not None and not interrupted and not isinstance(raised, self.expected):
            log.write(wrong=f"{self.name} raised {raised!r}"[:500])
        self.note(log, raised, interrupted)


class Work(ABC):
    """What a client works with: limiters, breakers, slots. `plan` is that of the client.

    What both kinds of clients do is written once, as a coroutine, which waits in an async client.
    """

    interrupts = True
    """Whether some calls are interrupted or cancelled. Without, the client compares its threads and
    files of before and afterwards.
    """

    def __init__(self, plan: dict[str, Any], log: ClientLog) -> None:
        self.plan = plan
        self.log = log
        self.is_async = plan["kind"] == "async"
        self.pause_s = plan.get("pause_s", 0.004)
        """The longest time between two calls of a thread or a task."""

    @abstractmethod
    def open(self) -> None:
        """Make what the client uses, on its event loop if it has one."""

    @abstractmethod
    def op(self, rng: random.Random) -> Op:
        """Return the next operation."""

    @abstractmethod
    async def close(self) -> None:
        """Check what can be checked once nobody calls any more, flush all, and close."""

    def make(
        self, blocking: Callable[..., Any], awaited: Callable[..., Any], **options: Any
    ) -> Any:
        """Return the limiter, or the like, of this kind of client, at the URL of the plan."""
        return (awaited if self.is_async else blocking)(self.plan["url"], **options)

    @property
    def is_forked(self) -> bool:
        return bool(self.log.name != self.plan["name"])

    async def pause(self, seconds: float = 0.02) -> None:
        """Wait between two polls."""
        if self.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251 - a sync client has no event loop

    async def poll(
        self, is_done: Callable[[], Awaitable[bool]], seconds: float, wrong: str
    ) -> None:
        """Wait until `is_done`; after so many seconds log what is wrong."""
        until = time.monotonic() + seconds
        while not await is_done():
            if time.monotonic() > until:
                self.log.write(wrong=wrong)
                return
            await self.pause()

    @asynccontextmanager
    async def entered(self, block: Any) -> AsyncIterator[Any]:
        """Enter a block of either kind."""
        if self.is_async:
            async with block as found:
                yield found
        else:
            with block as found:
                yield found

    async def flush(self, limiter: Any) -> None:
        """Flush, in several attempts: the faults have ended."""
        for _ in range(20):
            try:
                await result_of(limiter.flush())
                return
            except (StoreError, ConfigurationError) as exc:
                self.log.write(flush=repr(exc))
                await self.pause(0.2)

    async def end(self, limiter: Any) -> None:
        """Close it."""
        await result_of(limiter.aclose() if self.is_async else limiter.close())


class Client:
    """One client: its log, its work, and the orders from its stdin."""

    def __init__(self, work: type[Work]) -> None:
        self.plan = read_plan()
        self.log = ClientLog(self.plan["folder"], self.plan["name"])
        self.work = work(self.plan, self.log)
        self.stop = threading.Event()
        self.forks: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> None:
        dump_stacks_on_sigquit()
        before = _resources()
        threading.Thread(target=self._log_pauses, daemon=True).start()
        threading.Thread(target=self._read_orders, daemon=True).start()
        if self.work.is_async:
            asyncio.run(self._run_async())
        else:
            self._run_sync()
        self.log.write(closed=True, resources={} if self.work.interrupts else _compared(before))

    def _rng(self, name: object) -> random.Random:
        return random.Random(f"{self.plan['seed']} {self.log.name} {name}")

    def _read_orders(self) -> None:
        for number, order in enumerate(sys.stdin):
            if order != "fork\n":
                break
            self.forks.put(f"{self.plan['name']}f{number}")
        self.stop.set()

    def _log_pauses(self) -> None:
        """Log when this process could not run, because it was stopped or the machine was busy."""
        log = self.log
        while not self.stop.is_set():
            before = now_ms()
            time.sleep(CHECK_S)
            lost = now_ms() - before - CHECK_S * 1000
            if lost > 20:
                log.write(pause=before, lost=lost)

    # -- sync --

    def _run_sync(self) -> None:
        self.work.open()
        threads = [
            threading.Thread(target=self._call, args=(self._rng(number),), daemon=True)
            for number in range(self.plan["threads"] - 1)
        ]
        for thread in threads:
            thread.start()
        if self.work.interrupts:
            self._call_interrupted(threads)
        else:
            self._call(self._rng("main"), forks=True)
        for thread in threads:
            thread.join(10)
        complete(self.work.close())

    def _call_interrupted(self, others: Iterable[threading.Thread]) -> None:
        """Call until the end, with exceptions of a signal handler, and log how many there were."""
        interrupter, rng = Interrupter(self._rng("interruptions")), self._rng("main")
        op = outcome = None
        while not self.stop.is_set():
            restart_watchdog(HANG_S)
            self._fork_if_ordered()
            op = self.work.op(rng)
            outcome = interrupter.round(op.name, op.run, rng.choice([100e-6, 1e-3, 10e-3, 0.1]))
            if outcome.interrupted and "listeners.py" in interrupter.where:
                self.log.write(interrupted_listener=True)
            op.end(self.log, outcome.caught, outcome.interrupted)
            time.sleep(rng.random() * self.work.pause_s)
        restart_watchdog(2 * HANG_S)
        for thread in others:
            thread.join(10)
        self.log.write(interruptions=interrupter.figures["interruptions"])
        for fault in interrupter.history:
            self.log.write(wrong=json.dumps(fault))
        # An exception refers to the frames of its operation, and these to a slot, say.
        del op, outcome
        interrupter.round("nothing", lambda: None, 10.0)
        gc.collect()

    def _call(self, rng: random.Random, *, forks: bool = False) -> None:
        while not self.stop.is_set():
            if forks:
                self._fork_if_ordered()
            op = self.work.op(rng)
            raised: Exception | None = None
            try:
                op.run()
            except Exception as exc:
                raised = exc
            op.end(self.log, raised, False)
            time.sleep(rng.random() * self.work.pause_s)

    def _fork_if_ordered(self) -> None:
        """Fork a child that calls. Its name is logged before, so that one that ends at once is
        noticed.
        """
        try:
            name = self.forks.get_nowait()
        except queue.Empty:
            return
        self.log.write(fork=name)
        if os.fork() != 0:
            return
        try:
            self.log = self.work.log = ClientLog(self.plan["folder"], name)
            self.stop = threading.Event()
            threading.Timer(FORKED_S, self.stop.set).start()
            threading.Thread(target=self._log_pauses, daemon=True).start()
            self._call(self._rng("child"))
            complete(self.work.close())
            self.log.write(closed=True)
        finally:
            os._exit(0)

    # -- async --

    async def _run_async(self) -> None:
        self.work.open()
        cancelled = int(self.work.interrupts)
        tasks = [
            asyncio.create_task(self._await_calls(self._rng(number), cancels=number < cancelled))
            for number in range(self.plan["threads"] + cancelled)
        ]
        await asyncio.to_thread(self.stop.wait)
        await asyncio.gather(*tasks)
        await self.work.close()

    async def _await_calls(self, rng: random.Random, *, cancels: bool) -> None:
        while not self.stop.is_set():
            op = self.work.op(rng)
            task = asyncio.create_task(op.run_async())
            if cancels:
                await asyncio.wait([task], timeout=rng.choice([0, 1e-3, 5e-3, 0.1]) * rng.random())
                task.cancel()
            await asyncio.wait([task])
            raised = asyncio.CancelledError() if task.cancelled() else task.exception()
            op.end(self.log, raised, task.cancelled())
            await asyncio.sleep(rng.random() * self.work.pause_s)


def _resources() -> dict[str, int]:
    """Return how many threads and open files this process has."""
    process = psutil.Process()
    return {"threads": process.num_threads(), "files": process.num_fds()}


def _compared(before: dict[str, int]) -> dict[str, list[int]]:
    """Return how many threads and files there were, are left, and may be more: they may take a
    moment to end.
    """
    # The worker of all limiters is one thread, which stays.
    allowed = {"threads": 1, "files": 2}
    until = time.monotonic() + 5
    while True:
        after = _resources()
        is_flat = all(after[name] <= before[name] + allowed[name] for name in before)
        if is_flat or time.monotonic() > until:
            return {name: [before[name], after[name], allowed[name]] for name in before}
        time.sleep(0.05)  # before the next look
