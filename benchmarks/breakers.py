"""Circuit breakers: eight processes call a service that breaks and is mended, with one breaker for
the fleet and with one in each process; and what the fleet's breakers send to Redis.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.breaker_process import CALLS, OPEN_FOR_S, PERIOD_S
from benchmarks.measure import error_text, log
from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import running
from distwindow import CircuitBreaker, ErrorRatio
from distwindow.breaker.commands import breaker_name
from distwindow.ring.key import senders_name
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.servers import until

PROCESSES = 8
HEALTHY_S, BROKEN_S, MENDED_S = 2.0, 7.0, 5.0
BREAKERS = 10


class Outage(NamedTuple):
    """What one fleet did while the service was broken, and after it was mended."""

    broken_calls: int
    open_s: float
    """From the fault until the last process has refused for the first time."""
    probes: int
    """Calls that went to the broken service after that."""
    closed_s: float
    """From the return of the service until the last process has made a call."""


def _outage(kind: str, url: str) -> Outage:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broken, stop = folder / "broken", folder / "stop"
        outputs = [folder / f"{number}.log" for number in range(PROCESSES)]
        command = [sys.executable, "-m", "benchmarks.breaker_process", kind, url]
        processes = []
        for output in outputs:
            with output.open("w") as file:
                process = subprocess.Popen([*command, str(broken), str(stop)], stdout=file)
                processes.append(process)
        until(lambda: all(output.stat().st_size for output in outputs), 30, what="calls of all")
        time.sleep(HEALTHY_S)
        broken.touch()
        fault_at = time.monotonic()
        time.sleep(BROKEN_S)
        broken.unlink()
        mended_at = time.monotonic()
        time.sleep(MENDED_S)
        stop.touch()
        for process in processes:
            process.wait(timeout=20)
        logs = [
            [json.loads(line) for line in output.read_text().splitlines()] for output in outputs
        ]
    return _summary(logs, fault_at, mended_at)


def _summary(logs: list[list[dict[str, Any]]], fault_at: float, mended_at: float) -> Outage:
    first_refused = [
        next(x["at"] for x in lines if x["outcome"] == "refused" and x["at"] > fault_at)
        for lines in logs
    ]
    opened_at = max(first_refused)
    calls = [x for lines in logs for x in lines if x["outcome"] == "call"]
    let_through = [x["at"] for x in calls if x["broken"]]
    again = [
        next(x["at"] for x in lines if x["outcome"] == "call" and x["at"] > mended_at)
        for lines in logs
    ]
    return Outage(
        len(let_through),
        opened_at - fault_at,
        sum(at > opened_at for at in let_through),
        max(again) - mended_at,
    )


def _add_outages(section: Section, url: str) -> None:
    for kind in CALLS:
        log(f"breakers: {PROCESSES} processes with {kind}")
        try:
            found = _outage(kind, url)
        except Exception as error:
            section.add_failures({kind: error_text(error)})
            continue
        section.add(
            f"{kind}, {PROCESSES} processes",
            detail=f"open everywhere after {found.open_s:.2f} s; {found.broken_calls} calls to the "
            f"broken service, {found.probes} of them after it was open everywhere; closed "
            f"everywhere {found.closed_s:.2f} s after the service was back",
        )


def _rate(connection: Socket, breakers: list[CircuitBreaker], seconds: float, load: bool) -> float:
    """Return the script calls per second, with each breaker called every 20 ms or not at all."""
    before, began = connection.script_calls()[0], time.monotonic()
    while time.monotonic() - began < seconds:
        for breaker in breakers if load else ():
            for number in range(BREAKERS):
                with breaker.call(f"service-{number}"):
                    pass
        time.sleep(PERIOD_S)
    return (connection.script_calls()[0] - before) / (time.monotonic() - began)


def _add_rates(section: Section, url: str, connection: Socket, quick: bool) -> None:
    rule = ErrorRatio(0.5)
    breakers = [CircuitBreaker(url, rule, prefix="rates") for _ in range(PROCESSES)]
    seconds = 3.0 if quick else 10.0
    _rate(connection, breakers, 1.0, load=True)
    under_load = _rate(connection, breakers, seconds, load=True)
    name = breaker_name("rates", "service-0", rule)
    sizes = [connection.call("MEMORY", "USAGE", key) for key in (name, senders_name(name))]
    time.sleep(1)
    at_rest = _rate(connection, breakers, seconds, load=False)
    for breaker in breakers:
        breaker.close()
    what = f"script calls/s of {PROCESSES} CircuitBreaker objects with {BREAKERS} breakers each"
    for when, rate in (
        ("all called 50 times a second", under_load),
        ("after the last call", at_rest),
    ):
        section.add(f"{what}, {when}", detail=f"{rate:.0f}")
    for part, size in zip(("breaker", "breaker's sender records"), sizes, strict=True):
        section.add(f"one {part} in Redis", float(size), unit="B")


def _decision_us() -> float:
    """Return how long a call under a closed breaker takes in this process."""

    class Elsewhere(MemoryStore):
        decided_by = "store"

    clock = ManualClock()
    breaker = CircuitBreaker(Elsewhere(clock), ErrorRatio(0.5), time=clock)
    with breaker.call("service"):
        pass
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20_000):
            with breaker.call("service"):
                pass
        best = min(best, (time.perf_counter() - began) / 20_000)
    return best * 1e6


def run(quick: bool) -> Section:
    section = Section(
        "breakers",
        f"circuit breakers: {PROCESSES} processes, a call every {PERIOD_S * 1000:.0f} ms each, "
        f"broken for {BROKEN_S:.0f} s, open for {OPEN_FOR_S:.0f} s",
    )
    with running() as server, Socket(server.port) as connection:
        _add_outages(section, server.url)
        _add_rates(section, server.url, connection, quick)
    section.add("a call under a closed breaker, in memory", _decision_us(), unit="µs")
    return section
