"""One process of a simulated fleet, without an operating system's process or a socket.

What a process does is an operation, and a test takes each of its steps by hand: the store executes
its command at one moment, and the reply is delivered later, or never. So a test can run any
interleaving of processes, workers, losses and deaths, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from distwindow.errors import StoreTimeout
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire
from distwindow.ring.decision import Decision
from distwindow.ring.decisions import decision_of
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.flush import flush_due
from distwindow.runtime.steps import Fetch, Pipeline, Sleep, WaitFor
from distwindow.runtime.strategy import Strategy
from distwindow.stores.memory import MemoryStore


class SimulatedStore:
    """A store in memory and its clock, from which the clocks of all processes are derived."""

    def __init__(self, start_ms: float) -> None:
        self.ms = start_ms
        self.memory = MemoryStore(self)
        self.executed = 0
        """The number of commands that the store has executed."""

    def now_ms(self) -> int:
        return int(self.ms)

    def monotonic(self) -> float:
        return self.ms / 1000

    def sleep(self, seconds: float) -> None:
        self.ms += seconds * 1000

    def execute(self, command: Command[Any]) -> Any:
        """Return the reply; for an `Acquire` the decision, as stores do."""
        self.executed += 1
        reply = self.memory.execute(command)
        return decision_of(command, reply, "store") if type(command) is Acquire else reply


class LocalClock:
    """The clock of one process: its own origin, a wall clock that is wrong by `skew_ms`, and a
    `rate`, the seconds that it shows per second of the store, because clocks may be slewed.
    """

    def __init__(
        self, store: SimulatedStore, origin: float = 0.0, skew_ms: int = 0, rate: float = 1.0
    ) -> None:
        self._store, self._origin, self._skew_ms, self.rate = store, origin, skew_ms, rate
        self._since = store.monotonic()
        """Until then the rate was 1."""

    def now_ms(self) -> int:
        return self._store.now_ms() + self._skew_ms

    def monotonic(self) -> float:
        now = self._store.monotonic()
        return self._since - self._origin + (now - self._since) * self.rate

    def sleep(self, seconds: float) -> None:
        self._store.sleep(seconds / self.rate)

    def suspend(self, ms: float) -> None:
        """Suspend the machine: the store's time passes, and this clock stands still."""
        self._store.ms += ms
        self._origin += ms / 1000 * self.rate


class OperationRun:
    """An operation that has begun. `execute` has the store execute its command, `deliver` delivers
    the reply, and `lose_reply` makes the command fail with a timeout.
    """

    def __init__(self, store: SimulatedStore, operation: Generator[Any, Any, Any]) -> None:
        self._store = store
        self._operation = operation
        self.done = False
        self.result: Any = None
        self.step: Any = None
        self.reply: Any = None
        """The reply of the store to the present step, once it has been executed."""
        self.executed = False
        self._advance(lambda: next(operation))

    def execute(self) -> None:
        """Have the store execute the command now, unless it has."""
        if self.done or self.executed:
            return
        self.executed = True
        if isinstance(self.step, Pipeline):
            self.reply = [self._store.memory.execute(command) for command in self.step.commands]
            self._store.executed += len(self.reply)
        else:
            self.reply = self._store.execute(self.step)

    def deliver(self) -> None:
        """Deliver the reply; have the store execute the command first where it has not."""
        self.execute()
        if not self.done:
            reply = self.reply
            self._advance(lambda: self._operation.send(reply))

    def finish(self) -> Any:
        """Deliver all replies, and return the result: the store takes no time."""
        while not self.done:
            self.deliver()
        return self.result

    def lose_reply(self) -> None:
        """Lose the reply, whether the store has executed the command or not."""
        if self.done:
            return
        lost = StoreTimeout("lost", charged=None)
        if isinstance(self.step, Pipeline):
            replies = [lost] * len(self.step.commands)
            self._advance(lambda: self._operation.send(replies))
        else:
            self._advance(lambda: self._operation.throw(lost))

    def _advance(self, resume: Callable[[], Any]) -> None:
        try:
            self.step, self.executed = resume(), False
            while isinstance(self.step, (Sleep, WaitFor)):
                # The simulation does not wait, so the operation goes on too early.
                self.step = self._operation.send(None)
            if isinstance(self.step, Fetch):
                self.step = self.step.command
        except StopIteration as end:
            self.done, self.result = True, end.value
        except StoreTimeout as lost:
            self.done, self.result = True, lost


MakeStrategy = Callable[[CommandCache, LocalClock], Strategy]


class Process:
    """One process of the fleet: does what `Limiter` does, without the limiter.

    Only `store_command` is left out, by which a key of little demand gets no key state: the scripts
    are short, and are to reach leases.
    """

    def __init__(
        self,
        store: SimulatedStore,
        limits: Any,
        make_strategy: MakeStrategy,
        *,
        origin: float = 0.0,
        skew_ms: int = 0,
        rate: float = 1.0,
    ) -> None:
        self.store = store
        self.clock = LocalClock(store, origin, skew_ms, rate)
        self.strategy = make_strategy(CommandCache("fleet", limits), self.clock)

    def call(self, key: str, cost: int = 1) -> Decision | OperationRun:
        """Begin `try_acquire`; return the decision, or the operation that comes to it."""
        decision = self.strategy.decide_locally(key, cost)
        if decision is not None:
            return decision
        return OperationRun(self.store, self.strategy.acquire_remote(key, cost))

    def acquire(self, key: str, cost: int = 1) -> Decision:
        """Call `try_acquire` with a store that takes no time."""
        found = self.call(key, cost)
        decision = found.finish() if isinstance(found, OperationRun) else found
        assert isinstance(decision, Decision)
        return decision

    def flush(self, *, everything: bool = False) -> OperationRun:
        """Begin the worker's flush."""
        return OperationRun(
            self.store, flush_due(self.strategy, self.clock.monotonic, everything=everything)
        )

    def due_at_ms(self) -> float:
        """Return when the worker has to flush, on the store's clock."""
        seconds = (self.strategy.next_due_at - self.clock.monotonic()) / self.clock.rate
        return seconds * 1000 + self.store.ms
