"""The commands that a fleet of N processes with M circuit breakers each sends to Redis per second:
under load, with one call a second of each breaker, and after the last call.

The processes are real ones; the commands are counted by the server (`INFO commandstats`), and the
exchanges by how often it has read from a connection (`INFO stats`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks.measure import log
from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import Server, running

PROCESSES = (1, 4, 8)
BREAKERS = (1, 8, 64)
PERIOD_S, SELDOM_S = 0.05, 1.0
"""Between two calls of one breaker by one process."""
SETTLE_S = 1.0
WHEN = ("under load", "called once a second", "after the last call")


class Sent(NamedTuple):
    """What the server has received, per second or in all."""

    scripts: float
    reads: float


def _received(connection: Socket) -> Sent:
    reads = float(connection.info("stats")["total_reads_processed"])
    return Sent(connection.script_calls()[0], reads)


def _per_second(connection: Socket, seconds: float) -> Sent:
    before, began = _received(connection), time.monotonic()
    time.sleep(seconds)
    after, passed = _received(connection), time.monotonic() - began
    # Reading the counters is a read itself, twice.
    reads = max(0.0, after.reads - before.reads - 2)
    return Sent((after.scripts - before.scripts) / passed, reads / passed)


@contextmanager
def _process(server: Server, breakers: int, period_s: float) -> Iterator[subprocess.Popen[str]]:
    arguments = [server.url, str(breakers), str(period_s)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        try:
            process.communicate(timeout=10)  # closes its input
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _measure(
    server: Server, connection: Socket, size: tuple[int, int], seconds: float
) -> list[Sent]:
    """Return what a fleet sends per second, at each of `WHEN`."""
    busy, rest = _busy_and_rest(server, connection, size, PERIOD_S, seconds)
    seldom, _ = _busy_and_rest(server, connection, size, SELDOM_S, max(4.0, seconds))
    return [busy, seldom, rest]


def _busy_and_rest(
    server: Server, connection: Socket, size: tuple[int, int], period_s: float, seconds: float
) -> tuple[Sent, Sent]:
    processes, breakers = size
    with ExitStack() as stack:
        fleet = [
            stack.enter_context(_process(server, breakers, period_s)) for _ in range(processes)
        ]
        for process in fleet:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a process of the fleet has ended")
        time.sleep(SETTLE_S)
        busy = _per_second(connection, seconds)
        for process in fleet:
            assert process.stdin is not None
            process.stdin.write("rest\n")
            process.stdin.flush()
        time.sleep(SETTLE_S)
        return busy, _per_second(connection, seconds)


def row_name(processes: int, breakers: int, when: str) -> str:
    return f"{processes} processes, {breakers} breakers, {when}"


def run(quick: bool) -> Section:
    section = Section(
        "fleet",
        f"fleet: commands per second to Redis, each breaker called every {PERIOD_S * 1000:.0f} ms",
    )
    with running() as server, Socket(server.port) as connection:
        for processes in PROCESSES:
            for breakers in BREAKERS:
                log(f"fleet: {processes} processes with {breakers} breakers")
                found = _measure(server, connection, (processes, breakers), 2.0 if quick else 5.0)
                for when, sent in zip(WHEN, found, strict=True):
                    section.add(
                        row_name(processes, breakers, when),
                        sent.scripts,
                        unit="/s",
                        detail=f"{sent.reads:.1f} reads a second",
                    )
    return section
