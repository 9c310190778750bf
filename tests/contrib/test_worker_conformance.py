"""Workers of each task queue of `KINDS` keep one limit for the fleet: none lost, none twice.

The bound is judged by the limiter's own clock (`Decision.now_ms`), because the moments at which
jobs start are later by what a worker needs, and drift over the edges of buckets.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from distwindow import Limit, Limiter
from tests.contrib.fleet import KINDS, Fleet, Kind
from tests.servers import Pass, Proxy, Silent, Standalone, until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

LIMIT = Limit("5/second")
"""Slow enough that one worker on a busy machine would exceed it, as the control shows."""
JOBS = 20
SIMPLE_WORKER = "distwindow.contrib.rq.LimitedSimpleWorker"
IDEAL_S = (JOBS / LIMIT.amount - 1) * LIMIT.per
"""From the first to the last admission, if every permit is used."""


def installed_kinds() -> list[Any]:
    """Return the kinds as parameters. arq needs redis-py below 6, and each of the others runs with
    every version: so each kind runs in some stage of CI, where the test below requires it.
    """
    major = int(redis.__version__.partition(".")[0])
    marks = [pytest.mark.compat] if major < 6 else []
    return [
        pytest.param(kind, marks=marks, id=name)
        for name, kind in KINDS.items()
        if (name == "arq") == (major < 6)
    ]


@pytest.fixture(params=installed_kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def broker() -> Iterator[Standalone]:
    with Standalone() as server:
        yield server


@pytest.fixture
def fleet(kind: Kind, broker: Standalone, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without workers yet, and its jobs."""
    with Fleet(kind, broker.url, str(LIMIT), log=tmp_path / "log") as made:
        made.enqueue(JOBS)
        yield made


def most_in_a_window(admitted_ms: list[int], limit: Limit) -> int:
    """Return the most admissions in any window of `limit` that is aligned to its buckets."""
    counts = Counter(ms // limit.bucket_ms for ms in admitted_ms)
    return max(sum(counts[first + offset] for offset in range(limit.buckets)) for first in counts)


def test_the_fleet_keeps_the_limit_and_runs_each_job_once(kind: Kind, fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start_worker()
    fleet.finish(JOBS)

    assert Counter(fleet.starts()) == Counter(range(JOBS))
    admitted = fleet.admitted_ms()
    assert len(admitted) == JOBS
    assert most_in_a_window(admitted, LIMIT) <= LIMIT.amount
    print(
        f"{kind.name}: {fleet.requeues() / JOBS:.2f} requeues and "
        f"{1 + fleet.refused() / JOBS:.2f} asks per job; last admission after "
        f"{(admitted[-1] - admitted[0]) / 1000:.2f} s, ideal {IDEAL_S:.2f} s"
    )


def started_after_new(fleet: Fleet, number: int) -> bool:
    """Enqueue one more job, and return whether all others have started."""
    fleet.enqueue(1, first=number)
    return set(range(JOBS)) <= set(fleet.starts())


def test_a_killed_worker_loses_only_what_its_library_loses(kind: Kind, fleet: Fleet) -> None:
    killed = fleet.start_worker()
    until(lambda: len(fleet.starts()) >= LIMIT.amount, 30, what="jobs of the first window")
    fleet.start_worker()
    fleet.kill_worker(killed)
    if kind.claims_after_new:
        extra = itertools.count(JOBS)
        until(lambda: started_after_new(fleet, next(extra)), 30, every=0.5)
    assert fleet.finish_after_kill(JOBS) <= kind.slots
    twice = [number for number, starts in Counter(fleet.starts()).items() if starts > 1]
    assert len(twice) <= kind.slots
    assert most_in_a_window(fleet.admitted_ms(), LIMIT) <= LIMIT.amount


def test_a_stopped_worker_loses_nothing_and_repeats_nothing(fleet: Fleet) -> None:
    stopped = fleet.start_worker()
    until(lambda: len(fleet.starts()) >= LIMIT.amount, 30, what="jobs of the first window")
    fleet.stop_worker(stopped)
    fleet.start_worker()
    fleet.finish(JOBS)
    assert Counter(fleet.starts()) == Counter(range(JOBS))
    assert len(fleet.admitted_ms()) == JOBS


def test_what_jobs_have_counted_is_sent_when_their_worker_is_stopped(
    kind: Kind, broker: Standalone, tmp_path: Path
) -> None:
    """With RQ where jobs have no process of their own, which would end by `os._exit`."""
    if kind.name == "rq":
        kind = replace(kind, command=("rq", "worker", "--worker-class", SIMPLE_WORKER, "jobs"))
    with Fleet(kind, broker.url, "1000/second", log=tmp_path / "log") as fleet:
        fleet.enqueue(5)
        worker = fleet.start_worker()
        fleet.finish(5)
        fleet.stop_worker(worker)
    with Limiter(broker.url, "1000/hour", prefix="in-jobs", timeout=5) as limiter:
        assert limiter.stats("starts").passed == 5


def test_jobs_are_held_while_the_limiters_redis_is_silent_and_others_run(
    kind: Kind, broker: Standalone, tmp_path: Path
) -> None:
    free = JOBS
    with Standalone() as store, Proxy(store.port) as link:
        link.fault = Silent()
        with Fleet(kind, broker.url, str(LIMIT), store_url=link.url, log=tmp_path / "log") as fleet:
            fleet.enqueue(JOBS)
            fleet.enqueue(1, first=free, name="free")
            fleet.start_worker()
            until(lambda: fleet.starts() == [free], 30, what="the job without limits")
            until(
                lambda: b"asking the limits of task" in (tmp_path / "log").read_bytes(),
                30,
                what="the line in the log",
            )
            assert fleet.starts() == [free]
            link.fault = Pass()
            fleet.finish(JOBS)
            assert Counter(fleet.starts()) == Counter(range(JOBS + 1))
            assert len(fleet.admitted_ms()) == JOBS
