"""From which queue of the broker a message came, so that it goes back to that queue and no other.

Its exchange may deliver to several queues, and kombu's own transports (Redis, SQS, memory) take
each exchange for a direct one that was not declared on the connection that publishes: they drop
what matches no binding, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kombu.transport import virtual
from kombu.transport.virtual.exchange import TopicExchange

_HEADER = "distwindow_delivery"
"""Of a copy: the exchange and the routing key of the original, and the queue of the copy."""


def origin_queue(message: Any, consumed: Any, known: Iterable[Any] = ()) -> str | None:
    """Return the name of the queue from which `message` came; None if that is unknown.

    `consumed` is the `kombu.Consumer` that has received it, `known` are other queues of the
    application, among which it is looked for only if it fits none of those that are consumed.
    Where several fit, each of them has got the message, and it is unknown which this one is.
    """
    delivery = message.delivery_info or {}
    tag = delivery.get("consumer_tag")  # brokers that speak AMQP name it
    if tag is not None and consumed is not None:
        for name, its_tag in consumed._active_tags.items():
            if its_tag == tag:
                return str(name)
    exchange, routing_key = delivery.get("exchange"), delivery.get("routing_key")
    if not exchange:
        return routing_key or None
    for queues in (consumed.queues if consumed is not None else (), known):
        fitting = set()
        for queue in queues:
            bindings = [(queue.exchange, queue.routing_key)]
            bindings += [(one.exchange, one.routing_key) for one in queue.bindings or ()]
            for its_exchange, binding_key in bindings:
                if (
                    its_exchange is not None
                    and its_exchange.name == exchange
                    and _fits(its_exchange.type, binding_key or "", routing_key or "")
                ):
                    fitting.add(str(queue.name))
        if fitting:
            return fitting.pop() if len(fitting) == 1 else None
    return None


def can_be_reached(message: Any, queue: str | None) -> bool:
    """True if what is published for `queue` arrives. For an unknown queue that is so where the
    broker itself knows the bindings of the message's exchange.
    """
    return queue is not None or not isinstance(message.channel, virtual.Channel)


def note_delivery(message: Any, queue: str) -> dict[str, Any]:
    """Return headers by which `restore_delivery` gives the copy what the original came with."""
    delivery = message.delivery_info or {}
    if not delivery.get("exchange"):
        return {}  # the copy comes as the original did, with the same note if there is one
    noted = {"exchange": delivery["exchange"], "routing_key": delivery.get("routing_key")}
    return {_HEADER: {**noted, "queue": queue}}


def restore_delivery(request: Any) -> None:
    """Let a task see the exchange and the routing key of the original: it may read them, and a
    retry is published with them.
    """
    noted = (request.message.headers or {}).get(_HEADER)
    delivery = request.delivery_info
    # A retry takes the header along, and is another message.
    if (
        isinstance(noted, dict)
        and not delivery["exchange"]
        and delivery["routing_key"] == noted.get("queue")
    ):
        delivery.update(exchange=noted.get("exchange"), routing_key=noted.get("routing_key"))


def _fits(exchange_type: str, binding_key: str, routing_key: str) -> bool:
    # A queue of a fanout exchange has no list in Redis: nothing can be published for it alone.
    if exchange_type == "topic":
        topic: Any = TopicExchange  # kombu has no types here
        pattern = topic(None).key_to_pattern(binding_key)
        return re.match(pattern, routing_key) is not None
    return exchange_type == "direct" and binding_key == routing_key
