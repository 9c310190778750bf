"""`distwindow.contrib.rq` in a worker of this process, which does not fork."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from distwindow import ConfigurationError
from tests.servers import DropReply, Proxy, Standalone

CALLS: list[int] = []


def job(number: int) -> None:
    CALLS.append(number)


@pytest.fixture
def server() -> Iterator[Standalone]:
    CALLS.clear()
    with Standalone() as own:
        yield own


def worker_of(url: str) -> tuple[Any, Any]:
    """Return a queue, and a worker that has dequeued nothing yet."""
    import rq

    from distwindow.contrib.rq import LimitedSimpleWorker

    connection = redis.Redis.from_url(url)
    queue = rq.Queue("jobs", connection=connection)
    return queue, LimitedSimpleWorker([queue], connection=connection)


def limit_job(limits: str) -> str:
    """Give `job` these limits; return the name by which RQ finds it."""
    from distwindow.contrib.rq import RateLimits

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


def test_a_job_is_scheduled_once_where_the_reply_is_lost(
    server: Standalone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from distwindow.contrib import rq as contrib
    from distwindow.contrib import task_gate

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
            if len(commands) == 1:
                link.fault = DropReply(only=b"ZADD", times=1, close=True)
            return original(*args, **kwargs)

        monkeypatch.setattr(behind, "schedule_job", counting)
        contrib._send_back(client, found, behind, 60.0)
    assert commands == ["schedule"]
    assert "the broker did not take back job" in caplog.text
    assert queue.scheduled_job_registry.count == 1
    assert queue.connection.llen(queue.intermediate_queue_key) == 0


def test_a_job_that_was_sent_back_is_not_taken_for_a_stuck_one(server: Standalone) -> None:
    """RQ fails a job that it has seen in the intermediate queue twice, with a minute between."""
    from distwindow.contrib.rq import _send_back

    queue, worker = worker_of(server.url)
    queue.enqueue(limit_job("1/minute"), 7)
    found, _ = worker.dequeue_job_and_maintain_ttl(1)
    queue.intermediate_queue.cleanup(worker, queue)
    assert queue.intermediate_queue.get_first_seen(found.id) is not None
    _send_back(worker.connection, found, queue, 0.0)
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


def test_a_worker_that_waits_for_a_job_stops_at_once(server: Standalone) -> None:
    from rq.exceptions import StopRequested

    _, worker = worker_of(server.url)
    with pytest.raises(StopRequested):
        worker._shutdown()


def test_a_worker_looks_after_the_scheduler_of_others(server: Standalone) -> None:
    import rq

    from distwindow.contrib.rq import SCHEDULER_CHECK_S

    _, worker = worker_of(server.url)
    own = rq.Worker(worker.queues, connection=worker.connection)
    assert worker.dequeue_timeout == SCHEDULER_CHECK_S < own.dequeue_timeout


def test_wrong_options_are_errors_at_the_decorator() -> None:
    from distwindow.contrib.rq import RateLimits

    limits = RateLimits("memory://")
    with pytest.raises(ConfigurationError, match="names 'tennant'"):
        limits.limit(limits="5/s", limit_key="{tennant}")(job)
    with pytest.raises(ConfigurationError, match="no limits"):
        limits.limit(limits=None)(job)


class Shop:
    """A class whose methods are jobs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def order(self, customer: str) -> None: ...


def test_a_method_is_limited_by_its_own_arguments(server: Standalone) -> None:
    from distwindow.contrib.rq import RateLimits

    rate_limits = RateLimits("memory://")
    rate_limits.limit(limits="1/minute", limit_key="{self.name}:{customer}")(Shop.order)
    queue, worker = worker_of(server.url)
    calls = [("north", "ada"), ("north", "bob"), ("south", "ada"), ("north", "ada")]
    jobs = [queue.enqueue(Shop(shop).order, customer) for shop, customer in calls]
    taken = [worker.dequeue_job_and_maintain_ttl(None)[0].id for _ in range(3)]
    assert taken == [job.id for job in jobs[:3]]
    assert worker.dequeue_job_and_maintain_ttl(None) is None
    assert queue.scheduled_job_registry.get_job_ids() == [jobs[3].id]
