"""A child process ends when its threads have ended, and what these have counted is not lost."""

from __future__ import annotations

import re

import pytest

from distwindow import Limiter
from tests.lifecycle.joined_thread_child import LIMIT
from tests.programs import run_python
from tests.servers import Standalone

pytestmark = pytest.mark.slow


def ended(url: str, prefix: str, package: str, method: str, mode: str, way: str) -> str:
    """Run the program. Return what it has printed."""
    flags = ("-W", "ignore:.*fork.*:DeprecationWarning", "-m")
    words = ("tests.lifecycle.joined_thread_child", url, prefix, package, method, mode, way)
    program = run_python(*flags, *words)
    assert program.returncode == 0, program.stdout + program.stderr
    return program.stdout + program.stderr


@pytest.mark.parametrize(
    ("package", "method", "mode", "way"),
    [
        ("multiprocessing", "fork", "direct", "calls"),
        ("multiprocessing", "fork", "leased", "calls"),
        ("multiprocessing", "fork", "eventual", "acquire"),
        ("multiprocessing", "fork", "direct", "entries"),
        ("multiprocessing", "fork", "direct", "tasks"),
        ("multiprocessing", "fork", "direct", "executor"),
        ("multiprocessing", "fork", "direct", "pool"),
        ("multiprocessing", "spawn", "direct", "calls"),
        ("multiprocessing", "spawn", "leased", "executor"),
        ("multiprocessing", "spawn", "direct", "acquire"),
        ("multiprocessing", "forkserver", "eventual", "calls"),
        ("billiard", "spawn", "direct", "calls"),
    ],
)
def test_what_its_threads_count_arrives(
    redis_url: str, prefix: str, package: str, method: str, mode: str, way: str
) -> None:
    """The threads call after the finalizers of the child have run, some in an executor."""
    assert ended(redis_url, prefix, package, method, mode, way) == ""
    with Limiter(redis_url, LIMIT, prefix=prefix) as limiter:
        stats = limiter.stats("k")
    assert (stats.passed, stats.blocked) == (20, 7)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_they_count_is_logged_if_it_is_lost(prefix: str, method: str) -> None:
    with Standalone() as server:
        printed = ended(server.url, prefix, "multiprocessing", method, "eventual", "lost")
    # The first of the 27 calls was sent before.
    assert re.search(r"^26 counts of limiter .* were lost: the process was ended", printed, re.M)
    assert "Traceback" not in printed


def test_a_forked_child_of_billiard_does_not_wait_for_them(redis_url: str, prefix: str) -> None:
    """It ends by `os._exit`, which ends its threads, so their calls are paused and not lost."""
    assert ended(redis_url, prefix, "billiard", "fork", "direct", "calls") == ""
    with Limiter(redis_url, LIMIT, prefix=prefix) as limiter:
        assert limiter.stats("k").passed == 1
