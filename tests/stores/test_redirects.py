"""A node of a cluster sends calls to another one: for good (MOVED), or for one call (ASK)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.asyncio.cluster
import redis.cluster

from distwindow.stores.redis import topology
from tests.harness import Harness, LimiterAdapter
from tests.stores.responder import Responder


class TwoNodes:
    """All slots are on `old`, by the map that the limiter has read. The limiter has made `calls`
    calls of one key: from the third on it knows the slot, and sends a call at once.
    """

    def __init__(self, harness: Harness, old: Responder, new: Responder, calls: int) -> None:
        self.old, self.new = old, new
        url = f"redis+cluster://127.0.0.1:{old.port}?protocol=2"
        self.limiter: LimiterAdapter = harness.limiter(url, timeout=5)
        self.limiter.each(["k"] * calls)

    def redirect(self, error: str) -> None:
        """From now on the old node answers each call with this error."""
        self.old.script = lambda words: f"-{error}\r\n".encode()
        self.old.calls.clear()


@pytest.fixture(params=[1, 3])
def nodes(harness: Harness, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    with Responder() as old, Responder() as new:
        yield TwoNodes(harness, old, new, request.param)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_calls_of_a_slot_that_has_moved_go_to_its_new_node(nodes: TwoNodes, host: str) -> None:
    """An empty host is that of the node that replies."""
    nodes.old.serves = nodes.new
    nodes.redirect(f"MOVED 1 {host}:{nodes.new.port}")
    assert all(nodes.limiter.each(["k"] * 3))
    assert (len(nodes.old.calls), len(nodes.new.calls)) == (1, 3)
    assert [b"ASKING"] not in nodes.new.asked


def test_each_call_of_a_slot_that_is_migrating_asks_for_itself(nodes: TwoNodes) -> None:
    nodes.redirect(f"ASK 1 127.0.0.1:{nodes.new.port}")
    assert all(nodes.limiter.each(["k"] * 3))
    assert (len(nodes.old.calls), len(nodes.new.calls)) == (3, 3)
    assert nodes.new.asked.count([b"ASKING"]) == 3


def test_the_slot_of_a_key_is_computed_and_looked_up_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both took more time than all else in a call."""
    with Responder() as old, Responder() as new:
        nodes = TwoNodes(harness, old, new, calls=2)
        monkeypatch.delattr(topology, "key_slot")
        monkeypatch.delattr(redis.cluster.NodesManager, "get_node_from_slot")
        monkeypatch.delattr(redis.asyncio.cluster.NodesManager, "get_node_from_slot")
        assert all(nodes.limiter.each(["k"] * 3))
