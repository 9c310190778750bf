"""A store that fails on command, and limiters on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distwindow import Decision, Limiter, StoreError, StoreTimeout, StoreUnavailable
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire
from distwindow.ring.decision import Source
from distwindow.ring.decisions import decision_of
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from tests.clock_and_stores import ManualClock

NOT_SENT = StoreUnavailable("it refuses connections", charged=False)
UNKNOWN = StoreTimeout("no reply came", charged=None)


class RemoteStore(MemoryStore):
    """A store that seems to be elsewhere, and fails with `failure` where there is one."""

    decided_by: Source = "store"

    def __init__(self, clock: ManualClock, values: dict[bytes, Any] | None = None) -> None:
        super().__init__(clock, values)
        self.failure: StoreError | None = None
        self.charges_unknown = False
        """Whether a call with an unknown outcome is executed."""
        self.exchanges: list[int] = []
        """The commands of each exchange."""

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        return decision_of(command, self.execute(command, deadline), "store")

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        if self.failure is None:
            return super().execute(command, deadline)
        if self.failure.charged is None:
            self.unknown_total += 1
            if self.charges_unknown:
                super().execute(command, deadline)
        raise self.failure

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        self.exchanges.append(len(commands))
        return [self.failure or self.execute(command) for command in commands]


class AsyncRemoteStore(AsyncMemoryStore):
    """A `RemoteStore` for tasks."""

    decided_by: Source = "store"


def limiter_on(
    store: RemoteStore, limits: Any = "10/minute", consistency: Any = "direct", **options: Any
) -> Limiter:
    return Limiter(store, limits, time=store.clock, consistency=consistency, **options)
