"""A fleet without processes: several strategies over one store, with a clock that is moved.

What a process does is an operation, and tests take each of its steps by hand: its command reaches
the store at one moment, and the reply arrives later, or never. So any interleaving of processes,
workers, losses and deaths can be played, in no time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from distwindow.core.decision import Decision
from distwindow.core.errors import StoreTimeout
from distwindow.operations.command_cache import CommandCache
from distwindow.operations.flush import flush_due
from distwindow.operations.steps import Fetch, Pipeline, Sleep, WaitFor
from distwindow.operations.strategy import Strategy
from distwindow.protocol.commands import Acquire, Command
from distwindow.protocol.decisions import decision_of
from distwindow.store.memory import MemoryStore


class World:
    """The store, and the clock that all others derive from."""

    def __init__(self, start_ms: float) -> None:
        self.ms = start_ms
        self.store = MemoryStore(self)
        self.asked = 0
        """Commands that the store has executed."""

    def now_ms(self) -> int:
        return int(self.ms)

    def monotonic(self) -> float:
        return self.ms / 1000

    def sleep(self, seconds: float) -> None:
        self.ms += seconds * 1000

    def execute(self, command: Command[Any]) -> Any:
        """What the store answers; for an `Acquire`, the decision, as stores do."""
        self.asked += 1
        reply = self.store.execute(command)
        return decision_of(command, reply, "store") if type(command) is Acquire else reply


class Local:
    """A process's own clock: another origin, a wall clock that is wrong, and a rate, which is how
    many of its seconds pass in one of the store's: clocks may be slewed.
    """

    def __init__(
        self, world: World, origin: float = 0.0, skew_ms: int = 0, rate: float = 1.0
    ) -> None:
        self._world, self._origin, self._skew_ms, self.rate = world, origin, skew_ms, rate
        self._since = world.monotonic()
        """Until then the rate was 1."""

    def now_ms(self) -> int:
        return self._world.now_ms() + self._skew_ms

    def monotonic(self) -> float:
        now = self._world.monotonic()
        return self._since - self._origin + (now - self._since) * self.rate

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds / self.rate)

    def stands_still(self, ms: float) -> None:
        """The machine is suspended for so long: time passes elsewhere."""
        self._world.ms += ms
        self._origin += ms / 1000 * self.rate


class OperationRun:
    """An operation that has begun: `reach` has the store execute its command, and `answer` delivers
    the reply.
    """

    def __init__(self, world: World, operation: Generator[Any, Any, Any]) -> None:
        self._world = world
        self._operation = operation
        self.done = False
        self.result: Any = None
        self.step: Any = None
        self._reply: Any = None
        self.reached = False
        self._on(lambda: next(operation))

    def reach(self) -> None:
        """Have the store execute the command now."""
        if self.done or self.reached:
            return
        self.reached = True
        if isinstance(self.step, Pipeline):
            self._reply = [self._world.store.execute(command) for command in self.step.commands]
            self._world.asked += len(self._reply)
        else:
            self._reply = self._world.execute(self.step)

    def answer(self) -> None:
        """Deliver the reply; have the store execute the command first where it has not."""
        self.reach()
        if not self.done:
            reply = self._reply
            self._on(lambda: self._operation.send(reply))

    def lose(self) -> None:
        """Lose the reply, whether the store has executed the command or not."""
        if self.done:
            return
        lost = StoreTimeout("lost", charged=None)
        if isinstance(self.step, Pipeline):
            replies = [lost] * len(self.step.commands)
            self._on(lambda: self._operation.send(replies))
        else:
            self._on(lambda: self._operation.throw(lost))

    def _on(self, step: Callable[[], Any]) -> None:
        try:
            self.step, self.reached = step(), False
            while isinstance(self.step, (Sleep, WaitFor)):
                # Nobody waits here, so it goes on too early.
                self.step = self._operation.send(None)
            if isinstance(self.step, Fetch):
                self.step = self.step.command
        except StopIteration as end:
            self.done, self.result = True, end.value
        except StoreTimeout as lost:
            self.done, self.result = True, lost


class Process:
    """One process of the fleet: what `Limiter` does, without the limiter."""

    def __init__(
        self,
        world: World,
        limits: Any,
        mode: Callable[[CommandCache, Local], Strategy],
        *,
        origin: float = 0.0,
        skew_ms: int = 0,
        rate: float = 1.0,
    ) -> None:
        self.world = world
        self.clock = Local(world, origin, skew_ms, rate)
        self.strategy = mode(CommandCache("fleet", limits), self.clock)

    def call(self, key: str, cost: int = 1) -> Decision | OperationRun:
        """`try_acquire`: the decision, or the operation that comes to it."""
        decision = self.strategy.decide_locally(key, cost)
        if decision is not None:
            return decision
        return OperationRun(self.world, self.strategy.acquire_remote(key, cost))

    def at_once(self, key: str, cost: int = 1) -> Decision:
        """`try_acquire` with a store that takes no time."""
        found = self.call(key, cost)
        if isinstance(found, OperationRun):
            while not found.done:
                found.answer()
            found = found.result
        assert isinstance(found, Decision)
        return found

    def work(self, *, last: bool = False) -> OperationRun:
        """The worker's flush."""
        return OperationRun(self.world, flush_due(self.strategy, self.clock.monotonic, last=last))

    def due(self) -> float:
        """When the worker has to flush, on the world's clock, ms."""
        seconds = (self.strategy.next_due_at - self.clock.monotonic()) / self.clock.rate
        return seconds * 1000 + self.world.ms
