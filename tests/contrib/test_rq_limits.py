"""`distwindow.contrib.rq` in a worker of this process, which does not fork."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from rq import SimpleWorker
from rq.exceptions import StopRequested

from distwindow import AsyncLimiter, ConfigurationError, Counts, Limiter, Observer
from distwindow.contrib import tasks as task_gate
from distwindow.contrib.rq import (
    DELAY_ATTRIBUTE,
    SCHEDULER_CHECK_S,
    LimitedSimpleWorker,
    RateLimits,
    job_delay,
    send_back,
)
from tests.programs import run_python
from tests.servers import DropReply, Proxy, Standalone

CALLS: list[int] = []


def job(number: int) -> None:
    CALLS.append(number)


class Client:
    """Methods as jobs: RQ keeps the object, or the class, beside the arguments."""

    def fetch(self, tenant: str, page: int) -> None: ...

    @classmethod
    def fetch_all(cls, tenant: str, page: int) -> None: ...


@pytest.fixture(scope="module")
def own_server() -> Iterator[Standalone]:
    with Standalone() as own:
        yield own


@pytest.fixture
def server(own_server: Standalone) -> Standalone:
    """A server of this module, which is empty."""
    CALLS.clear()
    with own_server.client() as client:
        client.flushall()
    return own_server


def worker_of(url: str) -> tuple[Any, Any]:
    """Return a queue, and a worker that has dequeued nothing yet."""
    connection = redis.Redis.from_url(url)
    queue = rq.Queue("jobs", connection=connection)
    return queue, LimitedSimpleWorker([queue], connection=connection)


def limit_job(limits: str) -> str:
    """Give `job` these limits; return the name by which RQ finds it."""
    vars(job).pop(DELAY_ATTRIBUTE, None)
    RateLimits("memory://").limit(limits=limits, limit_key="rq:{number}")(job)
    return f"{job.__module__}.job"


def test_a_refused_job_is_scheduled_and_leaves_no_copy(server: Standalone) -> None:
    queue, worker = worker_of(server.url)
    jobs = [queue.enqueue(limit_job("1/minute"), 7) for _ in range(3)]
    taken, _ = worker.dequeue_job_and_maintain_ttl(1)
    assert taken.id == jobs[0].id
    # A burst ends when the queue is empty.
    assert worker.dequeue_job_and_maintain_ttl(None) is None
    assert set(queue.scheduled_job_registry.get_job_ids()) == {jobs[1].id, jobs[2].id}
    assert worker.connection.lrange(queue.intermediate_queue_key, 0, -1) == [taken.id.encode()]
    assert [found.get_status().value for found in jobs[1:]] == ["scheduled"] * 2
    assert all(found.retries_left is None for found in jobs)


@pytest.mark.parametrize("lost", [b"WATCH", b"ZADD"])
def test_a_job_is_scheduled_once_where_a_reply_is_lost(
    server: Standalone,
    monkeypatch: pytest.MonkeyPatch,
    lost: bytes,
) -> None:
    monkeypatch.setattr(task_gate, "BROKER_RETRY_S", 0.01)
    queue, _ = worker_of(server.url)
    queue.enqueue(limit_job("1/minute"), 7)
    with Proxy(server.port) as link:
        # Without retries of its own, redis-py raises what we want to see handled.
        no_retries = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        client = redis.Redis(
            port=link.port, retry=no_retries, socket_timeout=1.0, health_check_interval=0
        )
        behind, worker = worker_of(link.url)
        found, _ = worker.dequeue_job_and_maintain_ttl(1)
        behind.connection = client
        commands: list[str] = []
        original = behind.schedule_job

        def counting(*args: Any, **kwargs: Any) -> Any:
            commands.append("schedule")
            return original(*args, **kwargs)

        monkeypatch.setattr(behind, "schedule_job", counting)
        link.fault = DropReply(only=lost, times=1, close=True)
        send_back(client, found, behind, 60.0)
    assert commands == ["schedule"]
    assert queue.scheduled_job_registry.count == 1
    assert queue.connection.llen(queue.intermediate_queue_key) == 0


def test_a_job_that_was_sent_back_is_not_taken_for_a_stuck_one(server: Standalone) -> None:
    """RQ fails a job that it has seen in the intermediate queue twice, with a minute between."""
    queue, worker = worker_of(server.url)
    queue.enqueue(limit_job("1/minute"), 7)
    found, _ = worker.dequeue_job_and_maintain_ttl(1)
    queue.intermediate_queue.cleanup(worker, queue)
    assert queue.intermediate_queue.get_first_seen(found.id) is not None
    send_back(worker.connection, found, queue, 0.0)
    assert queue.intermediate_queue.get_first_seen(found.id) is None


@pytest.mark.parametrize("moment", ["taking", "deciding"])
@pytest.mark.parametrize("limits", ["1/minute", "9/minute"])
def test_a_warm_shutdown_waits_for_a_job_in_hand(
    server: Standalone, monkeypatch: pytest.MonkeyPatch, moment: str, limits: str
) -> None:
    """SIGTERM comes while a second job is taken, or while the limiter is asked for it."""
    queue, worker = worker_of(server.url)
    jobs = [queue.enqueue(limit_job(limits), 7) for _ in range(3)]
    assert worker.dequeue_job_and_maintain_ttl(1)[0].id == jobs[0].id
    if moment == "deciding":
        delay = job.__distwindow_delay__  # type: ignore[attr-defined]

        def stopping(*call: Any) -> float:
            worker._shutdown()
            return float(delay(*call))

        job.__distwindow_delay__ = stopping  # type: ignore[attr-defined]
    else:
        fetch = worker.job_class.fetch

        def stopping_fetch(*args: Any, **kwargs: Any) -> Any:
            worker._shutdown()
            return fetch(*args, **kwargs)

        monkeypatch.setattr(worker.job_class, "fetch", stopping_fetch)
    found = worker.dequeue_job_and_maintain_ttl(1)
    assert worker._stop_requested
    if limits == "1/minute":
        assert found is None
        assert queue.scheduled_job_registry.get_job_ids() == [jobs[1].id]
    else:
        assert found[0].id == jobs[1].id
    assert queue.get_job_ids() == [jobs[2].id]


def test_a_job_that_an_idle_worker_has_taken_is_in_hand(
    server: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the worker waits for one, and SIGTERM while the limiter is asked for it."""
    queue, worker = worker_of(server.url)
    limited = limit_job("9/minute")
    monkeypatch.setattr(job, "__distwindow_delay__", lambda *call: worker._shutdown() or 0.0)
    take = SimpleWorker.dequeue_job_and_maintain_ttl
    jobs: list[Any] = []

    def take_from_empty(*args: Any) -> Any:
        found = take(*args)
        if not jobs:
            jobs.append(queue.enqueue(limited, 7))
        return found

    monkeypatch.setattr(SimpleWorker, "dequeue_job_and_maintain_ttl", take_from_empty)
    assert worker.dequeue_job_and_maintain_ttl(1)[0].id == jobs[0].id
    assert worker._stop_requested


def test_a_worker_that_waits_for_a_job_stops_at_once(server: Standalone) -> None:
    _, worker = worker_of(server.url)
    with pytest.raises(StopRequested):
        worker._shutdown()


def test_a_worker_looks_after_the_scheduler_of_others(server: Standalone) -> None:
    _, worker = worker_of(server.url)
    own = rq.Worker(worker.queues, connection=worker.connection)
    assert worker.dequeue_timeout == SCHEDULER_CHECK_S < own.dequeue_timeout


def test_wrong_options_are_errors_at_the_decorator() -> None:
    def fetch(tenant: str) -> None: ...

    limits = RateLimits("memory://")
    with pytest.raises(ConfigurationError, match="names 'tennant'"):
        limits.limit(limits="5/s", limit_key="{tennant}")(fetch)
    with pytest.raises(ConfigurationError, match=r"fetch' has no limits; write limits="):
        limits.limit(limits=None)(fetch)
    with pytest.raises(ConfigurationError, match=r"above @classmethod; write @limit below it"):
        limits.limit(limits="5/s")(classmethod(fetch))  # type: ignore[type-var,arg-type]


def test_a_function_has_one_decorator() -> None:
    """RQ would ask for the outer limits only."""

    def fetch() -> None: ...

    rate_limits = RateLimits("memory://")
    rate_limits.limit(limits="2/hour")(fetch)
    with pytest.raises(ConfigurationError, match="has limits already; write all of them in one"):
        rate_limits.limit(limits="100/second")(fetch)


@pytest.mark.parametrize("method", ["fetch", "fetch_all"])
def test_a_method_is_counted_under_its_arguments(
    server: Standalone, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    function = getattr(Client, method)
    function = getattr(function, "__func__", function)
    RateLimits("memory://").limit(limits="1/minute", limit_key="{tenant}")(function)
    queue, worker = worker_of(server.url)
    jobs = [
        queue.enqueue(getattr(Client(), method), tenant, page)
        for page in range(2)
        for tenant in ("acme", "initech")
    ]
    started = [worker.dequeue_job_and_maintain_ttl(1)[0].id for _ in range(2)]
    assert worker.dequeue_job_and_maintain_ttl(None) is None
    delattr(function, DELAY_ATTRIBUTE)
    assert started == [found.id for found in jobs[:2]]
    assert queue.scheduled_job_registry.count == 2


@pytest.mark.parametrize("happens", ["cancel", "delete"])
def test_a_job_that_is_withdrawn_while_the_limiter_is_asked_stays_away(
    server: Standalone, happens: str
) -> None:
    queue, worker = worker_of(server.url)
    withdrawn = queue.enqueue(limit_job("1/minute"), 7)
    found, _ = worker.dequeue_job_and_maintain_ttl(1)
    getattr(withdrawn, happens)()
    before = worker.connection.hgetall(withdrawn.key)
    send_back(worker.connection, found, queue, 60.0)
    assert worker.connection.hgetall(withdrawn.key) == before
    assert queue.scheduled_job_registry.count == 0
    assert queue.connection.llen(queue.intermediate_queue_key) == 0


def test_a_job_that_is_cancelled_while_it_is_sent_back_stays_away(
    server: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, worker = worker_of(server.url)
    cancelled = queue.enqueue(limit_job("1/minute"), 7)
    found, _ = worker.dequeue_job_and_maintain_ttl(1)
    set_status = found.set_status

    def cancelling(*args: Any, **kwargs: Any) -> None:
        if not cancelled.is_canceled:
            cancelled.cancel()
        set_status(*args, **kwargs)

    monkeypatch.setattr(found, "set_status", cancelling)
    send_back(worker.connection, found, queue, 60.0)
    assert cancelled.get_status().value == "canceled"
    assert queue.scheduled_job_registry.count == 0


@pytest.mark.parametrize("source", ["import sys\nsys.exit()", "import time\ntime.sleep(20)"])
@pytest.mark.slow
def test_an_import_that_exits_or_hangs_ends_no_worker(
    server: Standalone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    module = f"rq_import_{len(source)}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    queue, worker = worker_of(server.url)
    shortest = 20.0
    for _ in range(3):  # Python loses an alarm that comes while it begins to import
        broken = queue.enqueue(f"{module}.function", job_timeout=1)
        begins_at = time.monotonic()
        assert worker.dequeue_job_and_maintain_ttl(1)[0].id == broken.id
        shortest = min(shortest, time.monotonic() - begins_at)
        sys.modules.pop(module, None)
        if shortest < 10:
            return
    pytest.fail(f"the import ended after {shortest:.0f} s")


def test_a_second_signal_ends_a_worker_that_imports(server: Standalone) -> None:
    queue, worker = worker_of(server.url)
    queue.enqueue(limit_job("9/minute"), 7)
    worker._shutdown_requested_date = datetime.fromtimestamp(0, timezone.utc)

    class Importing:
        """A job whose function is imported when the second signal comes."""

        timeout, id = 10, "j1"

        @property
        def func(self) -> Any:
            return worker.request_force_stop(signal.SIGINT, None)

    with pytest.raises(SystemExit):
        job_delay(worker, Importing())


def counting_job(url: str, prefix: str) -> None:
    """Count something that is sent later, for threads and for tasks."""
    observer = _Written(url, prefix)
    options: Any = {"prefix": prefix, "consistency": "eventual", "observer": observer}
    Limiter(url, "100/hour", **options).try_acquire("k")

    async def count() -> None:
        await AsyncLimiter(url, "100/hour", **options).try_acquire("k")

    asyncio.run(count())


class _Written(Observer):
    def __init__(self, url: str, prefix: str) -> None:
        self._client, self._name = redis.Redis.from_url(url), f"told-{prefix}"

    def on_counts(self, batch: Sequence[Counts]) -> None:
        self._client.incrby(self._name, sum(counts.calls for counts in batch))


@pytest.mark.slow
def test_what_a_job_has_counted_is_sent_though_rq_ends_its_process(
    server: Standalone, prefix: str
) -> None:
    queue, worker = worker_of(server.url)
    for _ in range(3):
        queue.enqueue("tests.contrib.test_rq_limits.counting_job", server.url, prefix)
    program = """
import sys, redis, rq
from distwindow.contrib.rq import LimitedWorker
connection = redis.Redis.from_url(sys.argv[1])
LimitedWorker([rq.Queue("jobs", connection=connection)], connection=connection).work(burst=True)
"""
    ended = run_python("-c", program, server.url)
    with Limiter(server.url, "100/hour", prefix=prefix) as limiter:
        assert limiter.stats("k").windows[0].passed == 6, ended.stderr
    assert worker.connection.get(f"told-{prefix}") == b"6"
