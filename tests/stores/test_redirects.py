"""A node of a cluster sends calls to another one: for good (MOVED), or for one call (ASK). Or it
has only some of their keys while their slot migrates (TRYAGAIN).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio.cluster
import redis.cluster

from distwindow import AsyncLimiter, StoreUnavailable
from distwindow.lifecycle.connect import open_store
from distwindow.ring.clock import SYSTEM
from distwindow.ring.command import ScriptReply
from distwindow.ring.commands import Acquire
from distwindow.ring.replies import AcquireReply
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.stores.redis import outcome, topology
from distwindow.stores.redis.slot_map import SlotMap
from distwindow.stores.redis.topology import CallSettings, ClusterTopology
from tests.clock_and_stores import ManualClock
from tests.harness import Harness, LimiterAdapter
from tests.servers import until, until_async
from tests.stores.responder import Answer, Responder, admitting


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


def test_a_slot_that_has_moved_may_be_migrating_again(nodes: TwoNodes) -> None:
    nodes.redirect(f"MOVED 1 127.0.0.1:{nodes.new.port}")
    nodes.new.script = lambda words: b"-ASK 1 127.0.0.1:%d\r\n" % nodes.old.port
    nodes.old.script = one_after_another([nodes.old.script], then=admitting)
    assert nodes.limiter.try_acquire("k")
    assert (len(nodes.old.calls), len(nodes.new.calls)) == (2, 1)


def test_nodes_that_disagree_for_ever_are_followed_a_few_times(nodes: TwoNodes) -> None:
    nodes.redirect(f"MOVED 1 127.0.0.1:{nodes.new.port}")
    nodes.new.script = lambda words: b"-MOVED 1 127.0.0.1:%d\r\n" % nodes.old.port
    with pytest.raises(StoreUnavailable, match="MOVED") as caught:
        nodes.limiter.try_acquire("k")
    assert caught.value.charged is False
    assert 4 <= len(nodes.old.calls) + len(nodes.new.calls) <= 8


# -- calls of several keys, while their slot migrates ----------------------------------------------

NON_LOCAL = "Script attempted to access a non local key in a cluster node"
MIGRATING = [
    "TRYAGAIN Multiple keys request during rehashing of slot",
    # Of a key that has expired between the look at the keys of a call and the script.
    f"ERR Error running script (call to f_{'f' * 40}): @user_script:1: {NON_LOCAL}",
    f"ERR {NON_LOCAL} script: {'f' * 40}, on @user_script:19.",
]


def one_after_another(answers: list[Answer], then: Answer) -> Answer:
    left = iter(answers)
    return lambda words: next(left, then)(words)


def refusing(error: str) -> Answer:
    return lambda words: f"-{error}\r\n".encode()


@pytest.mark.parametrize("error", MIGRATING, ids=["TRYAGAIN", "6.2", "7"])
@pytest.mark.parametrize("times", [1, 4])
def test_a_call_waits_until_its_slot_has_migrated(nodes: TwoNodes, error: str, times: int) -> None:
    nodes.old.script = one_after_another([refusing(error)] * times, then=admitting)
    nodes.old.calls.clear()
    assert all(nodes.limiter.each(["k"] * 2))
    assert len(nodes.old.calls) == times + 2


@pytest.mark.parametrize("error", MIGRATING, ids=["TRYAGAIN", "6.2", "7"])
def test_a_call_whose_slot_migrates_until_its_deadline_was_surely_not_executed(
    harness: Harness, error: str
) -> None:
    with Responder(refusing(error)) as server:
        url = f"redis+cluster://127.0.0.1:{server.port}?protocol=2"
        limiter = harness.limiter(url, timeout=0.2)

        def failure() -> StoreUnavailable | None:
            server.calls.clear()
            (call,) = limiter.burst(["k"], at_once=1)
            # On a machine that is busy the last reply may come after the deadline, or the second.
            outcome = call.outcome if len(server.calls) > 2 else None
            return outcome if isinstance(outcome, StoreUnavailable) else None

        caught: Any = until(failure)
        assert "migrates to another node" in str(caught)
        assert caught.charged is False


def test_a_redirect_after_a_wait_is_followed_each_time(nodes: TwoNodes) -> None:
    """A key that neither node has is asked for on the new one, which may lack the other key."""
    nodes.redirect(f"ASK 1 127.0.0.1:{nodes.new.port}")
    nodes.new.script = one_after_another([refusing(MIGRATING[0])] * 3, then=admitting)
    assert nodes.limiter.try_acquire("k")
    assert (len(nodes.old.calls), len(nodes.new.calls)) == (4, 4)


def test_of_commands_that_are_sent_together_those_that_wait_come_last() -> None:
    """What the others tell of the server's time would be old by then."""
    ends: list[object] = []

    class Noted(Acquire):
        def reply(self, raw: ScriptReply) -> AcquireReply:
            ends.append(self.charges[0].key)
            return super().reply(raw)

    cache = CommandCache("unit", "1/second")
    commands = [Noted(cache.acquire_command(key).charges) for key in "abc"]
    with Responder() as server:
        url = f"redis+cluster://127.0.0.1:{server.port}?protocol=2"
        store = open_store(url, Options(timeout=5))
        server.script = one_after_another([refusing(MIGRATING[0])], then=admitting)
        store.execute_many(commands)
        store.close()
    assert ends == ["b", "c", "a"]


@pytest.mark.event_loops
def test_a_call_that_is_cancelled_while_it_waits_is_not_sent_again() -> None:
    async def calls(server: Responder) -> None:
        url = f"redis+cluster://127.0.0.1:{server.port}?protocol=2"
        async with AsyncLimiter(url, "9/minute", timeout=5) as limiter:
            await limiter.try_acquire("k")
            server.script = refusing(MIGRATING[0])
            call = asyncio.ensure_future(limiter.try_acquire("k"))
            await until_async(lambda: len(server.calls) > 2, what="it waits")
            call.cancel()
            await asyncio.wait([call])
            server.script = admitting
            sent = len(server.calls)
            await asyncio.sleep(2 * outcome.MIGRATION_PAUSES.longest_s)
            assert len(server.calls) <= sent + 1  # what was on its way

    with Responder() as server:
        asyncio.run(calls(server))


# -- slots and nodes -----------------------------------------------------------------------------


def test_the_slot_of_a_key_is_computed_and_looked_up_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both took more time than all else in a call."""
    with Responder() as old, Responder() as new:
        nodes = TwoNodes(harness, old, new, calls=2)
        monkeypatch.delattr(topology, "key_slot")
        monkeypatch.delattr(ClusterTopology, "_node")
        assert all(nodes.limiter.each(["k"] * 3))


def test_a_slot_that_no_node_serves_is_looked_for_again(harness: Harness) -> None:
    """No call gets as far as to a node, which would say that the map is stale."""
    with Responder() as server:
        server.last_slot = 0
        limiter = harness.limiter(f"redis+cluster://127.0.0.1:{server.port}?protocol=2", timeout=5)
        assert isinstance(limiter.burst(["k"], at_once=1)[0].outcome, StoreUnavailable)
        server.last_slot = 16383
        until(lambda: limiter.burst(["k"], at_once=1)[0].admitted, what="the map is read again")


def test_with_the_clients_clock_each_call_carries_its_time(harness: Harness) -> None:
    with Responder() as old, Responder() as new:
        url = f"redis+cluster://127.0.0.1:{old.port}?protocol=2"
        harness.limiter(url, timeout=5, clock="client").each(["k"] * 4)
        assert [words[-1].isdigit() and len(words[-1]) == 13 for words in old.calls[1:]] == [
            True
        ] * 3
        assert not new.calls


def one_node(port: int = 1) -> SlotMap:
    """Return a map by which all slots are on the node at this port."""
    found = SlotMap([("10.0.0.7", 1)], lambda: (redis.asyncio.Connection, {}))
    read(found, port)
    return found


def read(slot_map: SlotMap, port: int) -> None:
    """Have a reading find the node at this port."""
    reading = slot_map.read(lambda address: None)
    next(reading)
    with pytest.raises(StopIteration):
        reading.send([[0, 16383, [b"10.0.0.7", port, b"id"]]])


COMMAND = CommandCache("unit", "1/second").acquire_command("k")


def test_threads_that_meet_a_node_at_once_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would be probed for ever once the node was replaced."""
    found = ClusterTopology(one_node(), CallSettings(SYSTEM, 1.0))
    of_another_thread: list[Any] = []

    def meanwhile(*_: Any) -> dict[str, Any]:
        if not of_another_thread:
            of_another_thread.append(None)
            of_another_thread.append(found.node_of(COMMAND))
        return {}

    monkeypatch.setattr(topology, "_connection_kwargs", meanwhile)
    assert found.node_of(COMMAND) is of_another_thread[1]


def test_what_one_limiter_has_read_is_known_to_the_others_of_its_map() -> None:
    of_both = one_node(port=1)
    found = ClusterTopology(of_both, CallSettings(SYSTEM, 1.0))
    assert found.node_of(COMMAND).name == "10.0.0.7:1"
    read(of_both, 2)
    assert found.node_of(COMMAND).name == "10.0.0.7:2"
    assert found.known_node_of(COMMAND) is found.node_of(COMMAND)


def test_the_map_is_read_again_as_long_as_a_node_is_away() -> None:
    """Another node may take its place, and nobody may call it any more."""
    clock = ManualClock(auto_advance=False)
    settings = CallSettings(clock, 1.0)
    found = ClusterTopology(one_node(), settings)
    settings.outages.begin("10.0.0.7:1", "refused", clock.monotonic())
    found.on_refreshed()
    clock.move(1000)
    assert found.claim_refresh()
    settings.outages.end("10.0.0.7:1")
    found.on_refreshed()
    clock.move(1000)
    assert not found.claim_refresh()
