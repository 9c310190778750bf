"""SIGTERM: nothing is installed unasked, and `exit_on_sigterm` loses no count.

With application servers it is `test_app_servers.py`; at random moments, `process_exits` of the
attacks.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distwindow import Limiter
from tests.servers import until

ROOT = Path(__file__).parents[2]
LIMIT = "1000000000/hour"
pytestmark = pytest.mark.slow

BEGIN = """
import os, signal, struct, sys, threading, time
PATCH
import distwindow
from distwindow import Limiter, exit_on_sigterm

url, prefix, mode, interval, *more = sys.argv[1:]
options = dict(prefix=prefix, consistency=mode, timeout=5)
options |= dict(flush_interval=float(interval), sync_interval=float(interval))

def count(times):
    for _ in range(times):
        limiter.try_acquire("k")
    print("counted", flush=True)
"""


@contextmanager
def running(
    program: str,
    url: str,
    prefix: str,
    mode: str = "eventual",
    interval: float = 3600,
    patch: str = "",
    more: tuple[str, ...] = (),
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN.replace("PATCH", patch) + program,
         url, prefix, mode, str(interval), *more],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_counted(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "counted\n"


def recorded(url: str, prefix: str) -> int:
    with Limiter(url, LIMIT, prefix=prefix, timeout=5) as limiter:
        stats = limiter.stats("k")
    return stats.passed + stats.blocked


def test_nothing_is_installed_unasked(redis_url: str, prefix: str) -> None:
    program = """
import asyncio
from distwindow import *

def used():
    Limiter(url, "9/hour", **options).try_acquire("k")
    breaker = CircuitBreaker(url, ErrorCount(5), prefix=prefix)
    with breaker.call("k"), Concurrency(url, 3, prefix=prefix).hold("k"):
        pass
    with Guard(url, [FlowRule("r", 10)], prefix=prefix) as guard, guard.entry("r"):
        pass

async def awaited():
    await AsyncLimiter(url, "9/hour", **options).try_acquire("k")
    async with AsyncConcurrency(url, 3, prefix=prefix).hold("k"):
        pass

before = [signal.getsignal(number) for number in signal.valid_signals()]
used()
asyncio.run(awaited())
assert [signal.getsignal(number) for number in signal.valid_signals()] == before
assert signal.set_wakeup_fd(-1) == -1
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""
    with running(program, redis_url, prefix) as process:
        _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("mode", ["direct", "eventual"])
def test_a_bare_script_loses_only_what_it_has_not_flushed(
    redis_url: str, prefix: str, mode: str, number: signal.Signals
) -> None:
    """It ends at once. `direct` counts cached refusals."""
    program = """
limiter = Limiter(url, "1/hour" if mode == "direct" else "1000000000/hour", **options)
count(100)
sys.stdin.readline()
count(7)
time.sleep(60)
"""
    with running(program, redis_url, prefix, mode, 0.25) as process:
        await_counted(process)
        until(lambda: recorded(redis_url, prefix) == 100, what="the flush after an interval")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        await_counted(process)
        process.send_signal(number)
        assert process.wait(30) == -number
    assert 100 <= recorded(redis_url, prefix) <= 107


THREADS = 3
AMID_CALLS = f"""
import mmap
exit_on_sigterm()
limiter = Limiter(url, "1/hour" if mode == "direct" else "1000000000/hour", **options)
file = open(more[0], "r+b")
returned = mmap.mmap(file.fileno(), 8 * {THREADS})

def call(thread):
    done = 0
    while True:
        limiter.try_acquire("k")
        done += 1
        struct.pack_into("q", returned, 8 * thread, done)

for number in range(1, {THREADS}):
    threading.Thread(target=call, args=(number,), daemon=True).start()
call(0)
"""


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_exit_on_sigterm_loses_nothing_amid_calls(
    redis_url: str, prefix: str, mode: str, tmp_path: Path
) -> None:
    """It interrupts the main thread at any line, also while it holds a lock, and daemon threads go
    on meanwhile.
    """
    file = tmp_path / "returned"
    file.write_bytes(bytes(8 * THREADS))

    def returned() -> list[int]:
        return list(struct.unpack(f"{THREADS}q", file.read_bytes()))

    with running(AMID_CALLS, redis_url, prefix, mode, more=(str(file),)) as process:
        until(lambda: min(returned()) > 300)
        process.terminate()
        _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (128 + signal.SIGTERM, "")
    counted = recorded(redis_url, prefix)
    assert sum(returned()) <= counted
    # A lease that was in flight is lost: its permits count as used until their window ends.
    assert counted <= sum(returned()) + THREADS or mode == "leased"


def test_gevent_has_a_handler_of_its_own(redis_url: str, prefix: str) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed")
    program = """
try:
    exit_on_sigterm()
except RuntimeError as exc:
    assert str(exc).endswith("write gevent.signal_handler(signal.SIGTERM, sys.exit, 143)")
    gevent.signal_handler(signal.SIGTERM, sys.exit, 143)
limiter = Limiter(url, "1000000000/hour", **options)
count(7)
time.sleep(60)
"""
    patch = "import gevent\nfrom gevent import monkey\nmonkey.patch_all()"
    with running(program, redis_url, prefix, patch=patch) as process:
        await_counted(process)
        process.terminate()
        _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (128 + signal.SIGTERM, "")
    assert recorded(redis_url, prefix) == 7


def test_a_forked_child_has_the_default_action_again(redis_url: str, prefix: str) -> None:
    """A pool ends its children by SIGTERM, which a handler in Python may miss while they wait."""
    program = """
exit_on_sigterm()
pid = os.fork()
if pid == 0:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        exit_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 143)
"""
    with running(program, redis_url, prefix) as process:
        _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, "")
