"""What the clients of the scenarios on features have in common: threads, tasks, and interruptions.

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
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from tests.attack.children import dump_stacks_on_sigquit, read_plan, restart_watchdog
from tests.attack.interrupter import Interrupter

PAUSE_S = 0.004
CHECK_S = 0.02
FORKED_S = 0.7
HANG_S = 15.0


def now_ms() -> float:
    """Return CLOCK_MONOTONIC, which all processes of a machine share, in ms."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e6


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


class Op(ABC):
    """One operation: called once, by `run` or `run_async`, and then noted."""

    name = "op"
    expected: tuple[type[BaseException], ...] = ()
    """What it may raise."""

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    async def run_async(self) -> None: ...

    @abstractmethod
    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        """Log what it has done. `raised`: an exception of the library, one of `expected`, unless
        the operation was `interrupted` or cancelled.
        """

    def end(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        """Check the exception, and log."""
        if raised is not None and not interrupted and not isinstance(raised, self.expected):
            log.write(wrong=f"{self.name} raised {raised!r}"[:500])
        self.note(log, raised, interrupted)


class Work(ABC):
    """What a client works with: limiters, breakers, slots. `plan` is that of the client."""

    def __init__(self, plan: dict[str, Any], log: ClientLog) -> None:
        self.plan = plan
        self.log = log

    @abstractmethod
    def open(self) -> None:
        """Make what a sync client uses."""

    @abstractmethod
    async def open_async(self) -> None:
        """Make what an async client uses."""

    @abstractmethod
    def op(self, rng: random.Random) -> Op:
        """Return the next operation."""

    @abstractmethod
    def close(self) -> None:
        """Check what can be checked once nobody calls any more, flush all, and close."""

    @abstractmethod
    async def close_async(self) -> None: ...


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
        threading.Thread(target=self._log_pauses, daemon=True).start()
        threading.Thread(target=self._read_orders, daemon=True).start()
        if self.plan["kind"] == "async":
            asyncio.run(self._run_async())
        else:
            self._run_sync()
        self.log.write(closed=True)

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
        interrupter = Interrupter(self._rng("interruptions"))
        self.work.open()
        threads = [
            threading.Thread(target=self._call, args=(self._rng(number),), daemon=True)
            for number in range(self.plan["threads"] - 1)
        ]
        for thread in threads:
            thread.start()
        rng = self._rng("main")
        op = outcome = None
        while not self.stop.is_set():
            restart_watchdog(HANG_S)
            with suppress(queue.Empty):
                self._fork(self.forks.get_nowait())
            op = self.work.op(rng)
            outcome = interrupter.round(op.name, op.run, rng.choice([100e-6, 1e-3, 10e-3, 0.1]))
            if outcome.interrupted and "listeners.py" in interrupter.where:
                self.log.write(interrupted_listener=True)
            op.end(self.log, outcome.caught, outcome.interrupted)
            time.sleep(rng.random() * PAUSE_S)
        restart_watchdog(2 * HANG_S)
        for thread in threads:
            thread.join(10)
        self._log_interruptions(interrupter)
        # An exception refers to the frames of its operation, and these to a slot, say.
        del op, outcome
        interrupter.round("nothing", lambda: None, 10.0)
        gc.collect()
        self.work.close()

    def _call(self, rng: random.Random) -> None:
        while not self.stop.is_set():
            op = self.work.op(rng)
            raised: Exception | None = None
            try:
                op.run()
            except Exception as exc:
                raised = exc
            op.end(self.log, raised, False)
            time.sleep(rng.random() * PAUSE_S)

    def _log_interruptions(self, interrupter: Interrupter) -> None:
        self.log.write(interruptions=interrupter.figures["interruptions"])
        for fault in interrupter.history:
            self.log.write(wrong=json.dumps(fault))

    def _fork(self, name: str) -> None:
        """Fork a child that calls. Its name is logged before, so that one that ends at once is
        noticed.
        """
        self.log.write(fork=name)
        if os.fork() != 0:
            return
        try:
            self.log = self.work.log = ClientLog(self.plan["folder"], name)
            self.stop = threading.Event()
            threading.Timer(FORKED_S, self.stop.set).start()
            threading.Thread(target=self._log_pauses, daemon=True).start()
            self._call(self._rng("child"))
            self.work.close()
            self.log.write(closed=True)
        finally:
            os._exit(0)

    # -- async --

    async def _run_async(self) -> None:
        await self.work.open_async()
        tasks = [
            asyncio.create_task(self._await_calls(self._rng(number), cancels=number == 0))
            for number in range(self.plan["threads"] + 1)
        ]
        await asyncio.to_thread(self.stop.wait)
        await asyncio.gather(*tasks)
        await self.work.close_async()

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
            await asyncio.sleep(rng.random() * PAUSE_S)
