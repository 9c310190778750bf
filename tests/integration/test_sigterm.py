"""SIGTERM at random moments: the store knows of all calls that had returned.

Each process counts in a file, one number for each thread, how many of its calls have returned.
Where intervals are long, nothing is flushed by accident.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distwindow import AsyncLimiter
from tests.servers import until

ROOT = Path(__file__).parents[2]
KEYS = 2000
THREADS = 4
LIMITS = {"direct": "1/hour", "eventual": "1000000/hour", "leased": "1000000/hour"}

CALLING = f"""
import asyncio, itertools, mmap, struct, sys, threading
from distwindow import AsyncLimiter, Limiter

url, prefix, kind, mode, limit, path, threads, interval = sys.argv[1:]
options = dict(prefix=prefix, consistency=mode, timeout=1)
options |= dict(flush_interval=float(interval), sync_interval=float(interval))
file = open(path, "r+b")
returned = mmap.mmap(file.fileno(), 8 * {THREADS})
warm = mode == "eventual"  # the first flush asks for the server's time; here it is known
keys = [f"k{{n}}" for n in range({KEYS})]

def call(limiter, thread):
    for n in itertools.count(1):
        limiter.try_acquire(keys[n % {KEYS}])
        struct.pack_into("q", returned, 8 * thread, n)

async def acall(limiter, thread, counts):
    for n in itertools.count(1):
        await limiter.try_acquire(keys[n % {KEYS}])
        struct.pack_into("q", returned, 8 * thread, n)

async def main():
    limiter = AsyncLimiter(url, limit, **options)
    if warm:
        await limiter.try_acquire("warm")
        await limiter.flush()
    await asyncio.gather(*(acall(limiter, n, returned) for n in range(int(threads))))

if kind == "async":
    asyncio.run(main())
else:
    limiter = Limiter(url, limit, **options)
    if warm:
        limiter.try_acquire("warm")
        limiter.flush()
    for n in range(1, int(threads)):
        threading.Thread(target=call, args=(limiter, n), daemon=True).start()
    call(limiter, 0)
"""


class Calling:
    """A process that calls without end."""

    def __init__(
        self,
        url: str,
        prefix: str,
        file: Path,
        kind: str,
        mode: str,
        threads: int = 1,
        interval: float = 60,
    ) -> None:
        file.write_bytes(bytes(8 * THREADS))
        self._file = file
        args = [url, prefix, kind, mode, LIMITS[mode], str(file), str(threads), str(interval)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLING, *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def returned(self) -> int:
        return sum(struct.unpack(f"{THREADS}q", self._file.read_bytes()))

    def end(self) -> tuple[float, str]:
        """Seconds that it took to end, and what it said on stderr."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, complaints = self.process.communicate(timeout=20)
        assert self.process.returncode == -signal.SIGTERM, complaints
        return time.monotonic() - began, complaints


def known(url: str, prefix: str, mode: str, keys: int = KEYS) -> int:
    """How many calls the store knows of."""

    async def ask() -> int:
        async with AsyncLimiter(url, LIMITS[mode], prefix=prefix, timeout=10) as limiter:
            seen = await asyncio.gather(*(limiter.stats(f"k{n}") for n in range(keys)))
        return sum(stats.passed + stats.blocked for stats in seen)

    return asyncio.run(ask())


def storm(url: str, prefix: str, path: Path, kind: str, mode: str, threads: int, runs: int) -> None:
    """Nothing is lost, and no end is stalled, whatever SIGTERM interrupts."""
    moments = random.Random(f"{kind}-{mode}-{threads}")
    for run in range(runs):
        name = f"{prefix}-{run}"
        # Every other time SIGTERM may come while the worker is at work.
        interval = 0.02 if run % 2 else 60
        calling = Calling(url, name, path / name, kind, mode, threads, interval)
        # In `direct` each key is asked about twice before its refusals are decided here.
        until(lambda one=calling: one.returned() > 3 * KEYS, timeout=30)  # type: ignore[misc]
        time.sleep(moments.uniform(0, 0.2))
        seconds, complaints = calling.end()
        assert complaints == ""
        assert seconds < 3, "the exit timeout was used up"
        told, returned = known(url, name, mode), calling.returned()
        assert returned <= told, f"run {run}: {returned - told} of {returned} counts were lost"
        assert told <= returned + threads


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eventual", "direct"])
@pytest.mark.parametrize(("kind", "threads"), [("sync", 1), ("sync", 4), ("async", 1)])
def test_nothing_is_lost_amid_calls(
    redis_url: str, prefix: str, kind: str, threads: int, mode: str, tmp_path: Path
) -> None:
    runs = int(os.environ.get("SIGTERM_RUNS", "3"))
    storm(redis_url, prefix, tmp_path, kind, mode, threads, runs)
