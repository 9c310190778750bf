"""A simulated fleet that follows a script of single steps, in any interleaving."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distwindow.local.leased import Leased
from distwindow.ring.command import Command
from distwindow.ring.commands import Read
from distwindow.ring.decision import Decision
from distwindow.ring.limit import Limit
from distwindow.ring.stats import window_at
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.operations import refund, stats
from distwindow.runtime.steps import Completion, Pipeline
from distwindow.runtime.strategy import Strategy
from tests.simulation.admissions import Admission
from tests.simulation.process import MakeStrategy, OperationRun, Process, SimulatedStore

Step = tuple[Any, ...]
"""The name of a step, which is a private method of `ScriptedFleet`, and its arguments."""

MAX_PROCESSES = 6
"""A fork beyond these is left out."""


class RecordingStore(SimulatedStore):
    """Keeps the commands that it has executed, and their replies."""

    def __init__(self, start_ms: float) -> None:
        super().__init__(start_ms)
        self.log: list[tuple[Command[Any], Any]] = []

    def execute(self, command: Command[Any]) -> Any:
        reply = super().execute(command)
        self.log.append((command, reply))
        return reply


class ProcessRun(NamedTuple):
    """An operation that has begun, and the process that runs it."""

    process: int
    run: OperationRun
    key: str | None
    """The key that is called; None for the worker and for a caller of `stats`."""
    cost: int


class ScriptedFleet:
    """Processes that follow a script. A step names a process or a run by any whole number, of which
    the remainder counts, so that every script can be run.
    """

    def __init__(
        self,
        limits: Any,
        make_strategy: MakeStrategy,
        clocks: Iterable[tuple[float, int]],
        *,
        start_ms: float,
        rates: Sequence[float] = (1.0,),
        after_fork: Callable[[Strategy], None] = lambda strategy: strategy.after_fork(),
    ) -> None:
        """`clocks`: for each process what its monotonic clock shows, and how wrong its wall clock
        is, ms; `rates`: how fast these clocks run, assigned to the processes in turn.
        """
        self.store = RecordingStore(start_ms)
        self.limits: tuple[Limit, ...] = CommandCache("fleet", limits).limits
        self.runs: list[ProcessRun] = []
        self.admitted: list[Admission] = []
        self.refused: list[tuple[int, str, Decision]] = []
        self.on_local_decision: Callable[[int, str, Decision], None] | None = None
        """Called with each decision that is made without the store, when it is made."""
        self.sent: list[tuple[int, Command[Any]]] = []
        """The commands of each process, whether they reached the store or not."""
        self.delivered: list[tuple[int, Command[Any], Any]] = []
        """The replies that have arrived."""
        self.processes: dict[int, Process] = {}
        """The processes that are alive, by their numbers."""
        self._decisions: list[tuple[int, Decision]] = []
        self._limits, self._make_strategy, self._after_fork = limits, make_strategy, after_fork
        self._numbers = itertools.count()
        self._clocks = list(clocks)
        self._rates = itertools.cycle(rates)
        for clock in self._clocks:
            self._start_process(clock)

    def _start_process(self, clock: tuple[float, int]) -> None:
        monotonic, skew_ms = clock
        origin = self.store.monotonic() - monotonic
        process = Process(
            self.store, self._limits, self._make_strategy, origin=origin, skew_ms=skew_ms,
            rate=next(self._rates),
        )  # fmt: skip
        self.processes[next(self._numbers)] = process

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.do(step)

    def do(self, step: Step) -> None:
        name, *arguments = step
        getattr(self, f"_{name}")(*arguments)

    # -- steps ------------------------------------------------------------------------------------

    def _call(self, process: int, key: str, cost: int, times: int) -> None:
        """Call one time after the other, with a store that takes no time."""
        for _ in range(times):
            run = self._begin_call(process, key, cost)
            if run is not None:
                self._deliver(-1)

    def _call_until_refused(self, process: int, key: str) -> None:
        """Call until one call is refused, a hundred times at most."""
        refused = len(self.refused)
        for _ in range(100):
            self._call(process, key, 1, 1)
            if len(self.refused) > refused:
                return

    def _begin_call(self, process: int, key: str, cost: int) -> OperationRun | None:
        """Begin a call, whose command and reply later steps deliver."""
        number = self._number(process)
        found = self.processes[number].call(key, cost)
        if isinstance(found, OperationRun):
            self._track(ProcessRun(number, found, key, cost))
            return found
        if self.on_local_decision is not None:
            self.on_local_decision(number, key, found)
        self._on_decision(number, key, found, int(self.store.ms))
        return None

    def _flush(self, process: int) -> None:
        """Begin a flush of the worker, unless its previous flush has not ended yet."""
        number = self._number(process)
        if all(each.process != number or each.key is not None for each in self.runs):
            self._track(ProcessRun(number, self.processes[number].flush(), None, 0))

    def _wait_and_flush(self, ms: float) -> None:
        """Let time pass, and then let all workers flush in no time."""
        self.store.ms += ms
        for process in range(len(self.processes)):
            before = len(self.runs)
            self._flush(process)
            while len(self.runs) > before:
                self._deliver(-1)

    def _read_stats(self, process: int, key: str) -> None:
        """Begin a call of `stats`, which flushes the key first."""
        number = self._number(process)
        caller = self.processes[number]
        operation = stats(caller.strategy, CommandCache("fleet", self._limits), key, caller.clock)
        self._track(ProcessRun(number, OperationRun(self.store, operation), None, 0))

    def _refund(self, which: int) -> None:
        """Refund a decision, in no time."""
        if self._decisions:
            number, decision = self._decisions.pop(which % len(self._decisions))
            if number in self.processes:
                process = self.processes[number]
                operation = refund(process.strategy, decision, process.clock)
                OperationRun(self.store, operation).finish()

    def _execute(self, which: int) -> None:
        """Have the store execute the command of a run."""
        if self.runs:
            self.runs[which % len(self.runs)].run.execute()

    def _deliver(self, which: int) -> None:
        """Deliver the reply to the command of a run."""
        if self.runs:
            each = self.runs.pop(which % len(self.runs))
            each.run.execute()
            self.delivered += [(each.process, *exchange) for exchange in exchanges_of(each.run)]
            each.run.deliver()
            self._track(each)

    def _lose_reply(self, which: int) -> None:
        """Lose the reply to the command of a run."""
        if self.runs:
            each = self.runs.pop(which % len(self.runs))
            each.run.lose_reply()
            self._track(each)

    def _wait(self, ms: float) -> None:
        self.store.ms += ms

    def _next_bucket(self, offset_ms: float, limit: int = 0) -> None:
        """Let time pass until `offset_ms` after the begin of the next bucket."""
        width = self.limits[limit % len(self.limits)].bucket_ms
        self.store.ms = max(self.store.ms, (self.store.ms // width + 1) * width + offset_ms)

    def _kill(self, process: int) -> None:
        """Kill a process, and start another one in its place."""
        number = self._number(process)
        self.runs = [each for each in self.runs if each.process != number]
        del self.processes[number]
        self._start_process(self._clocks[number % len(self._clocks)])

    def _fork(self, process: int) -> None:
        """Copy everything but the runs, whose threads exist in the parent only."""
        if len(self.processes) < MAX_PROCESSES:
            child = forked(self.processes[self._number(process)], self.store)
            self._after_fork(child.strategy)
            self.processes[next(self._numbers)] = child

    # -- the end of a script ----------------------------------------------------------------------

    def flush_all(self, rounds: int = 6) -> None:
        """End all runs, and then let the workers flush what is pending, in no time."""
        self._end_runs()
        for _ in range(rounds):
            for process in range(len(self.processes)):
                self._flush(process)
                self._end_runs()

    def close(self) -> None:
        """Close the limiter of every process."""
        self._end_runs()
        for process in self.processes.values():
            process.flush(everything=True).finish()

    def counts_in_store(self, key: str, limit: Limit, *, blocked: bool = False) -> dict[int, int]:
        """Return what the store holds in the window, by bucket number, with the empty buckets."""
        charges = CommandCache("fleet", self._limits).acquire_command(key).charges
        (ring,) = [charge for charge in charges if charge.limit == limit]
        (state,), now, _ = self.store.memory.execute(Read((ring,)))
        window = window_at(state, limit, now).buckets
        counts = {b.start // limit.bucket_ms: b.blocked if blocked else b.passed for b in window}
        newest = now // limit.bucket_ms
        return {n: counts.get(n, 0) for n in range(newest - limit.span + 1, newest + 1)}

    def _end_runs(self) -> None:
        for _ in range(1000):
            if not self.runs:
                return
            self._deliver(0)
        raise AssertionError(f"these runs never end: {self.runs}")

    # -- results ----------------------------------------------------------------------------------

    def _number(self, process: int) -> int:
        numbers = list(self.processes)
        return numbers[process % len(numbers)]

    def _track(self, each: ProcessRun) -> None:
        """Note what a run has come to: a command that it has sent, or a decision."""
        if not each.run.done:
            self.runs.append(each)
            self.sent += [(each.process, command) for command in commands_of(each.run)]
        elif each.key is not None and isinstance(each.run.result, Decision):
            self._on_decision(each.process, each.key, each.run.result, each.run.result.now_ms)

    def _on_decision(self, number: int, key: str, decision: Decision, at_ms: int) -> None:
        if decision.allowed:
            start = bucket_start_of(self.processes[number], key)
            admission = Admission(number, key, at_ms, decision.cost, decision.source, start)
            self.admitted.append(admission)
            self._decisions.append((number, decision))
        else:
            self.refused.append((number, key, decision))


def bucket_start_of(process: Process, key: str) -> int:
    """Return the start of the bucket in which this process counts, ms."""
    strategy: Any = process.strategy
    state = strategy._get(key)
    return 0 if state is None else int(state.bucket_start)


def commands_of(run: OperationRun) -> tuple[Command[Any], ...]:
    """Return the commands of the present step of a run."""
    return run.step.commands if isinstance(run.step, Pipeline) else (run.step,)


def exchanges_of(run: OperationRun) -> list[tuple[Command[Any], Any]]:
    """Return the commands of a run that the store has executed, with their replies."""
    replies = run.reply if isinstance(run.step, Pipeline) else (run.reply,)
    return list(zip(commands_of(run), replies, strict=True))


def forked(process: Process, store: SimulatedStore) -> Process:
    """Return what `os.fork` leaves in the child, before its `after_fork` is called."""
    strategy: Any = process.strategy
    states = strategy._key_states
    memo: dict[int, Any] = {
        id(store): store,
        id(strategy._command_cache): strategy._command_cache,
        id(states.counter_lock): threading.Lock(),
        id(states.state_lock): threading.RLock(),
        id(strategy._counts._collect_lock): threading.RLock(),
        id(strategy._counts._seq): itertools.count(1000),
    }
    child = copy.copy(process)
    child.clock = copy.copy(process.clock)
    memo[id(process.clock)] = child.clock
    known = [*states.all(), *strategy._counts._dirty]
    if isinstance(strategy, Leased):
        memo.update((id(fetch), Completion()) for fetch in strategy._leases.fetches)
        known += [
            *strategy._prefetches._queue,
            *strategy._leases.new_reviews,
            *(review[2] for review in strategy._reviews._heap),
        ]
    # Python 3.14 does not copy iterators any more.
    for one in (getattr(strategy, "_reviews", None), getattr(strategy, "_sync", None)):
        if one is not None:
            memo[id(one._heap_order)] = itertools.count(1_000_000)
    for state in known:
        memo[id(state.charges)] = state.charges
        if getattr(state, "lease_fetch", None) is not None:
            memo[id(state.lease_fetch)] = Completion()
    twin: Any = copy.deepcopy(strategy, memo)
    twin._key_states.get = twin._get = twin._key_states._states.get
    twin._key_states.touch = twin._touch = twin._key_states._states.move_to_end
    child.strategy = twin
    return child
