"""SIGTERM at random moments: all calls that had returned are counted in the store.

Each process writes to a file, one number for each thread, how many of its calls have returned. The
flush intervals are long, so that only the shutdown flushes.
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
from typing import Any

import pytest
import redis

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from distwindow.connect import store_name
from tests.servers import Proxy, Silent, until

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
warm = mode == "eventual"  # the first flush fetches the server's time; after this it is known
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
    """A process that calls without a break."""

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
        """Send SIGTERM. Return the seconds until it has ended, and its stderr."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, complaints = self.process.communicate(timeout=20)
        assert self.process.returncode == -signal.SIGTERM, complaints
        return time.monotonic() - began, complaints


def known(url: str, prefix: str, mode: str, keys: int = KEYS) -> int:
    """Return how many calls are counted in the store."""

    async def ask() -> int:
        async with AsyncLimiter(url, LIMITS[mode], prefix=prefix, timeout=10) as limiter:
            seen = await asyncio.gather(*(limiter.stats(f"k{n}") for n in range(keys)))
        return sum(stats.passed + stats.blocked for stats in seen)

    return asyncio.run(ask())


def check_no_count_is_lost(
    url: str, prefix: str, path: Path, kind: str, mode: str, threads: int, runs: int
) -> None:
    """Check that no count is lost whatever SIGTERM interrupts, and that the shutdown takes no
    needless time.
    """
    moments, shortest = random.Random(f"{kind}-{mode}-{threads}"), 20.0
    for run in range(runs):
        name = f"{prefix}-{run}"
        # In every other run SIGTERM may come while the worker flushes.
        interval = 0.02 if run % 2 else 60
        calling = Calling(url, name, path / name, kind, mode, threads, interval)
        # In `direct` two calls of each key reach the store before its refusals are cached.
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda one=calling: one.returned() > 3 * KEYS, timeout=30)  # type: ignore[misc]
        time.sleep(moments.uniform(0, 0.2))  # SIGTERM comes at a random moment
        seconds, complaints = calling.end()
        assert complaints == ""
        shortest = min(shortest, seconds)  # a busy machine may delay one of them
        counted, returned = known(url, name, mode), calling.returned()
        assert returned <= counted, (
            f"run {run}: {returned - counted} of {returned} counts were lost"
        )
        assert counted <= returned + threads
    assert shortest < 3, "the exit timeout was used up"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eventual", "direct"])
@pytest.mark.parametrize(("kind", "threads"), [("sync", 1), ("sync", 4), ("async", 1)])
def test_nothing_is_lost_amid_calls(
    redis_url: str, prefix: str, kind: str, threads: int, mode: str, tmp_path: Path
) -> None:
    runs = int(os.environ.get("SIGTERM_RUNS", "2"))
    check_no_count_is_lost(redis_url, prefix, tmp_path, kind, mode, threads, runs)


# -- single cases of the handler ------------------------------------------------------------------

IDLE = """
import hashlib, os, signal, sys, time
PATCH
from distwindow import AsyncLimiter, Limiter
from distwindow.worker.shutdown import SHUTDOWN
url, prefix = sys.argv[1:]
options = dict(prefix=prefix, consistency="eventual", timeout=1)
options |= dict(flush_interval=60, sync_interval=60)
limiter = Limiter(url, "1000000000/hour", **options)
for _ in range(7):
    limiter.try_acquire("k0")
print("ready", flush=True)
"""


class Idle:
    """A process that has counted 7 calls, and then runs `program`."""

    def __init__(
        self, url: str, prefix: str, program: str, patch: str = "", wrap: tuple[str, ...] = ()
    ) -> None:
        source = IDLE.replace("PATCH", patch) + program
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-c", source, url, prefix],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Idle:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ended(self) -> tuple[int, str, str]:
        """Return its exit code, and what it has printed to stdout and to stderr since."""
        # Not `communicate`: it would lose what was read ahead together with the line "ready".
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        output, complaints = self.process.stdout.read(), self.process.stderr.read()
        return self.process.wait(20), output, complaints


def counted_in_store(url: str, prefix: str) -> int:
    with Limiter(url, "1000000000/hour", prefix=prefix, timeout=5) as limiter:
        return limiter.stats("k0").passed


@pytest.mark.slow
def test_a_main_thread_that_stays_in_c_code(redis_url: str, prefix: str) -> None:
    """It cannot run the handler that ends the process."""
    program = "while not SHUTDOWN.phase: time.sleep(0.001)\n"
    program += "hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000_000)\n"
    with Idle(redis_url, prefix, program) as idle:
        began = time.monotonic()
        idle.process.terminate()
        code, _, complaints = idle.ended()
    assert (code, complaints) == (-signal.SIGTERM, "")
    assert time.monotonic() - began < 15  # the C code takes a minute or so
    assert counted_in_store(redis_url, prefix) == 7


@pytest.mark.slow
def test_more_signals_neither_hasten_nor_delay_it(redis_url: str, prefix: str) -> None:
    """Counts that could not be sent in time are logged."""
    port = int(redis_url.rpartition(":")[2].split("/")[0])
    with Proxy(port) as proxy, Idle(proxy.url, prefix, "time.sleep(60)") as idle:
        proxy.fault = Silent()
        began = time.monotonic()
        for _ in range(5):
            idle.process.terminate()
            time.sleep(0.2)  # signals at intervals, over one second
        code, _, complaints = idle.ended()
    assert 2.5 < time.monotonic() - began < 10  # not three seconds for each signal
    assert code == -signal.SIGTERM
    failed, lost = complaints.splitlines()
    limiter = f"limiter '{prefix}' at {proxy.url}"
    assert failed.startswith(f"flushing the counts of {limiter} failed: ")
    assert lost.startswith(
        f"7 counts of {limiter} were lost: the process was ended before they could be sent ("
    )


@pytest.mark.slow
def test_process_1_of_a_container_keeps_running(redis_url: str, prefix: str) -> None:
    """The kernel does not end it: everything is flushed, and calls are decided as before."""
    wrap = ("unshare", "-Upfr", "--kill-child")
    try:
        subprocess.run([*wrap, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no rights to make a namespace of processes")
    program = """
assert os.getpid() == 1
for _ in range(2):
    os.kill(1, signal.SIGTERM)
    ends = time.monotonic() + 10
    while SHUTDOWN.phase and time.monotonic() < ends:
        limiter.try_acquire("k1")
    assert not SHUTDOWN.phase
    shortest = 1.0
    for _ in range(20):  # a busy machine may delay some of them
        began = time.monotonic()
        for _ in range(100):
            limiter.try_acquire("k0")
        shortest = min(shortest, time.monotonic() - began)
    assert shortest < 0.015, "still slow"
print("goes on", flush=True)
"""
    with Idle(redis_url, prefix, program, wrap=wrap) as idle:
        code, output, complaints = idle.ended()
    assert (code, output, complaints) == (0, "goes on\n", "")
    assert counted_in_store(redis_url, prefix) == 7 + 2 * 20 * 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["time.sleep(60)", "while True: limiter.try_acquire('k1')"],
    ids=["a greenlet that waits", "a greenlet that never yields"],
)
def test_counts_are_flushed_at_sigterm_under_gevent(
    redis_url: str, prefix: str, program: str
) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed")
    patch = "from gevent import monkey; monkey.patch_all()"
    with Idle(redis_url, prefix, program, patch) as idle:
        time.sleep(0.1)  # by then the greenlet runs `program`
        idle.process.terminate()
        code, _, complaints = idle.ended()
    assert (code, complaints) == (-signal.SIGTERM, "")
    assert counted_in_store(redis_url, prefix) == 7


@pytest.mark.slow
def test_a_limiter_that_leaves_sigterm_alone(redis_url: str, prefix: str) -> None:
    program = """
import subprocess
left = "from distwindow import *; import signal; {}(%r, '1/s', handle_sigterm=False); " % url
left += "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
for name in ("Limiter", "AsyncLimiter"):
    print(subprocess.check_output([sys.executable, "-c", left.format(name)], text=True), end="")
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    with Idle(redis_url, prefix, program) as idle:
        code, output, complaints = idle.ended()
    assert (code, complaints) == (0, "")
    assert output == "True\nTrue\nFalse\n"


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_the_switch_is_a_bool(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="handle_sigterm='no' is neither True nor False"):
        kind("memory://", "1/s", handle_sigterm="no")


def test_log_lines_name_the_store_without_its_password() -> None:
    assert store_name("redis://me:secret@host:6380/1") == "redis://me:***@host:6380/1"
    assert store_name(redis.Redis("host", password="secret")) == "Redis client of host:6379"
