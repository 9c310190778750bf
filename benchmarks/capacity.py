"""Fleets past one machine, simulated: `python -m benchmarks.capacity`. Prints tables in Markdown.

- by default: a discrete-event simulation of up to 10,000 processes and a million keys, beside what
  `distwindow plan` computes for the same fleet; one shard on its way to saturation; a split key.
- `--costs`: what the server's core spends on each kind of command: the constants of the plan.
- `--real`: 40 and 500 limiters over a real server, beside the simulation of the same load.

The strategies are those of the library, over the store in memory, on a clock that the simulation
sets. A shard executes one command at a time, in the order in which they arrive, and each takes the
time that `--costs` has measured. Keys are alike, so of many keys a few are simulated, each called by
every process, and the figures are multiplied.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from benchmarks.consistency.setup import script_calls
from benchmarks.measure import log, percentile
from benchmarks.resp import Socket
from benchmarks.server import last_core, running
from benchmarks.server_cost import GUARD
from distwindow import AsyncLimiter, Limit
from distwindow.cli.plan import COSTS, MODES, Costs, Fleet, Plan, lost_share, make_plan
from distwindow.errors import StoreTimeout
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.options import Options
from distwindow.ring import key as keys
from distwindow.ring.command import Command, load_script
from distwindow.ring.commands import CURRENT_BUCKET, Acquire, Flush, Lease, Refund, charges_of
from distwindow.ring.decision import Charge, Decision
from distwindow.ring.stats import Bucket
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.flush import flush_due
from distwindow.runtime.steps import Completion, Fetch, Pipeline, Sleep, WaitFor
from distwindow.runtime.strategy import Strategy
from tests.simulation.process import LocalClock, Process, SimulatedStore

TIMEOUT_MS = 250.0
"""The deadline of a call, which is the default of the limiters."""
LATE_US = 6.0
"""Of the server's core for a command that is executed after its deadline, and does nothing."""
_STRATEGIES = {"direct": Direct, "leased": Leased, "eventual": Eventual}

# --------------------------------------------------------------------------------------------------
#
# The simulation.


class Caller(Process):
    """A process that does what `Limiter` does, `store_command` included."""

    flushing = False
    flush_at_ms = float("inf")

    def begin(self, key: str) -> Decision | Generator[Any, Any, Decision]:
        """Return the decision of a call, or the operation that comes to it."""
        strategy = self.strategy
        decision = strategy.decide_locally(key, 1)
        if decision is not None:
            return decision
        command = strategy.store_command(key, 1)
        return strategy.acquire_remote(key, 1) if command is None else self._ask(command)

    def _ask(self, command: Acquire) -> Generator[Any, Any, Decision]:
        sent_at = self.clock.monotonic()
        decision: Decision = yield command
        if not decision.allowed:
            self.strategy.cache_refusal(decision.key, decision, sent_at)
        return decision


class Seen(NamedTuple):
    """What was seen of the simulated keys, per second."""

    calls: float
    admitted: float
    commands: float
    local: float
    """The share of the calls that did not wait for the store."""
    failed: float
    """The share of the calls that ended by their timeout."""
    busy: float
    """The time that the commands take at the shard, over the time that passed."""
    held: float
    p50_ms: float
    p99_ms: float
    """Of the calls that asked the store."""
    kinds: Counter[str]


class Shard:
    """One shard and the processes that call its keys. Times are ms of the store's clock."""

    def __init__(
        self, mode: str, fleet: Fleet, sampled: int, seed: int = 1, costs: Costs = COSTS
    ) -> None:
        self._mode, self._fleet, self._sampled, self._costs = mode, fleet, sampled, costs
        self._rng = random.Random(seed)
        self.store = SimulatedStore(1_700_000_040_000.3)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._callers: dict[int, Caller] = {}
        self._free_at = 0.0
        self._opened: dict[bytes, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._waits_ms: list[float] = []
        self._busy_us = 0.0

    def observe(self, seconds: float, warm_up_s: float) -> Seen:
        """Let the processes call, and return what was seen after the warm-up."""
        self._run(warm_up_s)
        self._reset()
        held = []
        for _ in range(20):  # at random moments, as leases come and go with the buckets
            self._run(seconds / 10 * self._rng.random())
            held.append(sum(one.strategy.unreturned_permits() for one in self._callers.values()))
        passed_s = self._passed_ms / 1000
        calls = max(1, sum(self._outcomes.values()))
        waits = sorted(self._waits_ms) or [0.0]
        return Seen(
            calls / passed_s,
            self._outcomes["admitted"] / passed_s,
            sum(self._kinds.values()) / passed_s,
            1 - len(self._waits_ms) / calls,
            self._outcomes["failed"] / calls,
            self._busy_us / 1e6 / passed_s,
            statistics.mean(held),
            percentile(waits, 0.5),
            percentile(waits, 0.99),
            self._kinds,
        )

    def _run(self, seconds: float) -> None:
        if not self._kinds and not self._outcomes:
            self._passed_ms = 0.0
        self._passed_ms += 1000 * seconds
        rate = self._fleet.key_rate * self._sampled / 1000
        end, rng = self.store.ms + 1000 * seconds, self._rng
        at = self.store.ms + rng.expovariate(rate)
        while at < end:
            self._wait_until(at)
            number = rng.randrange(self._fleet.processes)
            self._call(self._caller(number), f"key:{rng.randrange(self._sampled)}")
            at += rng.expovariate(rate)
        self._wait_until(end)

    def _caller(self, number: int) -> Caller:
        caller = self._callers.get(number)
        if caller is None:
            caller = self._callers[number] = Caller(
                self.store,
                self._fleet.limit,
                self._strategy,
                origin=self.store.monotonic() - 50.0,
            )
        return caller

    def _strategy(self, commands: CommandCache, clock: LocalClock) -> Strategy:
        return _STRATEGIES[self._mode](commands, clock, Options())

    # -- events -----------------------------------------------------------------------------------

    def _at(self, ms: float, event: Callable[[], None]) -> None:
        heappush(self._events, (ms, next(self._order), event))

    def _wait_until(self, ms: float) -> None:
        while self._events and self._events[0][0] <= ms:
            self.store.ms, _, event = heappop(self._events)
            event()
        self.store.ms = ms

    def _call(self, caller: Caller, key: str) -> None:
        began_ms, found = self.store.ms, caller.begin(key)
        if isinstance(found, Decision):
            self._outcomes["admitted" if found.allowed else "refused"] += 1
        else:
            end = partial(self._on_call_ended, caller, began_ms)
            self._advance(found, None, began_ms + TIMEOUT_MS, end)
        self._schedule_flush(caller)

    def _on_call_ended(self, caller: Caller, began_ms: float, result: object) -> None:
        self._waits_ms.append(self.store.ms - began_ms)
        if isinstance(result, Decision):
            self._outcomes["admitted" if result.allowed else "refused"] += 1
        else:
            self._outcomes["failed"] += 1
        self._schedule_flush(caller)

    def _advance(
        self,
        operation: Generator[Any, Any, Any],
        reply: object,
        deadline_ms: float,
        end: Callable[[object], None],
    ) -> None:
        """Give `reply` to the operation, and do its next step."""
        try:
            failed = isinstance(reply, StoreTimeout)
            step = operation.throw(reply) if failed else operation.send(reply)  # type: ignore[arg-type]  # it is one
        except StopIteration as done:
            end(done.value)
            return
        except StoreTimeout as failure:
            end(failure)
            return

        def resume(reply: object = None) -> None:
            self._advance(operation, reply, deadline_ms, end)

        if isinstance(step, Sleep):
            self._at(self.store.ms + 1000 * step.seconds, resume)
        elif isinstance(step, WaitFor):
            now = self.store.ms
            self._wait_for(step.completion, now, now + 1000 * step.seconds, resume)
        else:
            one_way_ms = self._fleet.rtt_ms / 2
            send = partial(self._arrive, step, deadline_ms, resume)
            self._at(self.store.ms + one_way_ms, send)

    def _wait_for(
        self, completion: Completion, since_ms: float, until_ms: float, resume: Callable[[], None]
    ) -> None:
        """Look for the completion again and again, ever more seldom."""
        now = self.store.ms
        if completion.is_complete or now >= until_ms:
            resume()
        else:
            again = partial(self._wait_for, completion, since_ms, until_ms, resume)
            self._at(min(until_ms, now + max(0.1, (now - since_ms) / 8)), again)

    def _schedule_flush(self, caller: Caller) -> None:
        if caller.flushing:
            return
        # A little later: an event that the error of a float makes too early finds nothing due.
        at_ms = max(caller.due_at_ms(), self.store.ms) + 0.01
        if at_ms < caller.flush_at_ms:
            caller.flush_at_ms = at_ms
            self._at(at_ms, partial(self._flush, caller))

    def _flush(self, caller: Caller) -> None:
        caller.flush_at_ms = float("inf")
        if caller.flushing or caller.due_at_ms() > self.store.ms:
            self._schedule_flush(caller)
            return

        def end(_: object) -> None:
            caller.flushing = False
            self._schedule_flush(caller)

        caller.flushing = True
        operation = flush_due(caller.strategy, caller.clock.monotonic)
        self._advance(operation, None, float("inf"), end)

    # -- the server -------------------------------------------------------------------------------

    def _arrive(self, step: Any, deadline_ms: float, resume: Callable[[object], None]) -> None:
        """Queue the commands of one exchange, and execute them when their turn comes."""
        if isinstance(step, Fetch):
            step = step.command
        commands = step.commands if isinstance(step, Pipeline) else (step,)
        start = max(self.store.ms, self._free_at)
        late = start > deadline_ms
        took_us = LATE_US if late else sum(self._cost_us(command) for command in commands)
        self._free_at = start + took_us / 1000

        def execute() -> None:
            if late:
                self._kinds["late"] += 1
                self._busy_us += LATE_US
                reply: object = None
            else:
                replies = [self._execute(command) for command in commands]
                reply = replies if isinstance(step, Pipeline) else replies[0]
            replied_ms = self._free_when(start, took_us)
            if replied_ms > deadline_ms:
                lost = StoreTimeout("too late", charged=None)
                self._at(max(self.store.ms, deadline_ms), partial(resume, lost))
            else:
                self._at(replied_ms, partial(resume, reply))

        self._at(start, execute)

    def _free_when(self, start: float, took_us: float) -> float:
        return start + took_us / 1000 + self._fleet.rtt_ms / 2

    def _cost_us(self, command: Command[Any]) -> float:
        if isinstance(command, Lease):
            return self._costs.lease
        if isinstance(command, Refund):
            return self._costs.refund
        if isinstance(command, Flush):
            return self._costs.sync if command.pull else self._costs.flush
        return self._costs.acquire

    def _execute(self, command: Command[Any]) -> object:
        reply = self.store.execute(command)
        cost_us, kind = self._cost_us(command), type(command).__name__.lower()
        if isinstance(reply, Decision):
            ring = command.charges[0].ring  # type: ignore[attr-defined]  # an Acquire
            bucket = int(self.store.ms) // self._fleet.limit.bucket_ms
            if not reply.allowed:
                cost_us, kind = self._costs.refused, "refused"
            elif self._opened.get(ring) != bucket:
                self._opened[ring] = bucket
                cost_us, kind = self._costs.opening, "opening"
        self._kinds[kind] += 1
        self._busy_us += cost_us
        return reply
