"""An `AsyncLimiter` at the top of a module that is never closed: `python -W error -X dev` prints no
warning, whatever is pending when the loop ends.
"""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Limiter
from tests.programs import run_python

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, sys
from distwindow import AsyncLimiter

url, prefix, mode, flush_interval, runs = sys.argv[1:]
limiter = AsyncLimiter(
    url, "100/hour", prefix=prefix, consistency=mode, timeout=5,
    flush_interval=float(flush_interval), sync_interval=float(flush_interval),
)

async def main():
    for name in "abc":
        async with limiter.entry(name):
            pass
    await limiter.refund(await limiter.try_acquire("d"))
    if float(flush_interval) < 1:
        await limiter.flush()

for _ in range(int(runs)):
    asyncio.run(main())
"""
PENDING, SENT = "60", "0.01"


def output_of(url: str, prefix: str, mode: str, flush_interval: str, runs: int) -> str:
    """Return what the program prints."""
    flags = ("-W", "error", "-X", "dev", "-c", PROGRAM)
    done = run_python(*flags, url, prefix, mode, flush_interval, runs)
    assert done.returncode == 0, done.stderr
    # The debug mode of asyncio reports slow steps, which occur on a slow machine.
    return "".join(line for line in done.stderr.splitlines(True) if "Executing <" not in line)


def ends_of(url: str, prefix: str) -> int:
    """Return how many ends of entries the server has counted."""
    with Limiter(url, "100/hour", prefix=prefix, timeout=5) as other:
        return sum(other.stats(name).success for name in "abc")


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("flush_interval", [PENDING, SENT], ids=["pending", "sent"])
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_no_warning_on_a_server(
    redis_url: str, prefix: str, mode: str, flush_interval: str, runs: int
) -> None:
    assert output_of(redis_url, prefix, mode, flush_interval, runs) == ""
    assert ends_of(redis_url, prefix) == 3 * runs


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_no_warning_in_memory(prefix: str, mode: str) -> None:
    assert output_of("memory://", prefix, mode, PENDING, 2) == ""


@pytest.mark.parametrize("server", ["cluster", "sentinel"])
@pytest.mark.parametrize("mode", ["direct", "eventual"])
def test_where_the_client_has_connections_of_its_own(
    request: pytest.FixtureRequest, server: str, prefix: str, mode: str
) -> None:
    """redis-py queries sentinels, and reads the map of a cluster, over connections that it keeps
    open.
    """
    url: Any = request.getfixturevalue(f"{server}_url")
    assert output_of(url, prefix, mode, PENDING, 2) == ""
    assert ends_of(url, prefix) == 6
