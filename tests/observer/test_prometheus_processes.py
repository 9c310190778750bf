"""One scrape of real servers with several processes has what all of them have decided."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from distwindow import Limiter, StoreError
from distwindow.contrib.prometheus import PrometheusObserver
from tests.observer.batches import Series, read, series, total
from tests.programs import ROOT
from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import Answer, burst, get, statuses
from tests.web.server import Served, serve

pytestmark = pytest.mark.slow

WAYS = ("direct", "leased")
N = 200


class OfRun:
    """The metrics of one run of a server, in the folder of multiprocess mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}

    def found(self) -> Series:
        """Return what is in the files; nothing at the moment at which a process makes its own,
        which prometheus_client does not read.
        """
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))
        try:
            return series(registry)
        except struct.error:
            return {}

    def processes_with(self, files: str) -> set[int]:
        """Return the processes that have such files."""
        return {int(path.stem.rpartition("_")[2]) for path in self.folder.glob(files)}


@pytest.fixture
def run(tmp_path: Path) -> OfRun:
    return OfRun(tmp_path)


@pytest.fixture
def redis() -> Iterator[Standalone]:
    with Standalone() as server:
        yield server


def whole(served: Served) -> str:
    """Return the text of one scrape, empty if it fails."""
    answer = get(served.url + "/metrics")
    return answer.body.decode() if answer.status == 200 else ""


def scraped(served: Served) -> Series:
    """Return what one scrape of the server gives. One that comes at the moment at which a process
    makes its files fails, as prometheus_client does not read them then.
    """
    return read(until(lambda: whole(served), what="a scrape"))


def decided(found: Series, way: str) -> dict[str, int]:
    name = "distwindow_decisions_total"
    results = ("allowed", "refused", "error")
    counts = {result: int(total(found, name, limiter=way, result=result)) for result in results}
    return {result: count for result, count in counts.items() if count}


def is_decided(found: Callable[[], Series], way: str, expected: dict[str, int]) -> bool:
    return decided(found(), way) == expected


def check_run(served: Served) -> None:
    """Send requests to each limit: one scrape has all of them, and no more admitted than were."""
    for way in WAYS:
        assert statuses(burst(f"{served.url}/{way}", N)) == {200: 20, 429: N - 20}
        expected = {"allowed": 20, "refused": N - 20}
        until(partial(is_decided, lambda: scraped(served), way, expected), what=f"{way}: {N}")
        permits = "distwindow_permits_total"
        assert total(scraped(served), permits, limiter=way, result="allowed") == 20


# -- gunicorn ----------------------------------------------------------------------------------

GUNICORN = (
    "gunicorn tests.observer.apps:wsgi -c tests/observer/gunicorn.py --no-control-socket -w 4 "
    "-k gthread --threads 4 -b 127.0.0.1:{port}"
)


def processes_of(answers: list[Answer]) -> Counter[int]:
    return Counter(int(answer.field("x-process") or 0) for answer in answers)


def test_gunicorn_with_four_workers_of_which_one_is_killed(redis: Standalone, run: OfRun) -> None:
    with serve(GUNICORN, "", redis.url, **run.environment) as served:
        check_run(served)

        sent = N

        def send(count: int) -> Counter[int]:
            nonlocal sent
            sent += count
            return processes_of(burst(f"{served.url}/direct", count))

        def is_told(count: int) -> bool:
            return sum(decided(scraped(served), "direct").values()) == count

        # One that has told all that it has counted loses nothing.
        first = next(iter(send(50)))
        until(lambda: is_told(sent), what="all is told")
        kill(first)
        until(lambda: first not in run.processes_with("gauge_live*.db"), what="its gauges go")
        until(lambda: len(send(50)) == 4, what="another worker")
        until(lambda: is_told(sent), what="all is told")
        assert total(scraped(served), "distwindow_store_up", limiter="direct") == 1

        # Of one that has not, at most what it has decided since it was asked again is lost.
        answered = send(N)
        second = next(iter(answered))
        kill(second)
        until(lambda: settled(served), what="all is told")
        told = decided(scraped(served), "direct")
        assert sent - answered[second] <= sum(told.values()) <= sent
        assert told["allowed"] == 20


def kill(pid: int) -> None:
    """Kill a worker, and wait until gunicorn knows that: then nobody is connected to it."""
    os.kill(pid, signal.SIGKILL)

    until(lambda: not is_there(pid), what=f"process {pid} is gone")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def settled(served: Served) -> bool:
    """True once the counts are the same as half a second ago, two flush intervals."""
    before = decided(scraped(served), "direct")
    time.sleep(0.6)
    return decided(scraped(served), "direct") == before


# -- others ------------------------------------------------------------------------------------


def test_uvicorn_with_two_workers(redis: Standalone, run: OfRun) -> None:
    command = "uvicorn tests.observer.apps:asgi --workers 2 --port {port} --log-level warning"
    with serve(command, "", redis.url, **run.environment) as served:
        check_run(served)


def test_celery_with_processes_that_are_replaced(redis: Standalone, run: OfRun) -> None:
    environment = {
        **os.environ, **run.environment, "PYTHONPATH": str(ROOT), "DISTWINDOW_URL": redis.url
    }  # fmt: skip
    words = ["-A", "tests.observer.celery_app", "worker", "-P", "prefork", "-c", "2"]
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "celery", *words, "--without-gossip", "-l", "ERROR"],
        cwd=ROOT, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        from celery import Celery

        with Celery("client", broker=redis.url, set_as_current=False) as client:
            for way, _ in itertools.product(WAYS, range(60)):
                client.send_task("tests.observer.celery_app.call", [f"/{way}"])
        with redis.client() as seen:
            for way in WAYS:
                expected = {"allowed": 20, "refused": 40}
                until(partial(is_decided, run.found, way, expected), 60, what=way)
                assert {word: int(seen.get(f"/{way} {word}") or 0) for word in expected} == expected
        until(lambda: all(map(is_there, run.processes_with("gauge_live*.db"))), what="gauges go")
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert len(run.processes_with("counter_*.db")) > 2  # they were replaced


# -- a store that goes away ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allow", "deny", "raise"])
def test_what_is_decided_while_redis_is_away(policy: Any, redis: Standalone) -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)

    def of(name: str, **labels: str) -> float:
        return total(series(registry), f"distwindow_{name}", **labels)

    seen: Counter[str] = Counter()
    with Limiter(redis.url, "1000/day", on_store_error=policy, observer=observer) as limiter:

        def call() -> str:
            try:
                decision = limiter.try_acquire("key")
            except StoreError:
                answer = "error"
            else:
                answer = ("refused", "allowed")[decision.allowed] + f" {decision.source}"
            seen[answer] += 1
            return answer

        def is_told(up: int) -> bool:
            call()
            return of("store_up", limiter="distwindow") == up

        until(lambda: is_told(up=1))
        redis.kill()
        until(lambda: is_told(up=0))
        redis.restart()
        until(lambda: is_told(up=1))
        until(lambda: call() == "allowed store")
        limiter.flush()
        assert of("failed_open_total") == seen["allowed policy"]
        assert of("failed_closed_total") == seen["refused policy"]
        assert of("decisions_total", result="error") == seen["error"]
        assert of("decisions_total", source="store") == seen["allowed store"]
        assert of("decisions_total") == sum(seen.values())
        assert of("store_errors_total") > 0
    word = {"allow": "allowed policy", "deny": "refused policy", "raise": "error"}[policy]
    assert set(seen) == {"allowed store", word}
