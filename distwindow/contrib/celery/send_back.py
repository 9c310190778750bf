"""Messages that leave this worker without having run.

Why                             what is done
it is kept for too long         `publish_copy`: a copy goes to its queue, and it is acknowledged
there is no room for it         the same
its connection was lost         `GivenBack`: with the next connection it is put back at once, if the
                                broker holds it for the worker until its visibility timeout
the broker has given it to      `is_taken_away`, `forget`: it is no longer the worker's, and is
another worker already          neither run nor acknowledged

A copy is unchanged but for the time before which nobody takes it up. The body and all other headers
stay as they came: links, chords, groups, retries, the time limits and what users have added. The
copy is published first and the message acknowledged then: a worker that is killed in between leaves
the task in the queue twice, and never loses it.

A copy goes to the queue from which its message came, and no other. Its exchange may deliver to
several queues, and kombu's own transports (Redis, SQS, memory) take each exchange for a direct one
that was not declared on the connection that publishes: they drop what matches no binding, without
an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from operator import itemgetter
from typing import Any

from celery.utils.log import get_logger
from kombu.transport import virtual
from kombu.transport.virtual.exchange import TopicExchange
from redis import Redis

logger = get_logger("celery.distwindow")

_HEADER = "distwindow_delivery"
"""Of a copy: the exchange and the routing key of the original, and the queue of the copy."""

_KEPT_PART = 0.95
"""The part of the visibility timeout for which a message is certainly this worker's, though clocks
of other hosts may be ahead.
"""

_PUT_BACK = """
local score = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '-1')
if score < tonumber(ARGV[2]) or score > tonumber(ARGV[3]) then
    return 0
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[4])
return 1
"""
"""Puts a message of kombu back if the broker holds it since the time given. The message keeps its
delivery tag when it is delivered again, to another worker perhaps: then the index has the time of
that, and not of the moment before this worker had it.
"""

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
        if exchange:  # otherwise the copy comes as the original did, with its note if there is one
            noted = {"exchange": exchange, "routing_key": routing_key, "queue": queue}
            headers[_HEADER] = noted
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
        fitting = {
            str(queue.name) for queue in queues if _is_bound(queue, exchange, routing_key or "")
        }
        if fitting:
            return fitting.pop() if len(fitting) == 1 else None
    return None


def can_be_reached(message: Any, queue: str | None) -> bool:
    """True if what is published for `queue` arrives. For an unknown queue that is so where the
    broker itself knows the bindings of the message's exchange.
    """
    return queue is not None or not _is_of_kombu(message.channel)


def restore_delivery(request: Any) -> None:
    """Restore the exchange and the routing key of the original: a task may read them, and a retry
    is published with them.
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


def _is_bound(queue: Any, exchange: str, routing_key: str) -> bool:
    """True if a queue gets, by its name alone, what is published so. A queue of a fanout exchange
    has no list in Redis: nothing can be published for it alone.
    """
    for one in (queue, *(queue.bindings or ())):
        if one.exchange is None or one.exchange.name != exchange:
            continue
        binding_key = one.routing_key or ""
        if one.exchange.type == "topic":
            topic: Any = TopicExchange  # kombu has no types here
            if re.match(topic(None).key_to_pattern(binding_key), routing_key):
                return True
        elif one.exchange.type == "direct" and binding_key == routing_key:
            return True
    return False


def line_rank(message: Any) -> int:
    """Return the place of a message among those of one line, by the order of its transport: the
    smallest is first. Transports without priorities have one rank.
    """
    channel: Any = message.channel
    priority: Any = (message.properties or {}).get("priority")
    if not isinstance(priority, int):
        priority = 0
    if not _is_of_kombu(channel):
        return -int(priority)  # of AMQP, where the largest number is first
    if hasattr(channel, "priority_steps"):
        return int(channel.priority(max(0, priority)))  # of Redis, where the smallest is first
    return 0


def is_taken_away(message: Any, received_at: float) -> bool:
    """True if the broker has given a message that was received at `received_at` (`time.time`) to
    another worker, or does so at any moment, because its visibility timeout is over: the worker was
    frozen, say. Brokers without one end the connection, and with it all that waits here.
    """
    channel = message.channel
    if not getattr(channel, "ack_emulation", True):  # of Redis: there is no timeout then
        return False
    timeout_s = getattr(channel, "visibility_timeout", None)
    if not timeout_s or _is_broadcast(message):
        return False
    # The day's clock: so does the broker, and others stand still while a machine sleeps.
    return time.time() - received_at >= _KEPT_PART * float(timeout_s)


def forget(message: Any) -> None:
    """Remove a message that is another worker's now from the prefetch count. It has the same
    delivery tag there, so it is neither acknowledged nor put back for it.
    """
    qos: Any = getattr(message.channel, "qos", None)
    if qos is not None and qos._delivered.get(message.delivery_tag) is message:
        qos._quick_ack(message.delivery_tag)


class GivenBack:
    """Messages that a worker had when a connection to the broker was lost, and that will not run in
    it. kombu puts them back when it closes the connection, and cannot while the broker is away. The
    next connection puts them back, where the broker is Redis; AMQP brokers do it on their own.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, Any]] = {}
        """By delivery tag: when it was received, and the message."""

    def add(self, message: Any, received_at: float) -> None:
        if _is_of_kombu(message.channel) and not _is_broadcast(message):
            self._held[message.delivery_tag] = (received_at, message)

    def put_back(self, channel: Any) -> None:
        """Put the messages back that the broker still holds for this worker. Raises what the
        broker's client raises; then they are left for the next connection.
        """
        if not hasattr(getattr(channel, "qos", None), "restore_by_tag"):
            self._held.clear()
        if not self._held:
            return
        # kombu does the same in a transaction for each, which fails while others change the hash.
        pipe = Redis(connection_pool=channel.pool).pipeline(transaction=False)
        prefix = channel.global_keyprefix
        # Each goes to the front of its queue: the first one last.
        for received_at, message in sorted(self._held.values(), key=itemgetter(0), reverse=True):
            pushes = _Pushes()
            delivery = message.delivery_info
            channel._do_restore_message(
                message._raw, delivery["exchange"], delivery["routing_key"], pushes
            )
            if len(pushes) == 1:  # of several queues it is unknown from which it came
                queue, text = pushes[0]
                pipe.eval(
                    _PUT_BACK, 3, prefix + channel.unacked_index_key, prefix + channel.unacked_key,
                    prefix + queue, message.delivery_tag, received_at - 1.0, received_at, text,
                )  # fmt: skip
        put_back = sum(pipe.execute())
        self._held.clear()
        if put_back:
            logger.info("%d waiting tasks of the lost connection were put back", put_back)


class _Pushes(list[tuple[str, Any]]):
    """Records what kombu would push to put a message back."""

    def rpush(self, queue: str, text: Any) -> None:
        self.append((queue, text))


def survive_lost_connections(channel: Any, end_connection: Callable[[], None]) -> None:
    """Patch kombu to raise what Celery expects when a message of a connection that has ended is
    acknowledged or put back. On Redis it raises `AttributeError`, which ends the worker, where it
    has no connection left for that.

    `end_connection` is called before kombu puts the first message back. It does so with one
    transaction for each, and under gevent others work meanwhile: nothing may start that is another
    worker's by then.
    """
    qos: Any = getattr(channel, "qos", None)
    if not hasattr(qos, "restore_by_tag"):
        return

    def guard(method: Any, before: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before()
            try:
                return method(*args, **options)
            except AttributeError:
                if getattr(channel.connection, "client", None) is not None:
                    raise
                raise ConnectionError("the connection to the broker has ended") from None

        return call

    qos.ack, qos.reject = guard(qos.ack), guard(qos.reject)
    qos.restore_unacked = guard(qos.restore_unacked, end_connection)


def _is_of_kombu(channel: Any) -> bool:
    """True for transports that emulate AMQP: all but those that speak it."""
    return isinstance(channel, virtual.Channel)


def _is_broadcast(message: Any) -> bool:
    """True for a message of a fanout exchange of Redis, which never delivers it again."""
    delivery = message.delivery_info or {}
    return delivery.get("exchange") in getattr(message.channel, "_fanout_to_queue", ())
