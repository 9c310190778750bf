"""One run: a server, two workers, 600 tasks at once; then what the workers have recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from benchmarks.celery_workers.project import PER_SECOND, WORKERS
from benchmarks.server import running
from tests.celery.processes import most_in_a_window

ROOT = Path(__file__).resolve().parents[2]
TASKS, SLOTS = 600, 2
IDEAL_S = TASKS / PER_SECOND - 1
MOST_S = 100.0
"""A run ends after this time, whether all tasks have started or not."""

SETUPS = {
    "distwindow": "distwindow's gate",
    "rate_limit": "Celery's rate_limit, half of it in each worker",
    "retry": "a task that asks a limiter and retries",
    "heimdall": "celery-heimdall",
}


@dataclass(frozen=True)
class Run:
    """What one run has recorded."""

    setup: str
    starts_s: list[float]
    """When each task began its work, since the first of them."""
    most: int
    """The most tasks in a second of whole buckets of 100 ms, by the clock of the Redis server; for
    those that ask a limiter of distwindow, when the limiter admitted them.
    """
    requeues: int
    asks: int

    @property
    def span_s(self) -> float:
        return self.starts_s[-1] - self.starts_s[0]


def is_installed(setup: str) -> bool:
    return setup != "heimdall" or find_spec("celery_heimdall") is not None


def run(setup: str) -> Run:
    """Start the workers, send the tasks, and wait until all have started."""
    with running() as server, tempfile.TemporaryDirectory() as folder:
        environment, records = environment_of(setup, server.port)
        workers = [start_worker(environment, Path(folder), number) for number in range(WORKERS)]
        try:
            wait_until(lambda: int(records.get("ready") or 0) == WORKERS, 60)
            client = Celery("client", broker=environment["BROKER"], set_as_current=False)
            for number in range(TASKS):
                client.send_task("fetch", [number])
            client.close()
            wait_until(lambda: records.llen("starts") >= TASKS, MOST_S)
        finally:
            end(workers)
        starts_ms = sorted(int(at_us) / 1000 for at_us in records.lrange("starts", 0, -1))
        admitted_ms = [int(at_ms) for at_ms in records.lrange("admitted", 0, -1)]
        return Run(
            setup,
            [(at_ms - starts_ms[0]) / 1000 for at_ms in starts_ms],
            most_in_a_window([int(at_ms) for at_ms in admitted_ms or starts_ms]),
            int(records.get("requeues") or 0),
            int(records.get("asks") or 0),
        )


def bytes_of_a_waiting_task(count: int = 5_000) -> float:
    """Return by how many bytes a worker's parent grows with each task that waits in it."""
    with running() as server, tempfile.TemporaryDirectory() as folder:
        environment, records = environment_of("parked", server.port)
        worker = start_worker(environment, Path(folder), 0)
        try:
            wait_until(lambda: int(records.get("ready") or 0) == 1, 60)
            client = Celery("client", broker=environment["BROKER"], set_as_current=False)
            _send_and_wait(client, 200, 199)  # the worker imports what it needs
            before = _resident(worker.pid)
            _send_and_wait(client, count, 199 + count)
            grown = _resident(worker.pid) - before
            client.close()
        finally:
            end([worker])
        return grown / count


def _send_and_wait(client: Celery, count: int, waiting: int) -> None:
    for number in range(count):
        client.send_task("fetch", [number])
    wait_until(lambda: _waiting(client) >= waiting, 120)


def _waiting(client: Celery) -> int:
    replies = client.control.inspect(timeout=2.0)._request("limits") or {}
    return sum(reply["parked"] for reply in replies.values())


def _resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def environment_of(setup: str, port: int) -> tuple[dict[str, str], Any]:
    """Return the environment of the workers, and a client for what they record."""
    base = f"redis://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SETUP": setup, "BROKER": f"{base}/0", "STORE": f"{base}/1", "RECORDS": f"{base}/2",
    }  # fmt: skip
    return environment, redis.Redis.from_url(f"{base}/2")


def start_worker(
    environment: dict[str, str],
    folder: Path,
    number: int,
    *options: str,
    pool: str = "prefork",
    slots: int = SLOTS,
) -> subprocess.Popen[bytes]:
    """Start `celery worker` with these options."""
    with (folder / f"worker{number}.log").open("wb") as output:
        return subprocess.Popen(
            [
                sys.executable, "-m", "celery", "-A", "benchmarks.celery_workers.project",
                "worker", "-n", f"w{number}@benchmark", "-P", pool, "-c", str(slots),
                "-l", "WARNING", "--without-gossip", "--without-mingle", *options,
            ],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def wait_until(condition: Any, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends_s:
        time.sleep(0.05)
