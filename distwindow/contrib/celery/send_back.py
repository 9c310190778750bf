"""Sends a message back to its queue, unchanged but for the time before which nobody takes it up.

The body and all other headers stay as they came: links, chords, groups, retries, the time limits
and what users have added. The copy is published first and the message acknowledged then: a worker
that is killed in between leaves the task in the queue twice, and never loses it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from .origin_queue import note_delivery

# What kombu or the broker sets anew for the copy.
_SET_ANEW = {
    "application_headers", "body_encoding", "content_encoding", "content_type", "delivery_info",
    "delivery_mode", "delivery_tag", "expiration", "priority",
}  # fmt: skip


def can_be_sent_back(message: Any) -> bool:
    """True for messages of Celery's task protocol 2, whose eta is a header."""
    return "task" in (message.headers or {})


def publish_copy(app: Any, message: Any, eta: datetime, queue: str | None = None) -> None:
    """Publish `message` again with this eta, for `queue` alone, or as it came if that is None.
    Raises what the broker's client raises.
    """
    properties: dict[str, Any] = message.properties or {}
    delivery = message.delivery_info or {}
    exchange, routing_key = delivery.get("exchange") or "", delivery.get("routing_key")
    headers = {**message.headers, "eta": eta.isoformat()}
    if queue is not None:
        headers.update(note_delivery(message, queue))
        exchange, routing_key = "", queue
    expiration = properties.get("expiration")
    more = {name: value for name, value in properties.items() if name not in _SET_ANEW}
    with app.producer_pool.acquire(block=True) as producer:
        producer.publish(
            message.body,
            exchange=exchange,
            routing_key=routing_key,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            # kombu has decompressed the body: the same algorithm gives the same bytes again.
            compression=headers.get("compression"),
            headers=headers,
            priority=properties.get("priority") or 0,
            delivery_mode=properties.get("delivery_mode"),
            # In ms here, and in s as an argument of kombu, which rounds down.
            expiration=None if expiration is None else (int(expiration) + 0.5) / 1000,
            retry=False,
            **more,
        )
