"""What a limit costs a route: FastAPI under one uvicorn worker, loaded by `wrk -c16`, beside the
same route without a limit, and beside other limiters.

Each application runs in a process of its own, with a server of its own, and is started again for
every three rounds: two processes of the same application differ by up to 4 % for as long as they
live. The worker has one core; the server and `wrk` share the other. The limit is never reached.
Needs `wrk`. The ratio is of the time that passes for a request; where the worker has its core for
itself, that is its processor time, of which the detail has the ratio, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import psutil

from benchmarks.measure import Quartiles, Results, error_text, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import last_core, pinned, running
from benchmarks.web_app import APPS
from tests.servers import until

CONNECTIONS = 16
STARTS, QUICK_STARTS = 9, 2
ROUNDS = 3
"""Rounds of each start."""
BARE = "bare"
TARGETS = {
    "contrib.fastapi, direct": Target(1.45),
    "contrib.fastapi, leased": Target(1.3),
    "RateLimitMiddleware, direct": Target(1.3),
    "RateLimitMiddleware, leased": Target(1.1),
}
_US = {"us": 1.0, "ms": 1_000.0, "s": 1_000_000.0}


@dataclass
class App:
    """An application, its present process, and what each trial has found besides."""

    name: str
    worker: psutil.Process | None = None
    port: int = 0
    cpu_us: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)

    def us_per_request(self) -> float:
        """Load it for a second; return the microseconds that pass for each request."""
        assert self.worker is not None
        before = self.worker.cpu_times()
        with pinned(last_core()):
            output = subprocess.run(
                [
                    *("wrk", "-t1", f"-c{CONNECTIONS}", "-d1s", "--latency"),
                    f"http://127.0.0.1:{self.port}/",
                ],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
        if failed := re.search(r"Non-2xx.*|Socket errors.*", output):
            raise RuntimeError(failed[0])
        after = self.worker.cpu_times()
        cpu_s = after.user - before.user + after.system - before.system
        self.cpu_us.append(cpu_s * 1e6 / float(_found(r"(\d+) requests in", output)[0]))
        for values, share in ((self.p50_us, 50), (self.p99_us, 99)):
            number, unit = _found(rf"{share}%\s+([\d.]+)(us|ms|s)\b", output)
            values.append(float(number) * _US[unit])
        return 1e6 / float(_found(r"Requests/sec:\s+([\d.]+)", output)[0])

    @contextmanager
    def served(self) -> Iterator[None]:
        """Run it in a process."""
        with running(core=last_core()) as server, socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            self.port = reserved.getsockname()[1]
            reserved.close()
            variables = {"BENCHMARK_APP": self.name, "BENCHMARK_REDIS_URL": server.url}
            with pinned(min(os.sched_getaffinity(0))):
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "uvicorn", "benchmarks.web_app:make", "--factory"),
                        *("--port", str(self.port), "--log-level", "error", "--no-access-log"),
                    ],
                    env=os.environ | variables,
                )  # fmt: skip
            try:
                until(partial(_answers, process, self.port), 30, what="an answer", every=0.1)
                self.worker = psutil.Process(process.pid)
                yield
            finally:
                process.terminate()
                process.wait(timeout=20)


def _found(pattern: str, output: str) -> tuple[str, ...]:
    found = re.search(pattern, output)
    assert found is not None, output
    return found.groups()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    if process.poll() is not None:
        raise RuntimeError("the application has ended")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
        return bool(json.load(response) == {"message": "hello"})


def _cpu(app: App, base: App) -> str:
    pairs = zip(app.cpu_us, base.cpu_us, strict=True)
    return f"{Quartiles.of([one / other for one, other in pairs]).median:.2f}x"


def run(quick: bool) -> Section:
    """Measure the section; `quick`: fewer and shorter rounds."""
    section = Section("web", "A limited route over one without a limit, FastAPI and uvicorn")
    if shutil.which("wrk") is None:
        section.add_failures({"all rows": "wrk is not installed: apt-get install wrk"})
        return section
    apps = {name: App(name) for name in APPS}
    results = Results()
    for start in range(QUICK_STARTS if quick else STARTS):
        with ExitStack() as stack:
            trials = {}
            for name, app in apps.items():
                if name in results.errors:
                    continue
                try:
                    stack.enter_context(app.served())
                    trials[name] = app.us_per_request
                except Exception as error:
                    results.errors[name] = error_text(error)
            log(f"web: start {start + 1}, {len(trials)} applications answer")
            results.extend(run_rounds("web", trials, ROUNDS))
    section.add_failures(results.errors)
    for name, app in apps.items():
        if name in results.values and BARE in results.values:
            section.add(
                name,
                None if name == BARE else results.ratio(name, BARE),
                target=TARGETS.get(name),
                detail=f"{results.median(name):.0f} µs a request, {_cpu(app, apps[BARE])} of the "
                f"processor time of {BARE}; latency p50 "
                f"{Quartiles.of(app.p50_us).median / 1000:.2f} ms, p99 "
                f"{Quartiles.of(app.p99_us).median / 1000:.2f} ms",
            )
    return section
