"""Messages on a real Redis that a worker had when its connection was lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.connection import Connection

from distwindow.contrib.celery.send_back import (
    GivenBack,
    forget,
    is_taken_away,
    survive_lost_connections,
)
from distwindow.contrib.celery.worker import CeleryWorkerPort
from distwindow.contrib.celery.worker_steps import ConsumerStep
from tests.servers import Standalone

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Standalone]:
    with Standalone() as server:
        yield server


class Worker:
    """One connection of a worker, which receives messages and does not acknowledge them."""

    def __init__(self, server: Standalone, **options: Any) -> None:
        options = {"visibility_timeout": TIMEOUT_S, "global_keyprefix": "app:", **options}
        self.connection = Connection(server.url, transport_options=options)
        self.queue = self.connection.SimpleQueue("jobs")
        self.channel = self.queue.channel

    def receive(self) -> tuple[Any, float]:
        message = self.queue.get(timeout=5)
        return message, time.time()

    def lose(self) -> None:
        """Without putting anything back, as while the broker is away."""
        self.channel.do_restore = False
        self.connection.close()


@pytest.mark.parametrize("then", ["held", "acknowledged", "redelivered"])
def test_only_what_the_broker_still_holds_for_this_worker_is_put_back(
    server: Standalone, then: str
) -> None:
    server.client().flushall()
    lost, other = Worker(server), Worker(server)
    for number in range(3):
        lost.queue.put(number)
    received = [lost.receive() for _ in range(3)]
    given_back = GivenBack()
    for message, at in received:
        given_back.add(message, at)
    lost.lose()
    if then == "acknowledged":
        for message, _ in received:
            other.channel.qos.ack(message.delivery_tag)
    elif then == "redelivered":
        for message, _ in reversed(received):
            other.channel.qos.restore_by_tag(message.delivery_tag)
        assert [other.receive()[0].payload for _ in range(3)] == [0, 1, 2]
    given_back.put_back(other.channel)
    waiting = server.client().llen("app:jobs")
    assert waiting == (3 if then == "held" else 0)
    assert [other.receive()[0].payload for _ in range(waiting)] == list(range(waiting))
    assert not given_back._held
    other.lose()


def test_what_another_worker_has_got_is_neither_kept_nor_acknowledged(server: Standalone) -> None:
    server.client().flushall()
    worker = Worker(server)
    worker.queue.put(1)
    message, at = worker.receive()
    assert not is_taken_away(message, at)
    assert is_taken_away(message, at - TIMEOUT_S)
    forget(message)
    worker.channel.qos._flush()
    assert not worker.channel.qos._delivered  # it is not counted, and not put back at the end
    assert server.client().hlen("app:unacked") == 1
    worker.lose()


def test_without_a_visibility_timeout_nothing_is_taken_away(server: Standalone) -> None:
    worker = Worker(server, ack_emulation=False)
    worker.queue.put(1)
    message, at = worker.receive()
    assert not is_taken_away(message, at - 1000 * TIMEOUT_S)
    worker.lose()


def test_a_worker_survives_messages_of_a_connection_that_has_ended(server: Standalone) -> None:
    """kombu closes a channel for the second time when its transport has been taken apart, and a
    task that has ended meanwhile is acknowledged.
    """
    worker = Worker(server)
    errors = worker.connection.connection_errors
    survive_lost_connections(worker.channel, lambda: None)
    worker.queue.put(1)
    message, _ = worker.receive()
    worker.channel.connection.client = None
    worker.connection.maybe_close_channel(worker.channel)
    message.ack_log_error(logging.getLogger("test"), errors)
    with pytest.raises(errors):
        message.reject()


def test_what_ran_is_acknowledged_where_kombu_can_though_its_connection_has_ended(
    server: Standalone,
) -> None:
    """kombu opens another one for the channel when it puts back what that had."""
    server.client().flushall()
    worker = Worker(server)
    survive_lost_connections(worker.channel, lambda: None)
    worker.queue.put(1)
    message, _ = worker.receive()
    worker.channel.connection.client = None
    message.ack_log_error(logging.getLogger("test"), worker.connection.connection_errors)
    assert server.client().hlen("app:unacked") == 0


def test_the_gate_is_closed_before_the_first_message_is_put_back(server: Standalone) -> None:
    """kombu makes a transaction for each, and under gevent the gate's timer fires meanwhile."""
    server.client().flushall()
    worker = Worker(server)
    waiting: list[int] = []
    gate: Any = SimpleNamespace(
        worker=CeleryWorkerPort(None), open=lambda: None,
        close=lambda: waiting.append(server.client().llen("app:jobs")),
    )  # fmt: skip
    consumer: Any = SimpleNamespace(
        controller=SimpleNamespace(distwindow_gate=gate), connection_errors=(),
        task_consumer=SimpleNamespace(channel=worker.channel),
    )  # fmt: skip
    ConsumerStep.__new__(ConsumerStep).start(consumer)
    for number in range(3):
        worker.queue.put(number)
    for _ in range(3):
        worker.receive()
    worker.connection.close()
    assert waiting == [0]
    assert server.client().llen("app:jobs") == 3
