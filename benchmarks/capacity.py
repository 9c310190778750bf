"""Fleets past one machine, simulated: `python -m benchmarks.capacity`. Prints tables in Markdown.

- by default: a discrete-event simulation of up to 10,000 processes and a million keys, beside what
  `distwindow plan` computes for the same fleet; one shard on its way to saturation; a split key;
  keys on up to 100 shards; and where one key ends.
- `--costs`: what the server's core spends on each kind of command: the constants of the plan.
- `--real`: 40 and 500 limiters over a real server, beside the simulation of the same load.

The strategies are those of the library, over the store in memory, on a clock that the simulation
sets. A shard executes one command at a time, in the order in which they arrive, and each takes the
time that `--costs` has measured. Keys are alike, so of many keys a few are simulated, each called
by every process, and the figures are multiplied.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import random
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from redis.crc import key_slot

from benchmarks.consistency.setup import script_calls
from benchmarks.measure import log, percentile
from benchmarks.resp import Socket
from benchmarks.server import last_core, pinned, running
from benchmarks.server_cost import GUARD
from distwindow import AsyncLimiter, Limit
from distwindow.cli.plan import (
    BUSY,
    COSTS,
    MODES,
    Costs,
    Fleet,
    fullest_share,
    lost_share,
    make_plan,
)
from distwindow.errors import StoreTimeout
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.ring import key as keys
from distwindow.ring.command import Command, load_script
from distwindow.ring.commands import CURRENT_BUCKET, Acquire, Flush, Lease, Refund, charges_of
from distwindow.ring.decision import Charge, Decision
from distwindow.ring.stats import Bucket
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.flush import flush_due
from distwindow.runtime.options import Options
from distwindow.runtime.steps import Completion, Fetch, Pipeline, Sleep, WaitFor
from distwindow.runtime.strategy import Strategy
from tests.simulation.process import LocalClock, Process, SimulatedStore

TIMEOUT_MS = 250.0
"""The deadline of a call, which is the default of the limiters."""
LATE_US = 6.0
"""Of the server's core for a command that is executed after its deadline, and does nothing."""
_STRATEGIES: dict[str, Callable[[CommandCache, LocalClock, Options], Strategy]] = {
    "direct": Direct,
    "leased": Leased,
    "eventual": Eventual,
}

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
        held, passed_s = [], 0.0
        moments = sorted(seconds * self._rng.random() for _ in range(20))
        for moment in moments:  # random ones, as leases come and go with the buckets
            self._run(moment - passed_s)
            passed_s = moment
            held.append(sum(one.strategy.unreturned_permits() for one in self._callers.values()))
        self._run(seconds - passed_s)
        calls = max(1, sum(self._outcomes.values()))
        waits = sorted(self._waits_ms) or [0.0]
        return Seen(
            calls / seconds,
            self._outcomes["admitted"] / seconds,
            sum(self._kinds.values()) / seconds,
            1 - len(self._waits_ms) / calls,
            self._outcomes["failed"] / calls,
            self._busy_us / 1e6 / seconds,
            statistics.mean(held),
            percentile(waits, 0.5),
            percentile(waits, 0.99),
            self._kinds,
        )

    def _run(self, seconds: float) -> None:
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
            if isinstance(reply, StoreTimeout):
                step = operation.throw(reply)
            else:
                step = operation.send(reply)
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
        replied_ms = self._free_at + self._fleet.rtt_ms / 2
        if replied_ms > deadline_ms:  # the caller gives up, and the commands stay in the queue
            self._at(deadline_ms, partial(resume, StoreTimeout("too late", charged=None)))

        def execute() -> None:
            if late:
                self._kinds["late"] += 1
                self._busy_us += LATE_US
                return
            replies = [self._execute(command) for command in commands]
            if replied_ms <= deadline_ms:
                reply = replies if isinstance(step, Pipeline) else replies[0]
                self._at(replied_ms, partial(resume, reply))

        self._at(start, execute)

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
        if isinstance(command, Flush) and not command.sender:
            return reply  # a process asks once for the time, before its first sync
        cost_us, kind = self._cost_us(command), type(command).__name__.lower()
        if isinstance(reply, Decision):
            ring = command.charges[0].ring
            bucket = int(self.store.ms) // self._fleet.limit.bucket_ms
            if not reply.allowed:
                cost_us, kind = self._costs.refused, "refused"
            elif self._opened.get(ring) != bucket:
                self._opened[ring] = bucket
                cost_us, kind = self._costs.opening, "opening"
        self._kinds[kind] += 1
        self._busy_us += cost_us
        return reply


class Case(NamedTuple):
    """A fleet that is simulated, and of how many of its keys."""

    fleet: Fleet
    sampled: int
    seconds: float
    warm_up_s: float


def case_of(processes: int, calls: float, number_of_keys: int, limit: str, budget: int) -> Case:
    """Return a case of about `budget` calls; near the limit it lasts for whole windows."""
    fleet = Fleet(processes, calls, number_of_keys, Limit(limit))
    window_s = fleet.window_s
    full = fleet.key_rate * window_s > 0.7 * fleet.limit.amount
    least_s = window_s if full else min(1.0, window_s)
    sampled = round(budget / (fleet.key_rate * 3 * least_s))
    sampled = max(1, min(number_of_keys, sampled, 2000))
    calls_a_window = fleet.key_rate * sampled * least_s
    seconds = least_s * max(1, round(2 * budget / 3 / calls_a_window))
    if not full:
        seconds = min(seconds, 10.0, max(0.2, 2 * budget / 3 / (fleet.key_rate * sampled)))
    return Case(fleet, sampled, seconds, 2 * window_s if full else seconds / 2)


CASES: tuple[tuple[int, float, int, str], ...] = (
    (10, 50, 1, "1000/second"),
    (40, 42, 1, "3000/second"),
    (40, 75, 1, "3000/second"),
    (40, 112, 1, "3000/second"),
    (500, 6, 1, "3000/second"),
    (500, 12, 1, "3000/second"),
    (10, 2000, 1, "10000/second"),
    (100, 1000, 10, "20000/second"),
    (20, 200, 2, "1000/second strict"),
    (20, 20, 1, "1000/minute"),
    (1000, 40, 1, "60000/second"),
    (1000, 100, 1, "1000/second"),
    (2000, 50, 100, "1000/second"),
    (2000, 50, 100_000, "100/second"),
    (10_000, 2, 1, "30000/second"),
    (10_000, 10, 1_000_000, "600/minute"),
)
"""Processes, calls a second of each, keys, and the limit."""


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if 0 < value < TIMEOUT_MS else "-"


def compare(quick: bool) -> None:
    """Print what the simulation sees beside what `distwindow plan` computes."""
    log("capacity: fleets")
    print(
        "| fleet | load | mode | commands a second | plan | busy cores | plan | local | plan "
        "| p99 of asking | plan | held | plan | |\n|---|---:|---|" + "---:|" * 11
    )
    ratios: list[float] = []
    for processes, calls, number_of_keys, limit in CASES[::4] if quick else CASES:
        case = case_of(processes, calls, number_of_keys, limit, 10_000 if quick else 30_000)
        fleet, share = case.fleet, number_of_keys / case.sampled
        load = fleet.key_rate * fleet.window_s / fleet.limit.amount
        for mode in MODES:
            seen = Shard(mode, fleet, case.sampled).observe(case.seconds, case.warm_up_s)
            plan = make_plan(fleet, mode)
            whole = case.sampled == number_of_keys  # the queue of a part of the keys says nothing
            full = whole and plan.cores > 1
            if not full:
                cores = plan.cores / (seen.busy * share)
                ratios += [plan.commands / (seen.commands * share), cores]
            name = f"{processes:,} x {calls:g}/s on {number_of_keys:,}, {limit}"
            print(
                f"| {name} | {load:.2f} | `{mode}` | {seen.commands * share:,.0f} | "
                f"{plan.commands:,.0f} | {seen.busy * share:.3f} | {plan.cores:.3f} | "
                f"{100 * seen.local:.1f} % | {100 * plan.local:.1f} % | "
                f"{_ms(seen.p99_ms if whole else 0)} | {_ms(plan.wait_ms)} | "
                f"{seen.held * share:,.0f} | {plan.held:,.0f} | {'full' if full else ''} |",
                flush=True,
            )
    least, most = min(ratios), max(ratios)
    within = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
    print(
        f"\nPlan over simulation, commands and cores: {least:.2f} to {most:.2f}; "
        f"{within} of {len(ratios)} within 20 %.\n"
    )


def saturate(quick: bool) -> None:
    """Print the latency of one key in `direct` on one shard, ever busier."""
    log("capacity: saturation")
    print("| busy | p50 | p99 | plan | calls without an answer in 250 ms |\n|---:|" + "---:|" * 4)
    for busy in (0.5, 0.9, 1.5) if quick else (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.5):
        fleet = Fleet(200, busy / COSTS.acquire * 1e6 / 200, 1, Limit("1000000/second"))
        # Beyond the capacity the queue takes this long to reach the timeout.
        warm_up_s = 0.1 if busy < 1 else 0.3 / (busy - 1)
        seconds = 0.1 if quick else 0.5
        seen = Shard("direct", fleet, 1).observe(seconds, warm_up_s)
        plan = make_plan(fleet, "direct", 1)
        print(
            f"| {100 * busy:.0f} % | {seen.p50_ms:.2f} ms | {seen.p99_ms:.2f} ms | "
            f"{f'{plan.wait_ms:.2f} ms' if busy < 1 else '-'} | {100 * seen.failed:.0f} % |",
            flush=True,
        )
    print()


def split(quick: bool) -> None:
    """Print what is refused early where a key is split into parts, and calls go to any of them."""
    log("capacity: a split key")
    loads = (0.8, 0.9, 1.0)
    heads = " | ".join(f"load {load:g} | formula" for load in loads)
    print(f"| parts of 1000/second | {heads} |\n|---:|" + "---:|" * 2 * len(loads))
    for parts in (1, 10) if quick else (1, 2, 5, 10, 20, 50):
        cells = []
        for load in loads:
            amount = 1000 // parts
            fleet = Fleet(50, load * 1000 / 50, parts, Limit(f"{amount}/second"))
            seen = Shard("direct", fleet, parts).observe(3 if quick else 20, 2)
            formula = lost_share(load * amount, amount, fleet.limit.span)
            cells.append(f"{100 * (1 - seen.admitted / seen.calls):.1f} % | {100 * formula:.1f} %")
        print(f"| {parts} | {' | '.join(cells)} |", flush=True)
    print()


def spread() -> None:
    """Print the load of the fullest shard over the mean, of keys by their hash slots."""
    log("capacity: keys on shards")
    shards = (3, 10, 30, 100)
    print(f"| keys | {' | '.join(f'{n} shards | plan' for n in shards)} |")
    print("|---:|" + "---:|" * 2 * len(shards))
    chance = random.Random(1)
    for number_of_keys in (10, 100, 1000, 10_000, 1_000_000):
        slots = [key_slot(b"user:%d" % chance.getrandbits(40)) for _ in range(number_of_keys)]
        cells = []
        for n in shards:
            fullest = max(Counter(slot * n // 16384 for slot in slots).values())
            planned = n * fullest_share(number_of_keys, n)
            cells.append(f"{n * fullest / number_of_keys:.2f} | {planned:.2f}")
        print(f"| {number_of_keys:,} | {' | '.join(cells)} |", flush=True)
    print()


MOST_CALLS = 2000.0
"""Calls a second of one process up to which `ends` looks."""


def ends() -> None:
    """Print how many calls a second of one key, at half of its limit, a shard decides when it is as
    busy as `BUSY`.
    """
    print("| processes on one key | " + " | ".join(f"`{mode}`" for mode in MODES) + " |")
    print("|---:|" + "---:|" * len(MODES))
    for processes in (10, 100, 500, 1000, 2000, 5000, 10_000):
        cells = []
        for mode in MODES:
            calls = 0.1
            while calls < MOST_CALLS and _key_cores(processes, calls, mode) <= BUSY:
                calls *= 1.01
            whole = calls >= MOST_CALLS
            cells.append("no end" if whole else f"{processes * calls:,.0f}")
        print(f"| {processes:,} | {' | '.join(cells)} |")
    print()


def _key_cores(processes: int, calls: float, mode: str) -> float:
    limit = Limit(max(1, round(2 * processes * calls)), per=1)
    return make_plan(Fleet(processes, calls, 1, limit), mode).key_cores


# --------------------------------------------------------------------------------------------------
#
# What the server spends.

IN_FLIGHT = 8
"""Connections with a command each, so that the server is neither idle nor full."""
ROUNDS, CALLS = 9, 1_200
_HIGH, _LOW = Limit("1000000/second"), Limit("10/hour")


def _charges(limit: Limit, number: int | str) -> tuple[Charge, ...]:
    return charges_of("user", keys.ring_name_prefix("distwindow", f"user:{number}"), [limit], 1)


def _frame(kind: str, number: int, serial: int) -> bytes:
    """Return a command of this kind, as `Costs` names it."""
    high = _charges(_HIGH, number)
    if kind == "refused":
        return Acquire(_charges(_LOW, number)).frame(GUARD)
    if kind == "opening":
        return Acquire(_charges(_HIGH, f"new:{serial}")).frame(GUARD)
    if kind == "lease":
        return Lease(high, extra=5).frame(GUARD)
    if kind == "refund":
        return Refund(high, charged_ms=int(time.time() * 1000)).frame(GUARD)
    if kind in ("flush", "sync"):
        counts = ((Bucket(CURRENT_BUCKET, int(kind == "sync"), int(kind == "flush")),),)
        sender = f"{serial % 40:010x}"
        return Flush(high, counts=counts, sender=sender, seq=serial, pull=kind == "sync").frame(
            GUARD
        )
    return Acquire(high).frame(GUARD)


def _cpu_us(connection: Socket) -> float:
    found = connection.info("cpu")
    names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
    if names[0] not in found:  # before Redis 6.2.8 and in Valkey's forks
        names = ("used_cpu_user", "used_cpu_sys")
    return 1e6 * sum(float(found[name]) for name in names)


def measure_costs(in_flight: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds of the server's main thread for one command of each kind, by round."""
    costs: dict[str, list[float]] = {kind: [] for kind in Costs._fields}
    serials = itertools.count(1)
    with running(last_core()) as server, Socket(server.port) as control:
        for name in ("acquire", "lease", "refund", "flush"):
            control.call("SCRIPT", "LOAD", load_script(name).text)
        for number in range(200):
            control.pipeline([_frame("refused", number, 0)] * 11)
        clients = [Socket(server.port) for _ in range(in_flight)]
        for _ in range(rounds):
            for kind in random.sample(list(costs), len(costs)):
                frames = [_frame(kind, n % 200, next(serials)) for n in range(CALLS)]
                before = _cpu_us(control)
                for at in range(0, CALLS, in_flight):
                    for client, frame in zip(clients, frames[at:], strict=False):
                        client.send(frame)
                    for client in clients[: CALLS - at]:
                        client.receive()
                costs[kind].append((_cpu_us(control) - before) / CALLS)
        for client in clients:
            client.__exit__(None, None, None)
    return costs


def measure_connection(connections: int) -> float:
    """Return the bytes of the server for one connection that calls once a second."""
    with running() as server, Socket(server.port) as control:
        before = int(control.info("memory")["used_memory"])
        clients = [Socket(server.port) for _ in range(connections)]
        for _ in range(6):
            for client in clients:
                client.call("PING", "x" * 200)
            time.sleep(1)
        after = int(control.info("memory")["used_memory"])
        for client in clients:
            client.__exit__(None, None, None)
    return (after - before) / connections


def measure_full() -> float | None:
    """Return microseconds of the main thread for one acquire of a server that redis-benchmark keeps
    as busy as it can, with 50 connections; None where that is not installed.
    """
    program, calls = shutil.which("redis-benchmark"), 200_000
    if program is None:
        return None
    command, script = Acquire(_charges(_HIGH, 1)), load_script("acquire")
    arguments = [*command.keys, GUARD, *command.arguments()]
    words = [one.decode() if isinstance(one, bytes) else str(one) for one in arguments]
    with running(last_core()) as server, Socket(server.port) as control:
        control.call("SCRIPT", "LOAD", script.text)
        before = _cpu_us(control)
        options = [program, "-p", str(server.port), "-c", "50", "-n", str(calls), "-q"]
        with pinned(0):
            subprocess.run(
                [*options, "EVALSHA", script.sha, "1", *words], capture_output=True, check=True
            )
        return (_cpu_us(control) - before) / calls


def print_costs(quick: bool) -> None:
    print(
        "| command | one in flight | 8 in flight | 50 in flight | the plan's |\n|---|" + "---:|" * 4
    )
    found = [measure_costs(n, 2 if quick else ROUNDS) for n in (1, IN_FLIGHT, 50)]
    for kind in Costs._fields:
        cells = " | ".join(f"{statistics.median(one[kind]):.1f} µs" for one in found)
        print(f"| {kind} | {cells} | {getattr(COSTS, kind):g} µs |")
    print(f"\nA connection: {measure_connection(200):,.0f} B.")
    full = [us for _ in range(2 if quick else 5) if (us := measure_full()) is not None]
    if full:
        print(
            "An acquire of a server that redis-benchmark keeps full: "
            f"{statistics.median(full):.1f} µs."
        )
    print()


# --------------------------------------------------------------------------------------------------
#
# Real fleets.

KEY = "hot"


class Worker(NamedTuple):
    """What one operating-system process does: it is several processes of the fleet."""

    url: str
    mode: str
    limit: str
    limiters: int
    rate: float
    """Calls of each limiter per second, at random times."""
    begin: float
    first: float
    """What is admitted from this time on counts."""
    end: float


def _work(worker: Worker) -> tuple[int, int, int]:
    """Run in a process of its own. Return calls, admissions, and calls that were decided here."""
    return asyncio.run(_work_async(worker))


async def _work_async(worker: Worker) -> tuple[int, int, int]:
    counts: Counter[str] = Counter()

    async def call(limiter: AsyncLimiter) -> None:
        decision = await limiter.try_acquire(KEY)
        if worker.first <= time.time() < worker.end:
            counts["calls"] += 1
            counts["admitted"] += decision.allowed
            counts["local"] += decision.source != "store"

    async def run(seed: int) -> None:
        chance = random.Random(seed)
        calls: set[asyncio.Task[None]] = set()
        async with AsyncLimiter(
            worker.url,
            worker.limit,
            consistency=worker.mode,  # type: ignore[arg-type]  # a str, but one of MODES
            timeout=5,
        ) as limiter:
            await limiter.try_acquire("not hot")  # connects
            at = worker.begin + chance.expovariate(worker.rate)
            while at < worker.end:
                await asyncio.sleep(max(0.0, at - time.time()))
                task = asyncio.create_task(call(limiter))
                calls.add(task)
                task.add_done_callback(calls.discard)
                at += chance.expovariate(worker.rate)
            await asyncio.gather(*calls)

    await asyncio.gather(*(run(random.randrange(10**9)) for _ in range(worker.limiters)))
    return counts["calls"], counts["admitted"], counts["local"]


REAL: tuple[tuple[str, int, float, str], ...] = (
    ("leased", 500, 5.4, "3000/second"),
    ("leased", 500, 5.8, "2700/second"),
    ("leased", 40, 42.0, "3000/second"),
    ("leased", 40, 75.0, "3000/second"),
    ("direct", 40, 75.0, "2000/second"),
    ("eventual", 40, 75.0, "3000/second"),
)
"""Mode, limiters, calls of each a second, and the limit of the one key."""


def compare_real(quick: bool) -> None:
    """Print what a real server is sent, beside the simulation and the plan of the same load."""
    seconds, workers = (3.0 if quick else 8.0), 10
    print(
        "| limiters | mode | calls a second | commands a second: real | simulated | plan "
        "| for 1,000 admissions: real | simulated | local: real | simulated "
        "| server's core: real | plan |\n"
        "|---:|---|" + "---:|" * 10
    )
    context = multiprocessing.get_context("spawn")
    with running() as server, ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in [pool.submit(time.sleep, 1.0) for _ in range(workers)]:
            future.result()  # a process that is busy lets the pool start the next one
        for mode, limiters, rate, limit in REAL:
            server.flush()
            begin = time.time() + 3.0
            first, end = begin + 2.0, begin + 2.0 + seconds
            work = Worker(server.url, mode, limit, limiters // workers, rate, begin, first, end)
            futures = [pool.submit(_work, work) for _ in range(workers)]
            with Socket(server.port) as connection:
                time.sleep(first - time.time())
                scripts, cpu_us = script_calls(server), _cpu_us(connection)
                time.sleep(end - time.time())
                scripts, cpu_us = script_calls(server) - scripts, _cpu_us(connection) - cpu_us
            calls, admitted, local = (
                sum(found) for found in zip(*(future.result() for future in futures), strict=True)
            )
            fleet = Fleet(limiters, calls / seconds / limiters, 1, Limit(limit))
            seen = Shard(mode, fleet, 1).observe(5.0, 2.0)
            plan = make_plan(fleet, mode)
            print(
                f"| {limiters} | `{mode}`, {limit} | {calls / seconds:,.0f} | "
                f"{scripts / seconds:,.0f} | {seen.commands:,.0f} | {plan.commands:,.0f} | "
                f"{1000 * scripts / admitted:,.0f} | {1000 * seen.commands / seen.admitted:,.0f} | "
                f"{100 * local / calls:.1f} % | {100 * seen.local:.1f} % | "
                f"{cpu_us / 1e6 / seconds:.3f} | {plan.cores:.3f} |",
                flush=True,
            )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer fleets, for a shorter time")
    parser.add_argument("--costs", action="store_true", help="measure the constants of the plan")
    parser.add_argument("--real", action="store_true", help="a real server beside the simulation")
    options = parser.parse_args()
    if options.costs:
        print_costs(options.quick)
    if options.real:
        compare_real(options.quick)
    if not options.costs and not options.real:
        compare(options.quick)
        saturate(options.quick)
        split(options.quick)
        spread()
        ends()


if __name__ == "__main__":
    main()
