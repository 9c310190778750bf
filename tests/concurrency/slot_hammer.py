"""Processes that hold slots of one key without a break, and the check of their logs.

Each process appends one line per slot to a log of its own, stamped with CLOCK_BOOTTIME, which all
processes of a machine share: when the slot was granted, until when it was surely the process's own,
and when its block ended. A line is written before the block as well, because the process may be
killed in it. The slot of a process that was killed counts as held until the kill.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from distwindow import AsyncConcurrency, Concurrency, ConcurrencyExceeded, StoreError

ROOT = Path(__file__).parents[2]


class Span(NamedTuple):
    """A time in which a slot was held, seconds."""

    began: float
    ended: float


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def most_at_once(spans: Iterable[Span]) -> int:
    """Return the greatest number of slots that were held at one moment."""
    # An end comes before a beginning at the same time.
    changes = sorted([(span.began, 1) for span in spans] + [(span.ended, -1) for span in spans])
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


class HammerProcess:
    """A process that holds slots, in threads and in tasks."""

    def __init__(self, url: str, prefix: str, limit: int, ttl: float, log: Path, seed: int) -> None:
        self._log = log
        self._killed_at = float("inf")
        arguments = [url, prefix, str(limit), str(ttl), str(log), str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.concurrency.slot_hammer", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        """Kill the process, with signal 9."""
        self._process.kill()
        self._process.wait(10)
        self._killed_at = now()

    def stop(self) -> None:
        """End it in an orderly way."""
        if self._killed_at == float("inf"):
            self._process.communicate("\n", timeout=60)
            assert self._process.returncode == 0
        elif self._process.stdin is not None:
            self._process.stdin.close()

    def spans(self) -> list[Span]:
        """Return when slots were held."""
        spans: dict[int, Span] = {}
        for line in self._log.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a process that was killed
                number, began, ended = json.loads(line)
                spans[number] = Span(began, min(ended, self._killed_at))
        return list(spans.values())


class _Log:
    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 - open until the end
        self._numbers = iter(range(10**9))
        self._lock = threading.Lock()

    def begin(self) -> tuple[int, float]:
        """Write that a slot is held from now on, until the process is killed or `end` is called."""
        with self._lock:
            number, began = next(self._numbers), now()
            self._file.write(json.dumps([number, began, 1e12]) + "\n")
        return number, began

    def end(self, number: int, began: float, ended: float) -> None:
        with self._lock:
            self._file.write(json.dumps([number, began, ended]) + "\n")


def _held_until(slot: Any) -> float:
    """Return when the block ended, or when its slot was surely its own for the last time."""
    return min(now(), float(slot._claim.expires_at))


def _run(url: str, prefix: str, limit: int, ttl: float, path: str, seed: int) -> None:
    log, stop = _Log(path), threading.Event()
    options: Any = {"prefix": prefix, "ttl": ttl, "timeout": ttl / 4}

    def thread(slots: Concurrency, chance: random.Random) -> None:
        while not stop.is_set():
            with suppress(ConcurrencyExceeded, StoreError):
                with slots.hold("k", timeout=chance.choice((0, 0.1, 0.5))) as slot:
                    number, began = log.begin()
                    time.sleep(chance.random() / 100)
                    log.end(number, began, _held_until(slot))

    async def task(slots: AsyncConcurrency, chance: random.Random) -> None:
        while not stop.is_set():
            with suppress(ConcurrencyExceeded, StoreError, asyncio.TimeoutError):
                async with slots.hold("k", timeout=chance.choice((0, 0.1, 0.5))) as slot:
                    number, began = log.begin()
                    try:
                        # Some are cancelled in the block.
                        await asyncio.wait_for(asyncio.sleep(chance.random() / 100), 0.008)
                    finally:
                        log.end(number, began, _held_until(slot))

    async def cancelled(slots: AsyncConcurrency, chance: random.Random) -> None:
        """Cancel calls at any time."""
        while not stop.is_set():
            call = asyncio.create_task(_use(slots))
            await asyncio.sleep(chance.random() / 200)
            call.cancel()
            await asyncio.wait([call])
            with suppress(StoreError, asyncio.CancelledError):
                call.result()

    async def _use(slots: AsyncConcurrency) -> None:
        async with slots.hold("k") as slot:
            number, began = log.begin()
            log.end(number, began, _held_until(slot))

    async def tasks() -> None:
        async with AsyncConcurrency(url, limit, **options) as slots:
            await asyncio.gather(
                *(task(slots, random.Random(f"{seed} task {i}")) for i in range(3)),
                cancelled(slots, random.Random(f"{seed} cancelled")),
            )

    def await_stop() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=await_stop, daemon=True).start()
    with Concurrency(url, limit, **options) as slots:
        threads = [
            threading.Thread(target=thread, args=[slots, random.Random(f"{seed} thread {i}")])
            for i in range(3)
        ]
        for one in threads:
            one.start()
        asyncio.run(tasks())
        for one in threads:
            one.join()


if __name__ == "__main__":
    given_url, given_prefix, given_limit, given_ttl, given_log, given_seed = sys.argv[1:]
    _run(given_url, given_prefix, int(given_limit), float(given_ttl), given_log, int(given_seed))
