"""One run: start a server, call it over several connections, end it, and read the counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distwindow import Limiter
from tests.app_servers.applications import CELERY_CLIENT
from tests.app_servers.setups import SERVES, Setup
from tests.servers import Standalone, free_port, until

ROOT = Path(__file__).parents[2]
LIMIT, CALLS, CONNECTIONS = 250, 1_000, 16
MODES = ("direct", "leased", "eventual")


@dataclass
class Outcome:
    """The results of a run."""

    admitted: int = 0
    refused: int = 0
    more: int = 0
    """Calls that were sent after those, see `_http`."""
    errors: list[str] = field(default_factory=list)
    processes: int = 0
    """The worker processes that have answered."""
    connections: int = 0
    """The limiter's connections, counted by Redis after the last call."""
    times_us: list[float] = field(default_factory=list)
    """How long each admitted call of the limiter took inside the application, µs."""
    end_s: float = 0.0
    """From SIGTERM to the end of the last process."""
    passed: int = 0
    """As counted in Redis after the end, like `blocked`."""
    blocked: int = 0
    output: str = ""
    """What the server has printed."""

    @property
    def p50_us(self) -> float:
        return statistics.median(self.times_us) if self.times_us else 0.0

    @property
    def p99_us(self) -> float:
        return sorted(self.times_us)[int(len(self.times_us) * 0.99)] if self.times_us else 0.0

    def count(self, status: int, pid: int, took_us: float, pids: set[int]) -> None:
        """Count the answer to one call."""
        pids.add(pid)
        self.processes = len(pids)
        if status == 200:
            self.admitted += 1
            self.times_us.append(took_us)
        elif status == 429:
            self.refused += 1
        else:
            self.errors.append(f"status {status}")

    def faults(self, mode: str) -> list[str]:
        """Return what is wrong with the results, 8 lines at most."""
        found = []
        if self.errors:
            found.append(f"{len(self.errors)} errors, the first: {self.errors[0]}")
        if self.admitted + self.refused != CALLS + self.more:
            found.append(
                f"{self.admitted + self.refused} of {CALLS + self.more} calls were answered"
            )
        if self.admitted < LIMIT or (mode != "eventual" and self.admitted > LIMIT):
            found.append(f"{self.admitted} admitted of a limit of {LIMIT}")
        if (self.passed, self.blocked) != (self.admitted, self.refused):
            found.append(
                f"Redis counted {self.passed} + {self.blocked}, "
                f"but {self.admitted} + {self.refused} were answered"
            )
        signs = ("distwindow.", "lost", "Traceback")
        found += [line for line in self.output.splitlines() if any(sign in line for sign in signs)]
        return found[:8]


def missing(setup: Setup) -> list[str]:
    """Return the packages of this setup, or the program, that are not installed."""
    return [
        name
        for name in setup.packages
        if (_program(name) is None if name == "uwsgi" else find_spec(name) is None)
    ]


def run(setup: Setup, mode: str, server: Standalone) -> Outcome:
    """Start the server, call it, end it, and read the counts."""
    outcome = Outcome()
    prefix = f"run{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory(prefix="distwindow-") as folder:
        _run(setup, mode, server, prefix, Path(folder), outcome)
    with Limiter(server.url, f"{LIMIT}/hour", prefix=prefix, timeout=5) as limiter:
        stats = limiter.stats("shared")
    outcome.passed, outcome.blocked = stats.passed, stats.blocked
    return outcome


def _run(
    setup: Setup, mode: str, server: Standalone, prefix: str, folder: Path, outcome: Outcome
) -> None:
    environment = {
        **os.environ,
        # Or it imports dnspython, which imports httpx2's parts, whose globals it cannot patch.
        "EVENTLET_NO_GREENDNS": "yes",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "STORE_URL": server.url,
        "PREFIX": prefix,
        "MODE": mode,
        "PYTHONUNBUFFERED": "1",
    }
    if setup.used:
        environment["USED"] = "1"
    for name, text in {**setup.files, "application.py": setup.application}.items():
        (folder / name).write_text(text)
    port = free_port()
    words = setup.command.format(port=port, workers=setup.workers, calls=CALLS).split()
    program = _program(words[0])
    command = [program, *words[1:]] if program else [sys.executable, *words]
    with (
        (folder / "output").open("w+") as output,
        _started(command, environment, folder, output) as process,
    ):
        try:
            if setup.kind == "http":
                # By class, whichever loop the test is to run on: this one is not tested.
                with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                    loop.run_until_complete(_http(setup, mode, port, process, outcome))
            elif setup.kind == "celery":
                client = subprocess.run(
                    [sys.executable, "-c", CELERY_CLIENT, str(CALLS)],
                    cwd=folder, env={**environment, "PREFIX": prefix}, capture_output=True,
                    text=True, timeout=100, check=False,
                )  # fmt: skip
                if client.returncode:
                    outcome.errors.append(client.stderr.strip().splitlines()[-1])
                else:
                    _answers(client.stdout, outcome)
            else:
                assert process.stdout is not None
                _answers(process.stdout.readline(), outcome)
            outcome.connections = _connections(server, prefix)
            if setup.restarts:
                _wait_for_new_workers(setup, folder / "output")
            began = time.monotonic()
            if setup.kind == "processes":
                process.communicate("go on\n", timeout=30)
            else:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            outcome.end_s = time.monotonic() - began
        except Exception as exc:
            outcome.errors.append(f"{type(exc).__name__}: {exc}")
        output.seek(0)
        outcome.output = output.read()


def _wait_for_new_workers(setup: Setup, output: Path) -> None:
    """Wait until all workers that replace others have their own signal handlers: one that has just
    been forked has those of its master, which ignore SIGTERM, and gunicorn kills it after 30 s.
    """

    def all_serve() -> bool:
        text = output.read_text()
        replaced = setup.workers if setup.restarts == "SIGHUP" else text.count("Autorestarting")
        return text.count(SERVES) >= setup.workers + replaced

    until(all_serve, 20, what="workers that serve")


def _program(name: str) -> str | None:
    """Return the path of a program that is installed beside this Python, or on PATH."""
    if name != "uwsgi":
        return None
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@contextmanager
def _started(
    command: list[str], environment: dict[str, str], folder: Path, output: Any
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        if "calls" in environment or "application.py" in command else output, stderr=output,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that have not ended
        process.communicate()


def _connections(server: Standalone, name: str) -> int:
    with server.client() as client:
        return sum(one["name"] == name for one in client.client_list())


def _answers(text: str, outcome: Outcome) -> None:
    pids: set[int] = set()
    for pid, calls in json.loads(text):
        for allowed, took in calls:
            outcome.count(200 if allowed else 429, pid, took * 1e6, pids)


async def _http(
    setup: Setup, mode: str, port: int, process: subprocess.Popen[str], outcome: Outcome
) -> None:
    up: set[int] = set()
    ends = time.monotonic() + 20
    while len(up) < setup.workers:
        answers = await asyncio.gather(
            *[_get(port, "/up") for _ in range(2 * CONNECTIONS)], return_exceptions=True
        )
        up |= {answer[1] for answer in answers if not isinstance(answer, BaseException)}
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"only {len(up)} of {setup.workers} workers have answered")
        await asyncio.sleep(0.05)  # between two polls
    numbers = iter(range(CALLS))
    pids: set[int] = set()

    async def calls() -> None:
        for number in numbers:
            if number == CALLS // 8 and setup.restarts == "SIGHUP":
                process.send_signal(signal.SIGHUP)
            try:
                outcome.count(*await _get(port, "/"), pids)
            except (OSError, ValueError, IndexError, asyncio.TimeoutError) as exc:
                outcome.errors.append(f"{type(exc).__name__}: {exc}")

    await asyncio.gather(*[calls() for _ in range(CONNECTIONS)])
    ends = time.monotonic() + 10
    while mode == "leased" and outcome.admitted < LIMIT and time.monotonic() < ends:
        # A worker that gets no more calls may hold a lease. It refunds the lease after a while, and
        # then others are granted its permits.
        outcome.more += 1
        outcome.count(*await _get(port, "/"), pids)


async def _get(port: int, path: str) -> tuple[int, int, float]:
    """Return the status, the process, and the duration of the limiter's call there, µs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        raw = await asyncio.wait_for(reader.read(), 15)
    finally:
        writer.close()
    head, _, body = raw.decode().partition("\r\n\r\n")
    pid, took = body.split()[:2]
    return int(head.split()[1]), int(pid), float(took)
