"""A fleet without processes: several limiters' insides over one store, with a clock that is moved.

What a process does is a dialogue, and here each of its steps is taken by hand: its command reaches
the store when the test says so, and the reply comes back later, or never. So any interleaving of
processes, workers, losses and deaths can be told, in no time.
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
    """The clock of everybody, and the store."""

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


class Way:
    """A dialogue under way: `reach` takes what it asks to the store, `answer` brings the reply."""

    def __init__(self, world: World, dialogue: Generator[Any, Any, Any]) -> None:
        self._world = world
        self._dialogue = dialogue
        self.done = False
        self.result: Any = None
        self.effect: Any = None
        self._reply: Any = None
        self.reached = False
        self._on(lambda: next(dialogue))

    def reach(self) -> None:
        """The store executes what was asked, now."""
        if self.done or self.reached:
            return
        self.reached = True
        if isinstance(self.effect, Pipeline):
            self._reply = [self._world.store.execute(command) for command in self.effect.commands]
            self._world.asked += len(self._reply)
        else:
            self._reply = self._world.execute(self.effect)

    def answer(self) -> None:
        """The reply arrives; first what was asked has to reach the store."""
        self.reach()
        if not self.done:
            reply = self._reply
            self._on(lambda: self._dialogue.send(reply))

    def lose(self) -> None:
        """No reply comes, whether the store has executed it or not."""
        if self.done:
            return
        lost = StoreTimeout("lost", charged=None)
        if isinstance(self.effect, Pipeline):
            replies = [lost] * len(self.effect.commands)
            self._on(lambda: self._dialogue.send(replies))
        else:
            self._on(lambda: self._dialogue.throw(lost))

    def _on(self, step: Callable[[], Any]) -> None:
        try:
            self.effect, self.reached = step(), False
            while isinstance(self.effect, (Sleep, WaitFor)):
                # Here nobody waits: it goes on too early.
                self.effect = self._dialogue.send(None)
            if isinstance(self.effect, Fetch):
                self.effect = self.effect.command
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
        self.near = mode(CommandCache("fleet", limits), self.clock)

    def call(self, key: str, cost: int = 1) -> Decision | Way:
        """`try_acquire`: the decision, or the way to it."""
        decision = self.near.decide_locally(key, cost)
        return (
            Way(self.world, self.near.acquire_remote(key, cost)) if decision is None else decision
        )

    def at_once(self, key: str, cost: int = 1) -> Decision:
        """`try_acquire` with a store that takes no time."""
        found = self.call(key, cost)
        if isinstance(found, Way):
            while not found.done:
                found.answer()
            found = found.result
        assert isinstance(found, Decision)
        return found

    def work(self, *, last: bool = False) -> Way:
        """The worker's round."""
        return Way(self.world, flush_due(self.near, self.clock.monotonic, last=last))

    def due(self) -> float:
        """When the worker is to come, on the world's clock, ms."""
        seconds = (self.near.next_due_at - self.clock.monotonic()) / self.clock.rate
        return seconds * 1000 + self.world.ms
