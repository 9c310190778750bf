"""What is sent back to its queue comes to that queue alone, whatever exchange it came through."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker.request import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.entity import Exchange, Queue
from kombu.transport import virtual
from kombu.utils.uuid import uuid

from distwindow.contrib.celery.send_back import (
    can_be_reached,
    origin_queue,
    publish_copy,
    restore_delivery,
)

ETA = datetime(2030, 1, 2, tzinfo=timezone.utc)
WORDS = st.sampled_from(["a", "b", "c"])


@pytest.fixture(scope="module")
def app() -> Any:
    app = Celery("test", broker="memory://", set_as_current=False)

    def fetch() -> None: ...

    app.task(fetch, name="proj.fetch", shared=False)
    app.finalize()
    return app


def consumer_of(*queues: Queue, tags: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(queues=list(queues), _active_tags=tags or {})


def size(app: Any, queue: Queue) -> int:
    with app.connection_for_read() as connection:
        return int(connection.default_channel.queue_declare(queue.name).message_count)


def get(app: Any, queue: Queue) -> Any:
    with app.connection_for_read() as connection:
        message = queue(connection.default_channel).get()
        assert message is not None
        message.ack()
        return message


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["topic", "direct"]),
    st.lists(WORDS, min_size=1, max_size=3).map(".".join),
    st.integers(1, 3),
)
def test_the_copy_comes_to_one_queue_and_is_seen_as_the_original(
    app: Any, exchange_type: str, routing_key: str, times: int
) -> None:
    exchange = Exchange(uuid(), exchange_type)
    wide = "#" if exchange_type == "topic" else routing_key
    one, other = Queue(uuid(), exchange, routing_key), Queue(uuid(), exchange, wide)
    app.send_task(
        "proj.fetch", exchange=exchange.name, routing_key=routing_key, declare=[one, other]
    )
    assert size(app, one) == size(app, other) == 1
    message = get(app, other)
    for _ in range(times):
        queue = origin_queue(message, consumer_of(other))
        assert queue == other.name
        publish_copy(app, message, ETA, queue)
        assert (size(app, one), size(app, other)) == (1, 1)
        message = get(app, other)
        request = Request(message, app=app, hostname="h", task=app.tasks["proj.fetch"])
        restore_delivery(request)
        assert request.delivery_info["exchange"] == exchange.name
        assert request.delivery_info["routing_key"] == routing_key
        assert request.request_dict["delivery_info"] is request.delivery_info


def test_a_broker_that_names_the_consumer_names_the_queue() -> None:
    fanout = Exchange("news", "fanout")
    consumed = consumer_of(Queue("q1", fanout), Queue("q2", fanout), tags={"q1": "t1", "q2": "t2"})
    delivery = {"exchange": "news", "routing_key": "", "consumer_tag": "t2"}
    message = SimpleNamespace(delivery_info=delivery, channel=None)
    assert origin_queue(message, consumed) == "q2"


def test_bindings_count_and_consumed_queues_come_first() -> None:
    exchange = Exchange("x", "topic")
    bound = Queue("bound", [exchange.binding("a.*"), exchange.binding("b.#")])
    known = Queue("known", exchange, "b.c")
    message = SimpleNamespace(delivery_info={"exchange": "x", "routing_key": "b.c"})
    assert origin_queue(message, consumer_of(bound), [known]) == "bound"
    assert origin_queue(message, consumer_of(), [known]) == "known"
    assert origin_queue(message, None, [bound, known]) is None  # both have got it
    assert origin_queue(message, consumer_of(bound, known)) is None
    message.delivery_info["routing_key"] = "c.c"
    assert origin_queue(message, consumer_of(bound), [known]) is None


def test_where_nothing_can_be_published_for_one_queue_the_message_stays() -> None:
    queue = Queue("q", Exchange("news", "fanout"))
    delivery = {"exchange": "news", "routing_key": ""}
    of_kombu = SimpleNamespace(
        delivery_info=delivery, channel=virtual.Channel.__new__(virtual.Channel)
    )
    assert origin_queue(of_kombu, consumer_of(queue)) is None
    assert not can_be_reached(of_kombu, None)
    assert can_be_reached(of_kombu, "q")
    assert can_be_reached(SimpleNamespace(channel=object()), None)


def test_a_retry_is_another_message(app: Any) -> None:
    """It takes the headers along; the queue to which it is sent is its own."""
    message = SimpleNamespace(
        headers={"distwindow_delivery": {"exchange": "x", "routing_key": "k", "queue": "q"}}
    )
    moved = {"exchange": "", "routing_key": "another"}
    restore_delivery(SimpleNamespace(message=message, delivery_info=moved))
    assert moved == {"exchange": "", "routing_key": "another"}
