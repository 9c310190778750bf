"""A message that is sent back is the same message, but for its eta."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.transport import pyamqp, redis, virtual
from kombu.utils.uuid import uuid

from distwindow.contrib.celery.send_back import can_be_sent_back, line_rank, publish_copy

ETA = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=timezone.utc)
NEW_FOR_EACH_DELIVERY = {"delivery_tag"}

options = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(0, 9),
        "compression": st.sampled_from(["gzip", "bzip2", "zlib"]),
        "serializer": st.sampled_from(["json", "pickle", "yaml"]),
        "expires": st.integers(1, 10_000),
        "retries": st.integers(0, 9),
        "time_limit": st.integers(1, 100),
        "shadow": st.text(min_size=1),
        "headers": st.dictionaries(
            st.text(min_size=1).filter(lambda name: name != "eta"), st.text()
        ),
        "expiration": st.integers(1, 10_000).map(lambda ms: ms / 1000),
        "group_id": st.uuids().map(str),
        "reply_to": st.text(min_size=1),
    },
)


def publish_and_get(app: Any, queue: str, **options: Any) -> Any:
    app.send_task("proj.fetch", ["größe", b"bytes".hex()], {"n": 1}, queue=queue, **options)
    return get(app, queue)


def get(app: Any, queue: str) -> Any:
    with app.connection_for_read() as connection:
        message = app.amqp.queues[queue](connection.default_channel).get()
        assert message is not None
        message.ack()
        return message


@pytest.fixture(scope="module")
def app() -> Any:
    return Celery("test", broker="memory://", set_as_current=False)


@settings(deadline=None, max_examples=60)
@given(options=options)
def test_all_but_the_eta_stays(app: Any, options: dict[str, Any]) -> None:
    queue = uuid()
    before = publish_and_get(app, queue, **options)
    assert can_be_sent_back(before)
    publish_copy(app, before, ETA)
    after = get(app, queue)
    assert after.body == before.body
    assert (after.content_type, after.content_encoding) == (
        before.content_type,
        before.content_encoding,
    )
    assert after.headers == {**before.headers, "eta": ETA.isoformat()}
    kept = {name for name in before.properties if name not in NEW_FOR_EACH_DELIVERY}
    assert {name: after.properties[name] for name in kept} == {
        name: before.properties[name] for name in kept
    }
    assert set(after.properties) == set(before.properties)
    # And once more: what is sent back may be sent back again.
    publish_copy(app, after, ETA)
    assert get(app, queue).body == before.body


def test_a_message_of_task_protocol_1_is_not_sent_back() -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.task_protocol = 1
    assert not can_be_sent_back(publish_and_get(app, uuid()))


@pytest.mark.parametrize(
    ("kind", "ranked"),
    [
        (redis.Channel, [0, 0, 3, 9, 0]),
        (pyamqp.Channel, [0, -2, -3, -9, 0]),
        (virtual.Channel, [0, 0, 0, 0, 0]),
    ],
)
def test_the_order_of_priorities_is_that_of_the_transport(kind: Any, ranked: list[int]) -> None:
    """Redis serves its steps 0, 3, 6 and 9 in this order, RabbitMQ the largest number first."""
    channel: Any = kind.__new__(kind)
    given = [{"priority": priority} for priority in (0, 2, 3, 9)]
    messages = [SimpleNamespace(channel=channel, properties=one) for one in [*given, {}]]
    assert [line_rank(message) for message in messages] == ranked
