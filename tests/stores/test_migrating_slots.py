"""While a slot migrates, every command is answered as the specification answers it, and so it is
counted once: over all scripts and states of their keys, which the source has, or the target, or
neither.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from redis.crc import key_slot

from distwindow import Limit
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Read
from distwindow.stores.memory import MemoryStore
from distwindow.testing.conformance import compare_replies
from distwindow.testing.histories import FEATURES, limits_together
from tests.clock_and_stores import Execute, awaiting, blocking
from tests.lua.target import COMMANDS, LIMIT, NOW, OTHER, STATES, Target
from tests.servers import Cluster, Migration, RedisProcess

HISTORIES, LENGTH = 2, 20
LIMITS = [(LIMIT,), (LIMIT, OTHER)]


class MigratingSlots:
    """Executes commands on a cluster, each while its slot migrates."""

    def __init__(self, cluster: Cluster, execute: Execute) -> None:
        self._cluster = cluster
        self._execute = execute
        self._thread = ThreadPoolExecutor(1)
        self._migration: Migration | None = None
        self._owners: dict[int, RedisProcess] = {}
        """The nodes of slots that have migrated."""

    def execute(self, command: Command[Any]) -> Any:
        """A call with several keys may have to wait until its slot has migrated, which it then
        does. The next call finds all keys on a node from which the slot migrates again.
        """
        slot = int(key_slot(command.keys[0]))
        if self._migration is None or self._migration.slot != slot:
            self.end()
            self._begin(slot)
        call = self._thread.submit(self._execute, command)
        if len(command.keys) > 1:
            deadline = time.monotonic() + 0.02
            while not call.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            if not call.done():
                self.end()
        return call.result()

    def _begin(self, slot: int) -> None:
        client = self._cluster.client()
        port = client.nodes_manager.get_node_from_slot(slot).port
        client.close()
        masters = self._cluster.nodes[: self._cluster.masters]
        source = self._owners.get(slot) or next(node for node in masters if node.port == port)
        target = next(node for node in masters if node is not source)
        self._migration = self._cluster.migration(slot, source, target)
        self._migration.begin()

    def end(self) -> None:
        """Let the slot arrive."""
        if self._migration is not None:
            self._migration.end()
            self._migration.__exit__()
            self._owners[self._migration.slot] = self._migration.target
            self._migration = None


@pytest.fixture(autouse=True)
def _served(cluster: Cluster) -> None:
    cluster.await_service()


@pytest.fixture(scope="module", params=[blocking, awaiting], ids=["blocking", "awaiting"])
def slots(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[MigratingSlots]:
    with request.param(cluster.url) as execute:
        migrating = MigratingSlots(cluster, execute)
        yield migrating
        migrating.end()


# One and two limits take turns, so that each script, and each state, has both.
ANY_RING = [
    pytest.param(name, state, limits, id=f"{name}-{state}-{len(limits)}")
    for turn, name in enumerate(COMMANDS)
    for state, limits in zip(STATES, itertools.cycle(LIMITS[:: (-1) ** turn]), strict=False)
]


@pytest.mark.parametrize(("name", "state", "limits"), ANY_RING)
def test_a_call_of_any_ring_is_answered_and_counted_once(
    slots: MigratingSlots, name: str, state: str, limits: tuple[Limit, ...]
) -> None:
    now, used = STATES[state]
    target = Target(None, limits, now, 0)  # type: ignore[arg-type]  # it is called by others
    calls: list[Command[Any]] = [Acquire(target.charges, NOW)] * used
    calls += [target.command(name, full=True), Read(target.charges, now)]
    specification = MemoryStore().execute
    assert [slots.execute(call) for call in calls] == [specification(call) for call in calls]


EVERY_FEATURE = {**FEATURES, "together": limits_together()}


@pytest.mark.parametrize("seed", range(HISTORIES))
@pytest.mark.parametrize("name", EVERY_FEATURE)
def test_every_command_is_answered_as_the_specification(
    slots: MigratingSlots, name: str, seed: int
) -> None:
    feature = EVERY_FEATURE[name]
    history = feature.random_history(Random(seed), LENGTH)
    compare_replies(slots.execute, feature, history, "while slots migrate")
