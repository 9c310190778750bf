"""Fleets of real Celery workers with RabbitMQ as the broker.

`.ci/run` leaves these tests out, because no package of PyPI carries RabbitMQ. Run them with
`DISTWINDOW_TEST_AMQP_URL=amqp://guest:guest@localhost:5672// scripts/test -m rabbitmq`. Not with
`-n 2`: the workers of two tests at once would have the same names in one broker.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.celery.processes import Fleet
from tests.celery.test_fleet import (
    LIMITED,
    check_bound,
    overtake_the_line,
    reach_what_is_behind_the_line,
)
from tests.servers import Proxy
from tests.servers.wait import until

URL = os.environ.get("DISTWINDOW_TEST_AMQP_URL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not URL, reason="DISTWINDOW_TEST_AMQP_URL names no RabbitMQ"),
]


class Queue:
    """A queue of its own for each test. `messages`: how many are ready to be delivered in it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"test-{uuid4().hex}"

    def fleet(self, options: dict[str, Any], *, broker: str | None = None, **conf: Any) -> Fleet:
        conf = {"task_default_queue": self.name, **conf}
        return Fleet(options=options, broker=broker or self.url, publisher=self.url, conf=conf)

    def _channel(self, method: str, **options: Any) -> Any:
        from kombu.connection import Connection

        with Connection(self.url) as connection:
            return getattr(connection.default_channel, method)(self.name, **options)

    @property
    def messages(self) -> int:
        return int(self._channel("queue_declare", passive=True).message_count)

    def delete(self) -> None:
        self._channel("queue_delete")


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue(URL)
    yield made
    made.delete()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_two_workers_keep_one_limit(queue: Queue, pool: str, kind: str) -> None:
    with queue.fleet(LIMITED, task_default_queue_type=kind) as fleet:
        fleet.start_all(2, pool=pool, slots=8 if pool == "gevent" else 2)
        fleet.send_all(100, "fetch")
        fleet.wait_started(100)
        assert sorted(fleet.started()) == list(range(100))
        assert fleet.recorded("sent_back") == []
        check_bound(fleet)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_killed_worker_loses_nothing(queue: Queue, late: bool) -> None:
    with queue.fleet({**LIMITED, "acks_late": late}) as fleet:
        doomed = fleet.start_all(2)
        fleet.send_all(60, "fetch", 0.02)
        until(lambda: len(fleet.started()) >= 25, what="starts", timeout=20)
        fleet.kill(doomed)
        # With early acknowledgement Celery itself loses what the two killed processes had begun.
        until(lambda: len(set(fleet.started())) >= (60 if late else 58), what="all", timeout=60)
        assert max(Counter(fleet.started()).values()) <= 2
        assert len(fleet.started()) <= 62
        check_bound(fleet)


def test_connections_to_the_broker_are_cut(queue: Queue) -> None:
    """Nothing is lost: RabbitMQ delivers again what was not acknowledged."""
    address = urlsplit(queue.url)
    with Proxy(address.port or 5672) as proxy:
        broker = queue.url.replace(f":{address.port}", f":{proxy.port}")
        with queue.fleet(LIMITED, broker=broker) as fleet:
            fleet.start_all(2)
            fleet.send_all(60, "fetch")
            for times in (1, 2):
                until(lambda: len(fleet.started()) >= 15 * times, what="starts", timeout=30)  # noqa: B023
                proxy.cut()
            until(lambda: len(set(fleet.started())) == 60, what="all", timeout=60)
            check_bound(fleet)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_a_shutdown_gives_what_waits_back_to_the_broker(
    queue: Queue, number: signal.Signals
) -> None:
    with queue.fleet({"limits": "3/minute"}) as fleet:
        worker = fleet.start()
        fleet.send_all(40, "fetch")
        until(lambda: fleet.records.llen("parked") == 37, what="a line", timeout=20)
        fleet.wait_started(3)
        fleet.stop(worker, number)
        until(lambda: queue.messages == 37, what="messages")


@pytest.mark.parametrize("exchange", ["direct", "topic"])
def test_what_is_kept_too_long_is_sent_back_to_its_queue(queue: Queue, exchange: str) -> None:
    conf: dict[str, Any] = {
        "distwindow_max_hold": 2.0,
        "task_default_exchange": f"{queue.name}-exchange",
        "task_default_exchange_type": exchange,
        "task_default_routing_key": "tests.fetch",
    }
    with queue.fleet({"limits": "10/second"}, **conf) as fleet:
        fleet.start_all(2)
        fleet.send_all(100, "fetch")
        fleet.wait_started(100, timeout=60)
        assert sorted(fleet.started()) == list(range(100))
        assert fleet.records.llen("sent_back") > 0
        check_bound(fleet)
        until(lambda: queue.messages == 0, what="an empty queue")


def test_tasks_with_an_eta_beyond_max_parked_are_sent_back(queue: Queue) -> None:
    with queue.fleet({"limits": "10/second"}, distwindow_max_parked=5) as fleet:
        fleet.start_all(2)
        fleet.send_all(60, "fetch", countdown=1)
        fleet.wait_started(60, timeout=60)
        assert sorted(fleet.started()) == list(range(60))
        assert fleet.records.llen("sent_back") > 0
        check_bound(fleet)


def test_what_is_behind_more_than_max_parked_is_reached(queue: Queue) -> None:
    with queue.fleet({"limits": "1/hour"}, distwindow_max_parked=50) as fleet:
        reach_what_is_behind_the_line(fleet)


def test_a_task_of_the_largest_priority_overtakes_its_line(queue: Queue) -> None:
    with queue.fleet({"limits": "4/second"}, task_queue_max_priority=9) as fleet:
        overtake_the_line(fleet, usual=1, urgent=9)


def test_a_worker_that_was_frozen_runs_nothing_that_others_have_got(queue: Queue) -> None:
    """RabbitMQ ends its connection when heartbeats are missing."""
    count = 160
    with queue.fleet(LIMITED, broker_heartbeat=2) as fleet:
        frozen = fleet.start_all(2)
        fleet.send_all(count, "fetch")
        until(lambda: len(fleet.started()) >= 25, what="starts", timeout=20)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            until(lambda: len(set(fleet.started())) >= count - 4, what="all", timeout=60)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        until(lambda: len(set(fleet.started())) == count, what="all", timeout=60)
        until(lambda: fleet.log(0).count("Connected to") == 2, what="the next connection")
        until(lambda: all(one["line count"] == 0 for one in fleet.inspect().values()), what="none")
        assert len(fleet.started()) <= count + 4
