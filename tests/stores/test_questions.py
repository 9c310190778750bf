"""What is asked of sentinels and of the hosts of a cluster, and what follows from the answers. Both
are generators, which are given the replies here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import ConfigurationError
from distwindow.ring.clock import SYSTEM
from distwindow.stores.redis.slot_map import SlotMap
from distwindow.stores.redis.topology import CallSettings, SingleServer
from tests.clock_and_stores import ManualClock

OLD, NEW = ("10.0.0.1", 6379), ("10.0.0.2", 6379)
AWAY = redis.ConnectionError("no route")
Named = tuple[int, tuple[str, int]]
"""The number of a configuration, and the primary that it names."""


class Asked:
    """A client of one sentinel."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.connection_pool = redis.ConnectionPool(max_connections=1)


class Set:
    """A Sentinel set as one limiter sees it."""

    def __init__(self, sentinels: int = 3, connected_to: tuple[str, int] | None = OLD) -> None:
        self.manager = SimpleNamespace(sentinels=[Asked(name) for name in range(sentinels)])
        pool: Any = SimpleNamespace(
            connection_kwargs={}, connection_class=redis.Connection, service_name="main",
            sentinel_manager=self.manager,
        )  # fmt: skip
        self.topology = SingleServer(pool, CallSettings(SYSTEM, 1.0))
        self.topology.node.connected_to = connected_to

    def hear(self, *replies: Named | Exception | bytes) -> bool:
        """Have the sentinels reply, in the order in which they are asked. Return whether
        connections are opened again.
        """
        before = self.topology.node.generation
        questions = self.topology.ask_sentinels()
        given: Any = None
        with suppress(StopIteration):
            for reply in (*replies, None):
                _, words = questions.send(given)
                assert words == ("SENTINEL", "MASTERS")
                given = [of_masters(*reply)] if isinstance(reply, tuple) else reply
        return self.topology.node.generation != before

    @property
    def order(self) -> list[int]:
        return [sentinel.name for sentinel in self.manager.sentinels]


def of_masters(epoch: int, primary: tuple[str, int]) -> list[bytes]:
    host, port = primary
    pairs = {"name": "main", "ip": host, "port": port, "config-epoch": epoch}
    return [str(word).encode() for pair in pairs.items() for word in pair]


def test_a_primary_that_is_named_as_before_changes_nothing() -> None:
    nodes = Set()
    for _ in range(300):  # with connections of their own, and none of a pool
        assert not nodes.hear((7, OLD), (7, OLD), (7, OLD))
    assert nodes.order == [0, 1, 2]


def test_one_sentinel_that_knows_of_a_failover_is_enough() -> None:
    nodes = Set()
    assert not nodes.hear((7, OLD), (7, OLD), (7, OLD))
    assert nodes.hear((7, OLD), (8, NEW), (7, OLD))
    assert nodes.order == [1, 2, 0]
    assert not nodes.hear((8, NEW), (8, NEW), (7, OLD))


def test_the_first_answers_are_compared_with_where_the_connection_goes() -> None:
    """It was opened through a sentinel that did not know yet."""
    assert Set(connected_to=OLD).hear((7, OLD), (8, NEW), (8, NEW))
    assert not Set(connected_to=NEW).hear((7, OLD), (8, NEW), (8, NEW))
    nodes = Set(connected_to=None)  # it is being opened
    assert not nodes.hear((7, OLD), (8, NEW), (8, NEW))
    nodes.topology.node.connected_to = OLD
    assert nodes.hear((8, NEW), (8, NEW), (8, NEW))


def test_those_that_know_less_are_not_believed_while_the_others_are_silent() -> None:
    nodes = Set()
    nodes.hear((7, OLD), (8, NEW), (8, NEW))
    assert not nodes.hear((7, OLD), AWAY, AWAY)
    assert nodes.hear((1, OLD), (1, OLD), AWAY), "most have been set up anew"


@pytest.mark.parametrize("reply", [AWAY, b"PONG", []])
def test_what_is_no_answer_is_left_out(reply: Any) -> None:
    nodes = Set()
    nodes.hear((7, OLD), (7, OLD), (7, OLD))
    assert nodes.hear(reply, reply, (8, NEW))
    assert not nodes.hear(reply, reply, reply)


def test_none_is_forgotten_while_redis_py_reorders_its_own_list() -> None:
    nodes = Set()
    nodes.manager.sentinels[2] = nodes.manager.sentinels[0]
    nodes.hear((7, OLD), (7, OLD), (7, OLD))
    assert sorted(nodes.order) == [0, 1, 2]
    nodes.topology.node.rotate_sentinels()
    assert nodes.order == [1, 2, 0]


def test_they_are_asked_by_one_at_a_time() -> None:
    nodes = Set()
    first = nodes.topology.ask_sentinels()
    next(first)
    assert list(nodes.topology.ask_sentinels()) == []
    first.close()
    assert nodes.hear((7, NEW), (7, NEW), (7, NEW))


# -- the map of a cluster -------------------------------------------------------------------------


ALL = [[0, 16383, [b"10.0.0.1", 7000, b"id"]]]


def read(slot_map: SlotMap, *replies: Any) -> list[str]:
    """Return the hosts that were asked, in turn."""
    questions = slot_map.read(lambda address: address[0])
    asked, given = [], None
    try:
        for reply in (*replies, None):
            asked.append(questions.send(given)[0])
            given = reply
    except StopIteration:
        pass
    return asked


def of_hosts(*hosts: str) -> SlotMap:
    return SlotMap([(host, 7000) for host in hosts], lambda: (redis.Connection, {}))


def test_the_first_reading_begins_with_the_first_host_and_each_later_one_with_the_next() -> None:
    slot_map = of_hosts("a", "b")
    assert [read(slot_map, ALL), read(slot_map, ALL), read(slot_map, ALL)] == [["a"], ["b"], ["a"]]


def test_nodes_of_the_last_map_are_asked_after_the_hosts() -> None:
    slot_map = of_hosts("a")
    read(slot_map, ALL)
    assert read(slot_map, AWAY, ALL) == ["a", "10.0.0.1"]


def test_parts_of_maps_are_put_together() -> None:
    slot_map = of_hosts("a", "b")
    read(slot_map, [[0, 99, [b"x", 1, b"id"]]], [[50, 199, [b"y", 2, b"id"]]])
    assert [slot_map.node_of(slot) for slot in (0, 99, 199, 200)] == [
        ("x", 1), ("x", 1), ("y", 2), None,
    ]  # fmt: skip


@pytest.mark.parametrize("host", [b"", None, b"?"])
def test_a_node_that_does_not_know_its_address_is_where_it_was_asked(host: Any) -> None:
    slot_map = of_hosts("a")
    read(slot_map, [[0, 16383, [host, 7001, b"id"]]])
    assert slot_map.node_of(7) == ("a", 7001)


@pytest.mark.parametrize("mistake_at", [0, 1, 2])
def test_a_mistake_is_not_hidden_by_hosts_that_are_away(mistake_at: int) -> None:
    replies: Sequence[Any] = [AWAY] * 3
    replies = [*replies[:mistake_at], ConfigurationError("WRONGPASS"), *replies[mistake_at + 1 :]]
    with pytest.raises(ConfigurationError):
        read(of_hosts("a", "b", "c"), *replies)


def test_questions_share_what_was_read_of_certificates_for_a_minute() -> None:
    """To read them takes longer than all else, and a certificate may be renewed."""
    clock = ManualClock()
    pool: Any = SimpleNamespace(
        connection_kwargs={}, connection_class=redis.asyncio.SSLConnection, service_name="main",
        sentinel_manager=SimpleNamespace(sentinels=[]),
    )  # fmt: skip
    asked = Asked(0)
    asked.connection_pool.connection_class = redis.asyncio.SSLConnection
    pool.sentinel_manager.sentinels.append(asked)
    topology = SingleServer(pool, CallSettings(clock, 1.0))
    contexts = []
    for seconds in (0, 1, 58, 2, 1):
        clock.advance(seconds)
        for connection, _ in topology.ask_sentinels():
            contexts.append(connection.ssl_context)
    assert [context is contexts[0] for context in contexts] == [True, True, True, False, False]
    assert contexts[3] is contexts[4]
