"""However a process ends, its counts reach the store, it does not hang, and it prints no error.

The file is long because the programs that end are part of it, as texts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from distwindow import Limiter, Stats
from tests.event_loops import program_header, uvloop_param
from tests.harness import admin, used
from tests.interruptions import restore_sigint
from tests.servers import Blackhole, Proxy, Refuse, Silent, Standalone

ROOT = Path(__file__).parents[2]
MODES = ["direct", "leased", "eventual"]
LIMIT = "20/hour"

PROGRAM = """
import asyncio, atexit, os, signal, sys, time
from distwindow import AsyncLimiter, Limiter, RateLimitExceeded, exit_on_sigterm

url, prefix, kind, mode, way = sys.argv[1:]
if way == "sigterm":
    exit_on_sigterm()
options = dict(prefix=prefix, consistency=mode, timeout=1, flush_interval=3600, sync_interval=3600)

def entries(limiter):
    for turn in range(27):
        try:
            with limiter.entry("k"):
                if turn < 5:
                    raise LookupError
        except (LookupError, RateLimitExceeded):
            pass

async def aentries(limiter):
    for turn in range(27):
        try:
            async with limiter.entry("k"):
                if turn < 5:
                    raise LookupError
        except (LookupError, RateLimitExceeded):
            pass

def print_done():
    print("done", flush=True)

flushes = []
if way == "pause":  # called after the last flush, which is registered later
    atexit.register(lambda: sys.stderr.write(f"flushes: {sum(flushes)}\\n"))

def count_flushes(limiter):
    job = limiter._flush_job
    flush = job.flush
    job.flush = lambda everything: (flushes.append(everything), flush(everything))[1]

def leave():
    if way == "pause":
        sys.stdin.readline()
    if way == "sys.exit":
        sys.exit(3)
    if way == "exception":
        raise ZeroDivisionError("of the program")
    if way == "keyboard":
        signal.raise_signal(signal.SIGINT)
    if way == "sigterm":
        time.sleep(60)

async def aleave(limiter):
    if way == "waiting task":
        asyncio.create_task(asyncio.sleep(60))
    if way == "await in finally":
        async def ends(turn):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(turn / 20)
                await limiter.try_acquire("k")
        for turn in range(3):
            asyncio.create_task(ends(turn))
        await asyncio.sleep(0)
    if way == "sigterm":
        await asyncio.sleep(60)
    leave()

def blocking():
    limiter = Limiter(url, "20/hour", **options)
    count_flushes(limiter)
    entries(limiter)
    print_done()
    leave()

async def awaiting():
    limiter = AsyncLimiter(url, "20/hour", **options)
    count_flushes(limiter)
    await aentries(limiter)
    print_done()
    await aleave(limiter)

def work():
    blocking() if kind == "sync" else asyncio.run(awaiting())

def in_child():
    import multiprocessing
    limiter = Limiter(url, "20/hour", **options) if kind == "sync" else None
    if limiter is not None:
        limiter.try_acquire("parents")
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    assert child.exitcode == 0, child.exitcode

def stopped():
    # As programs that run the loop themselves: it is stopped, and may be closed or not.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(awaiting())
    if way == "closed loop":
        loop.close()

if way == "child":
    in_child()
elif way.endswith(" loop"):
    stopped()
else:
    work()
"""

LOST = r"47 counts of limiter '.*' at redis://.* were lost: the process was ended before .*\n"
CODES = {"sys.exit": 3, "exception": 1, "keyboard": -signal.SIGINT, "sigterm": 128 + signal.SIGTERM}


class Program:
    """A process that runs `PROGRAM` and ends in the given way."""

    def __init__(self, url: str, prefix: str, kind: str, mode: str, way: str) -> None:
        self.way = way
        self.prefix = f"{prefix}-{way.replace(' ', '-')}"
        forks = "ignore:.*fork.*:DeprecationWarning"
        command = [sys.executable, "-W", forks, "-c", program_header() + PROGRAM]
        self._process = subprocess.Popen(
            [*command, url, self.prefix, kind, mode, way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=restore_sigint,
        )  # fmt: skip

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def await_done(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self) -> tuple[int, str]:
        """Wait until it has ended. Return its exit code and its stderr."""
        process = self._process
        if self.way == "sigterm":
            self.await_done()
            process.terminate()
        began = time.monotonic()
        output, complaints = process.communicate(timeout=30)
        # It takes two timeouts for a store that does not answer; what hangs, sleeps for a minute.
        assert time.monotonic() - began < 15
        assert self.way in ("sigterm", "pause") or output == "done\n", complaints
        return process.returncode, complaints


@contextmanager
def all_of(programs: list[Program]) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        yield programs


def recorded(url: str, prefix: str) -> Stats:
    with Limiter(url, LIMIT, prefix=prefix) as limiter:
        return limiter.stats("k")


def nothing_lost(url: str, prefix: str, more: int = 0) -> None:
    stats = recorded(url, prefix)
    assert (stats.passed, stats.blocked) == (20, 7 + more)
    assert (stats.success, stats.error) == (15, 5)
    with admin(url) as server:
        assert used(server, prefix, "k") == 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "async", uvloop_param()])
def test_what_was_counted_arrives(redis_url: str, prefix: str, kind: str, mode: str) -> None:
    ways = ["normal", "sigterm", "child"]
    if mode == "direct":
        ways += ["sys.exit", "exception", "keyboard"]
    with all_of([Program(redis_url, prefix, kind, mode, way) for way in ways]) as programs:
        for program in programs:
            code, complaints = program.ended()
            assert code == CODES.get(program.way, 0), complaints
            if program.way == "exception":
                assert complaints.endswith("\nZeroDivisionError: of the program\n")
            elif program.way == "keyboard":
                assert complaints.endswith("\nKeyboardInterrupt\n")
            else:
                assert complaints == ""
            # A KeyboardInterrupt under asyncio prints two.
            assert complaints.count("Traceback") <= 2
            nothing_lost(redis_url, program.prefix)


@pytest.mark.slow
@pytest.mark.event_loops
@pytest.mark.parametrize("mode", MODES)
def test_however_its_loop_ends(redis_url: str, prefix: str, mode: str) -> None:
    ways = ["waiting task", "await in finally"]
    if mode == "direct":
        ways += ["closed loop", "open loop"]
    with all_of([Program(redis_url, prefix, "async", mode, way) for way in ways]) as programs:
        for program in programs:
            code, complaints = program.ended()
            if program.way.endswith(" loop"):
                # Python warns of tasks that are destroyed with their loop, also of distwindow's.
                assert set(complaints.splitlines()[:1]) <= {"Task was destroyed but it is pending!"}
                assert "Traceback" not in complaints
            else:
                assert complaints == ""
            assert code == 0
            nothing_lost(
                redis_url, program.prefix, more=3 if program.way == "await in finally" else 0
            )


MAX_FLUSHES = 6
"""As the loop ends, and before and after calls are paused: each may be repeated once, by which a
server is known to be away. Without that knowledge there were 50 where connections are refused.
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_exit_does_not_wait_for_a_store_that_is_away(
    standalone: Standalone, prefix: str, kind: str, mode: str
) -> None:
    """The process logs once that counts are lost, and ends."""
    faults = [Refuse(), Silent(), Blackhole()]
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(standalone.port)) for _ in faults]
        made = [
            Program(proxy.url, f"{prefix}{number}", kind, mode, "pause")
            for number, proxy in enumerate(proxies)
        ]
        programs = stack.enter_context(all_of(made))
        for program, proxy, fault in zip(programs, proxies, faults, strict=True):
            program.await_done()
            proxy.fault = fault
            if isinstance(fault, Silent):  # to new connections only
                proxy.cut()
            program.go_on()
        for program in programs:
            code, complaints = program.ended()
            assert code == 0
            lines = complaints.splitlines(keepends=True)
            # A thread may log a last line after it.
            (flushes,) = [line for line in lines if line.startswith("flushes: ")]
            lines.remove(flushes)
            assert int(flushes.removeprefix("flushes: ")) <= MAX_FLUSHES
            if mode == "eventual":  # the others may have sent all before
                began, *lost = [line for line in lines if " is away: " not in line]
                assert began.startswith(
                    f"flushing the counts of limiter '{program.prefix}' at redi"
                )
                assert len(lost) == 1
                assert re.fullmatch(LOST, lost[0])
