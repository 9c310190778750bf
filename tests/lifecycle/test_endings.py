"""Endings amid calls: a cancelled `aclose`, and threads that call while Python exits."""

from __future__ import annotations

import asyncio

import pytest

from distwindow import AsyncLimiter
from tests.harness import admin, used
from tests.programs import ROOT, run_python
from tests.servers import Proxy
from tests.servers.faults import Delay

pytestmark = pytest.mark.slow

PLENTY = "100000000/day"
SCRIPT = b"EVALSHA"


async def with_pending_counts(url: str, prefix: str) -> AsyncLimiter:
    """Return a limiter with 3,000 calls on 300 keys, of which 1,000 are pending."""
    limiter = AsyncLimiter(
        url, PLENTY, prefix=prefix, consistency="eventual", sync_interval=600, timeout=10
    )
    for number in range(3000):
        await limiter.try_acquire(f"k{number % 300}")
        if number == 1999:
            await limiter.flush()
    return limiter


def total(url: str, prefix: str) -> int:
    with admin(url) as server:
        return used(server, prefix)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15])
async def test_a_cancelled_aclose_sends_every_count(
    proxy: Proxy, prefix: str, delay: float
) -> None:
    limiter = await with_pending_counts(proxy.url, prefix)
    with proxy.inject(Delay(only=SCRIPT, replies=0.1)):
        closing = asyncio.ensure_future(limiter.aclose())
        await asyncio.sleep(delay)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert total(proxy.url, prefix) == 3000


CANCELLED_AT_THE_END = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from tests.lifecycle.test_endings import with_pending_counts

async def main():
    limiter = await with_pending_counts(sys.argv[1], sys.argv[2])
    async with limiter:
        # asyncio.run cancels all tasks: this one, and the one that closes.
        asyncio.get_running_loop().call_later(0, asyncio.get_running_loop().stop)

try:
    asyncio.run(main())
except RuntimeError as exc:
    assert "Event loop stopped" in str(exc), exc
"""

DAEMON_THREADS = """
import atexit, os, sys, threading, time
counts = [0] * 3
# Registered first, so that it runs last.
atexit.register(lambda: (print(sum(counts), flush=True)))
from distwindow import Limiter
limiter = Limiter(sys.argv[1], "100000000/day", prefix=sys.argv[2], consistency="eventual",
                  sync_interval=0.2, timeout=10)

def call(number):
    at = 0
    while True:
        limiter.try_acquire(f"k{at % 300}")
        counts[number] += 1
        at += 1

for number in range(3):
    threading.Thread(target=call, args=(number,), daemon=True).start()
time.sleep(0.5)  # the threads call until the program ends
"""


def run(program: str, *arguments: str) -> tuple[str, str]:
    done = run_python("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_loop_that_is_stopped_amid_aclose_sends_every_count(redis_url: str, prefix: str) -> None:
    _, stderr = run(CANCELLED_AT_THE_END, redis_url, prefix, str(ROOT))
    assert "lost" not in stderr
    assert total(redis_url, prefix) == 3000


def test_daemon_threads_that_call_while_python_exits_lose_no_count(
    redis_url: str, prefix: str
) -> None:
    stdout, stderr = run(DAEMON_THREADS, redis_url, prefix)
    assert stderr == ""
    # A call may have been counted and its thread paused before it could add one.
    assert 0 <= total(redis_url, prefix) - int(stdout) <= 3


def test_main_thread_calls_in_exit_functions_are_decided(redis_url: str, prefix: str) -> None:
    """They run after the flush at exit, and must not wait for it."""
    program = """
import atexit, sys
from distwindow import Limiter
atexit.register(lambda: print(bool(limiter.try_acquire("k0")), flush=True))
limiter = Limiter(sys.argv[1], "100000000/day", prefix=sys.argv[2], consistency="eventual")
limiter.try_acquire("k0")
"""
    stdout, _ = run(program, redis_url, prefix)
    assert stdout == "True\n"


@pytest.mark.event_loops
def test_closing_a_limiter_in_a_loop_twice_at_once(redis_url: str, prefix: str) -> None:
    async def main() -> None:
        limiter = await with_pending_counts(redis_url, prefix)
        await asyncio.gather(limiter.aclose(), limiter.aclose())

    asyncio.run(main())
    assert total(redis_url, prefix) == 3000
