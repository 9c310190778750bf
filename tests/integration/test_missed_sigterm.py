"""A SIGTERM that interrupts nothing ends the process all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distwindow import Limiter

ROOT = Path(__file__).parents[2]

BEGIN = """
import os, signal, sys, threading, time
from distwindow import Limiter
from distwindow.worker.shutdown import SHUTDOWN

def counted():
    limiter = Limiter(sys.argv[1], "1000000/hour", prefix=sys.argv[2], consistency="eventual",
                      sync_interval=60, timeout=1)
    for _ in range(7):
        limiter.try_acquire("k")
    return limiter

def miss():
    # The handler in C runs in this thread: the main thread, in its lock, is not interrupted.
    time.sleep(0.1)  # by then the main thread waits for its lock, which nothing shows
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=miss, daemon=True).start()
    lock.acquire()
"""


def run(program: str, url: str, prefix: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program), url, prefix],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def passed(url: str, prefix: str) -> int:
    with Limiter(url, "1000000/hour", prefix=prefix, timeout=5) as limiter:
        return limiter.stats("k").passed


def test_a_signal_that_interrupts_nothing(redis_url: str, prefix: str) -> None:
    result = run("limiter = counted()\nwait_for_ever()\n", redis_url, prefix)
    assert result == (-signal.SIGTERM, "")
    assert passed(redis_url, prefix) == 7


@pytest.mark.slow
def test_in_a_forked_child(redis_url: str, prefix: str) -> None:
    """The child has a pipe of its own: its parent does not read the signals of the child."""
    program = """
    limiter = counted()
    limiter.flush()
    pid = os.fork()
    if pid == 0:
        for _ in range(5):
            limiter.try_acquire("k")
        wait_for_ever()
    status = os.waitpid(pid, 0)[1]
    time.sleep(0.2)  # the parent would end by then if it had read the signal of the child
    os._exit(0 if os.WTERMSIG(status) == signal.SIGTERM else 1)
    """
    code, complaints = run(program, redis_url, prefix)
    assert code == 0, complaints
    assert passed(redis_url, prefix) == 12


@pytest.mark.slow
def test_a_handled_signal_is_not_sent_again(redis_url: str, prefix: str) -> None:
    """The main thread handles it at once, and nothing comes after it."""
    program = """
    limiter = counted()
    handler, calls = SHUTDOWN.on_sigterm, []
    SHUTDOWN._start_shutdown = lambda number: calls.append(number)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # a second signal would have come by then: the grace period is 0.02 s
    os._exit(len(calls))
    """
    assert run(program, redis_url, prefix) == (1, "")


def test_a_wakeup_descriptor_of_the_application_is_left_alone(redis_url: str, prefix: str) -> None:
    program = """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    limiter = counted()
    assert signal.set_wakeup_fd(-1) == writing
    os._exit(0)
    """
    assert run(program, redis_url, prefix) == (0, "")


POOL = """
import multiprocessing, sys
from distwindow import Limiter

def work(arguments):
    url, prefix = arguments
    limiter = Limiter(url, "1000000/hour", prefix=prefix)
    return sum(limiter.try_acquire("k").allowed for _ in range(20))

if __name__ == "__main__":
    arguments = [tuple(sys.argv[1:])] * 8
    for _ in range(8):
        with multiprocessing.get_context("fork").Pool(4) as pool:
            assert sum(pool.map(work, arguments)) == 160
"""


@pytest.mark.slow
def test_a_pool_that_terminates_its_workers_ends(
    redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """Its workers are about to wait for the next task when SIGTERM comes; one in ten missed it."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    subprocess.run(
        [sys.executable, str(script), redis_url, prefix],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=True,
    )  # fmt: skip
