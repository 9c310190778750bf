"""How limited tasks and tasks without limits share one worker's pool, for each kind of pool.

2,000 tasks without limits wait in one queue. Once the worker runs them, 60 limited ones at 20/s are
sent to another queue. All take 10 ms.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery

from benchmarks.celery_workers.fleet import end, environment_of, start_worker, wait_until
from benchmarks.celery_workers.project import PER_SECOND
from benchmarks.server import running

POOLS = {"prefork": 2, "threads": 2, "solo": 1, "gevent": 8}
"""The pools, and how many slots each has."""
FREE, LIMITED = 2000, 60
BEGUN = 100
"""The limited tasks are sent once so many others have started."""
MOST_S = 120.0
ROUNDS = 3


@dataclass(frozen=True)
class Shares:
    """The figures of one run, or the medians of several."""

    pool: str
    first_s: float
    """From the moment at which the limited tasks are sent to their first start."""
    span_s: float
    """From their first to their last start."""
    others_per_s: float
    """Starts of tasks without limits per second meanwhile."""
    others_alone_per_s: float
    """The same before the limited tasks are sent, and after their last start."""


def run(pool: str) -> Shares:
    """Start a worker with a backlog, send the limited tasks, and wait until all have started."""
    with running() as server, tempfile.TemporaryDirectory() as folder:
        environment, records = environment_of("shares", server.port)
        client = Celery("client", broker=environment["BROKER"], set_as_current=False)
        for number in range(FREE):
            client.send_task("free", [number], queue="free")
        worker = start_worker(
            environment, Path(folder), 0, "-Q", "free,limited", pool=pool, slots=POOLS[pool]
        )
        try:
            wait_until(lambda: records.llen("starts") >= BEGUN, 60)
            seconds, micros = records.time()
            for number in range(LIMITED):
                client.send_task("fetch", [number], queue="limited")
            wait_until(lambda: records.llen("starts") >= FREE + LIMITED, MOST_S)
        finally:
            client.close()
            end([worker])
        sent_us = int(seconds) * 1_000_000 + int(micros)
        moments: dict[str, list[float]] = {"fetch": [], "free": []}
        for start in records.lrange("starts", 0, -1):
            name, at_us = start.decode().split()
            moments[name].append((int(at_us) - sent_us) / 1e6)
    return figures(pool, sorted(moments["fetch"]), sorted(moments["free"]))


def figures(pool: str, limited_s: list[float], others_s: list[float]) -> Shares:
    """Return the figures of these starts, in seconds since the limited tasks were sent."""
    first_s, last_s = limited_s[0], limited_s[-1]
    meanwhile = sum(first_s <= at_s <= last_s for at_s in others_s)
    before = [at_s for at_s in others_s if at_s < 0]
    after = [at_s for at_s in others_s if at_s > last_s]
    alone_s = sum(part[-1] - part[0] for part in (before, after) if part)
    return Shares(
        pool,
        first_s,
        last_s - first_s,
        meanwhile / (last_s - first_s),
        (len(before) + len(after)) / alone_s,
    )


def medians(runs: list[Shares]) -> Shares:
    """Return the median of each figure of runs with one pool."""
    rows = [astuple(one)[1:] for one in runs]
    return Shares(runs[0].pool, *(median(column) for column in zip(*rows, strict=True)))


def measure() -> list[Shares]:
    """Run each pool in turn, ROUNDS times, and return the medians for each."""
    rounds = [[run(pool) for pool in POOLS] for _ in range(ROUNDS)]
    return [medians(list(runs)) for runs in zip(*rounds, strict=True)]


def table(rows: list[Shares]) -> str:
    """Return the table of docs/howto/celery.md."""
    ideal_s = LIMITED / PER_SECOND - 1
    lines = [
        f"| {LIMITED} tasks at {PER_SECOND}/s, behind {FREE:,} without a limit | first start "
        f"| first to last start (ideal {ideal_s:.1f} s) | others per second meanwhile "
        "| others per second alone |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.pool}, `-c {POOLS[one.pool]}` | {one.first_s:.2f} s | {one.span_s:.1f} s "
        f"| {one.others_per_s:.0f} | {one.others_alone_per_s:.0f} |"
        for one in rows
    ]
    return "\n".join(lines) + "\n"


def as_json(rows: list[Shares], environment: dict[str, str]) -> str:
    return json.dumps({"environment": environment, "rows": [asdict(one) for one in rows]}) + "\n"


def from_json(path: Path) -> list[Shares]:
    """Return the rows of a file that `as_json` has written."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [Shares(**row) for row in data["rows"]]
