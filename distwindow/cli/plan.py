"""`distwindow plan`: what a fleet needs of Redis, computed from its size before it is built.

The model is a handful of formulas, and needs no server. Its constants are measured, or fitted to a
simulation of whole fleets that runs the strategies themselves (`python -m benchmarks.capacity`).
They agree within a fifth. docs/capacity.md says what the model leaves out.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, NamedTuple

import typer

from .. import Limit
from .command import JsonOption, report_errors
from .render import format_rate, make_console
from .table import Column, Table

MODES = ("direct", "leased", "eventual")


class Costs(NamedTuple):
    """Microseconds of a shard's core for one command, its part of the socket included, by kind."""

    acquire: float = 7.8
    opening: float = 9.8
    """An acquire that opens a bucket."""
    refused: float = 8.4
    lease: float = 13.9
    refund: float = 12.9
    flush: float = 20.5
    """Refusals that were repeated in a process."""
    sync: float = 29.2
    """A flush of `eventual`, which returns the counts of the fleet."""


# `python -m benchmarks.capacity --costs`: eight connections, one command at a time on each.
COSTS = Costs()
CONNECTION_B = 23_000
KEY_TABLES_B = 65
"""Bytes that Redis's tables take for each key with a TTL (docs/operations.md)."""
FLUSH_INTERVAL_S, SYNC_INTERVAL_S = 0.25, 0.1
"""The defaults of the limiters."""
TIMEOUT_MS = 250.0
BUSY = 0.7
"""The share of its time for which a shard may be busy. At 0.7 a command waits one and a half times
its own time on average, and growth by two fifths is left.
"""
MAX_SHARDS = 1000


def ring_bytes(limit: Limit, admitted: float) -> float:
    """Return the bytes of a ring with so many admissions a second (docs/operations.md)."""
    width_s = limit.bucket_ms / 1000
    buckets = limit.span * -math.expm1(-admitted * width_s)
    in_each = admitted * width_s
    count_b = 0 if in_each <= 127 else 1 if in_each <= 4095 else 2
    slot_b = 4 * min(buckets, 128) + 5 * max(0.0, buckets - 128)
    return 210 + slot_b + count_b * buckets


def senders_bytes(processes: float) -> float:
    """Return the bytes of the records of processes that flush to one ring (docs/operations.md)."""
    if processes < 0.5:
        return 0.0
    return KEY_TABLES_B + 104 + processes * (26 if processes <= 64 else 69)


def process_bytes(mode: str, keys: float) -> float:
    """Return the bytes that a process keeps of so many keys, by default (docs/operations.md)."""
    per_key = {"direct": 0, "leased": 400, "eventual": 1500}[mode]
    return 700 * min(keys, 32_768) + per_key * min(keys, 100_000)


class Fleet(NamedTuple):
    """A fleet whose calls are spread evenly over its keys, at random times."""

    processes: int
    calls: float
    """Calls of each process per second."""
    keys: int
    limit: Limit
    rtt_ms: float = 0.5
    """Of a command and its reply, without the time at the server."""

    @property
    def rate(self) -> float:
        """Calls per second of one process on one key."""
        return self.calls / self.keys

    @property
    def key_rate(self) -> float:
        """Calls per second of all processes on one key."""
        return self.processes * self.calls / self.keys

    @property
    def window_s(self) -> float:
        """The summed time: a saturated key gets the amount in it."""
        return self.limit.span * self.limit.bucket_ms / 1000

    @property
    def refused(self) -> float:
        """The share of calls that the limit refuses."""
        limit = self.limit
        return lost_share(self.key_rate * self.window_s, limit.amount, limit.span)


def lost_share(expected: float, amount: int, span: int) -> float:
    """Return the share of calls that `amount` does not admit, where `expected` come in a window of
    `span` buckets, at random times.

    Their number is nearly normal, so that of a window E(N - amount)+ are lost. Besides, a permit is
    taken until its bucket leaves, which is Erlang's loss: half a bucket less than the window, on
    average. The first is more for large amounts and beyond the limit, the second for small ones.
    """
    if expected <= 0:
        return 0.0
    deviation = math.sqrt(expected)
    above = (amount - expected) / deviation
    lost = deviation * (_density(above) - above * _normal(-above)) / expected
    taken = expected * (span - 0.5) / span
    above = (amount - taken + 0.5) / math.sqrt(taken)
    if above > -30:  # beyond that, 1 - amount / expected is lost
        lost = max(lost, _density(above) / _normal(above) / math.sqrt(taken))
    return min(1.0, max(0.0, lost))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


class PairLoad(NamedTuple):
    """What one process does with one key, per second."""

    acquire: float = 0.0
    refused: float = 0.0
    lease: float = 0.0
    refund: float = 0.0
    flush: float = 0.0
    sync: float = 0.0
    waits: float = 0.0
    """Calls that wait for a reply of Redis."""
    held: float = 0.0
    """Permits that are charged and not spent, on average."""
    leases: float = 0.0
    """The share of its buckets in which the process leases."""

    @property
    def commands(self) -> float:
        return sum(self[:6])


def direct_load(fleet: Fleet) -> PairLoad:
    """Every admission is a command. A refusal is repeated until its bucket ends, and what was
    repeated is flushed.
    """
    rate, refused = fleet.rate, fleet.refused
    width_s = fleet.limit.bucket_ms / 1000
    asked = refused * rate / (1 + rate * width_s)
    repeated = rate * rate * width_s / (1 + rate * width_s)
    flushes = refused * repeated / (1 + FLUSH_INTERVAL_S * repeated)
    admitted = rate * (1 - refused)
    return PairLoad(acquire=admitted, refused=asked, flush=flushes, waits=admitted + asked)


_LEASE_S = 0.25
"""For how long a lease is to last at most (`local/leases.py`)."""


def _either(one: float, other: float) -> float:
    """Return a smooth minimum: what both bound, where chance decides which of them holds."""
    return float((one**-3 + other**-3) ** (-1 / 3))


def leased_calls(rate: float, width_s: float, rtt_ms: float) -> tuple[float, float, float, float]:
    """Return what a process sends for one key, far below its limit, that makes `rate` calls a
    second under buckets of `width_s`: acquires, leases and refunds per second, and the share of its
    buckets in which it leases.

    The constants are fitted to the simulation. Below some three calls in the time of a lease each
    call is a command. Above, a bucket costs some four commands whatever the rate: the lease at its
    begin, those that top it up, an acquire that extends it when its time, 10/11 of the bucket, is
    over, and the refund of what is left. Leases end after a quarter of a second, too. At very high
    rates, each call that is made while the first lease of a bucket is on its way is a command.
    """
    if rate <= 0:
        return 0.0, 0.0, 0.0, 0.0
    lease_s = min(width_s, _LEASE_S)
    leases = 1 / (1 + (2.9 / (rate * min(0.85 * width_s, _LEASE_S))) ** 6)
    on_its_way = rate * min(width_s, 0.0017 + 0.0016 * rtt_ms) / width_s
    topped_up = (1 + 9 / (rate * lease_s) ** 2) / lease_s + 2.4 / width_s
    few = max(0.2, 1 - 0.004 / width_s) * topped_up
    many = 1.1 / width_s + 1 / lease_s + on_its_way
    commands = _either(rate, max(few, many))
    waits = min(commands, rate * (1 - leases) + leases * min(rate, 1.85 / width_s + on_its_way))
    first = min(waits, leases / width_s)
    unspent = rate * lease_s / (rate * lease_s + 9)
    refunds = min(commands - waits, leases * unspent / width_s)
    return waits - first, commands - refunds - (waits - first), refunds, leases


def leased_load(fleet: Fleet) -> PairLoad:
    """As `direct`, but for a key with demand permits come in blocks.

    At the limit, short buckets open room a little at a time, and a process leases for what it is
    admitted; long ones are open for a part of the time, in which it leases for all that it calls.
    Half of what is left is the most, so that leases near the limit are ever smaller.
    """
    direct, rate, refused = direct_load(fleet), fleet.rate, fleet.refused
    width_s = fleet.limit.bucket_ms / 1000
    short, open_share = min(1.0, _LEASE_S / width_s), 1 - refused
    part = leased_calls(rate * open_share, width_s, fleet.rtt_ms)
    whole = leased_calls(rate, width_s, fleet.rtt_ms)
    acquire, lease, refund, leases = (
        short * at_limit + (1 - short) * open_share * far_below
        for at_limit, far_below in zip(part, whole, strict=True)
    )
    load = fleet.key_rate * fleet.window_s / fleet.limit.amount
    near_limit = min(1.0, max(0.0, 2.5 * load - 2))
    halved = max(0.0, math.log(max(1.0, rate * open_share * width_s / 7.5)))
    waits = acquire + min(lease, leases / width_s) + direct.refused
    return direct._replace(
        acquire=acquire,
        lease=lease + short * near_limit * leases * halved / width_s,
        refund=refund,
        waits=min(rate, waits),
        held=leases * rate * open_share**2 * min(width_s, _LEASE_S) / 3,
        leases=leases,
    )


def eventual_load(fleet: Fleet) -> PairLoad:
    """Counts are exchanged each sync interval in which there are any. A key that was called at two
    syncs within its window is polled after that, each time an eighth of its idle time later.
    """
    rate, window_s = fleet.rate, fleet.window_s
    counting = -math.expm1(-rate * SYNC_INTERVAL_S) / SYNC_INTERVAL_S
    polls, idle_s = 0.0, max(SYNC_INTERVAL_S, 1 / (16 * rate) if rate else math.inf)
    while idle_s < min(window_s, 60.0):
        polls += math.exp(-rate * idle_s)
        idle_s += max(SYNC_INTERVAL_S, idle_s / 8)
    return PairLoad(sync=counting * (1 - math.expm1(-rate * window_s) * polls))


LOADS = {"direct": direct_load, "leased": leased_load, "eventual": eventual_load}


class Plan(NamedTuple):
    """What a fleet needs in one mode."""

    mode: str
    commands: float
    """Per second, as all other rates."""
    cores: float
    shards: int | None
    """None: no number up to `MAX_SHARDS` keeps the fullest at `BUSY`, as one key alone does not."""
    busy: float
    """The share of its time for which the fullest shard is busy; 1 and more is beyond it."""
    memory: float
    """Bytes of all shards."""
    process_memory: float
    """Bytes in each process."""
    admitted: float
    local: float
    """The share of calls that do not wait for Redis."""
    held: float
    """Permits that processes hold without having spent them, on average, of all keys."""
    above: float
    """Permits of one key that may be admitted above its limit, at the most."""
    wait_ms: float
    """The p99 of a call that asks Redis; infinite beyond the capacity."""
    key_cores: float
    """Cores that one key takes."""


def fullest_share(keys: int, shards: int) -> float:
    """Return the share of all keys that the fullest of `shards` has, as keys are hashed."""
    mean = keys / shards
    fullest = mean + math.sqrt(2 * mean * math.log(shards))
    return min(1.0, max(1.0, fullest) / keys)


def make_plan(fleet: Fleet, mode: str, shards: int | None = None, costs: Costs = COSTS) -> Plan:
    """Return what `fleet` needs; with `shards`, what so many give it."""
    load, pairs = LOADS[mode](fleet), fleet.processes * fleet.keys
    width_s, refused = fleet.limit.bucket_ms / 1000, fleet.refused
    admitted = fleet.key_rate * (1 - refused)
    # Of the acquires of a key, those that open its buckets cost more.
    opened = min(-math.expm1(-admitted * width_s) / width_s, fleet.processes * load.acquire)
    key_us = opened * (costs.opening - costs.acquire) + fleet.processes * sum(
        count * getattr(costs, kind) for kind, count in zip(load._fields[:6], load, strict=False)
    )
    commands, key_cores = load.commands * pairs, key_us / 1e6
    cores = key_cores * fleet.keys
    needed = shards if shards is not None else _shards_for(cores, fleet.keys)
    busy = cores * fullest_share(fleet.keys, needed or fleet.keys)
    mean_us = cores * 1e6 / commands if commands else costs.acquire
    return Plan(
        mode=mode,
        commands=commands,
        cores=cores,
        shards=needed,
        busy=busy,
        memory=_memory(fleet, load, needed or 1),
        process_memory=process_bytes(mode, fleet.keys),
        admitted=admitted * fleet.keys,
        local=1 - load.waits / fleet.rate if fleet.rate else 1.0,
        held=load.held * pairs,
        above=_above_limit(fleet) if mode == "eventual" else 0.0,
        wait_ms=_wait_ms(fleet, load, busy, mean_us, fullest_share(fleet.keys, needed or 1)),
        key_cores=key_cores,
    )


def _shards_for(cores: float, keys: int) -> int | None:
    """Return the least number of shards of which the fullest is not busier than `BUSY`."""
    return next(
        (n for n in range(1, MAX_SHARDS + 1) if cores * fullest_share(keys, n) <= BUSY), None
    )


def _memory(fleet: Fleet, load: PairLoad, shards: int) -> float:
    limit, admitted = fleet.limit, fleet.key_rate * (1 - fleet.refused)
    kept_s = (1.25 * limit.span + 1) * limit.bucket_ms / 1000
    alive = -math.expm1(-fleet.key_rate * kept_s)
    flushes = (load.flush + load.sync) * fleet.window_s
    senders = fleet.processes * -math.expm1(-flushes)
    of_key = alive * ring_bytes(limit, admitted) + senders_bytes(senders)
    return fleet.keys * of_key + fleet.processes * shards * CONNECTION_B


def _above_limit(fleet: Fleet) -> float:
    """The bound of docs/guarantees.md for `eventual`, of one key; and no more than all calls."""
    amount, calls = fleet.limit.amount, fleet.key_rate * fleet.window_s
    stale = fleet.key_rate * (2 * SYNC_INTERVAL_S + fleet.rtt_ms / 1000)
    most = calls + 3 * math.sqrt(calls) - amount
    return max(0.0, min((fleet.processes - 1) * amount, stale, most))


_SLEEP_MS = 5.0
"""A call that needs a lease sleeps where its bucket ends sooner than that (`local/leased.py`)."""


def _wait_ms(fleet: Fleet, load: PairLoad, busy: float, mean_us: float, share: float) -> float:
    """Return the p99 of calls that ask Redis: a queue of commands at random times, or, if that is
    longer, the one at the begin of a bucket, for which many processes ask at once.
    """
    if not load.waits:
        return 0.0
    if busy >= 1:
        return math.inf
    wait_ms = 0.0
    if busy > 0.01:  # the tail of M/G/1, with a coefficient of variation of a half
        wait_ms = 1.25 * mean_us / 2000 / (1 - busy) * math.log(busy / 0.01)
    pairs, rate_ms = fleet.processes * fleet.keys * share, fleet.rate / 1000
    width_s = fleet.limit.bucket_ms / 1000
    slept = load.leases * fleet.rate * min(1.0, _SLEEP_MS / 1000 / width_s)
    if slept > 0.01 * load.waits:
        sleepers = pairs * load.leases * -math.expm1(-_SLEEP_MS * rate_ms)
        wait_ms = max(wait_ms, _SLEEP_MS + sleepers * mean_us / 1000)
    elif fleet.refused > 0.01:
        # Room opens for all processes at one moment. Their calls come spread over 1 / rate.
        queue_ms = pairs * mean_us / 1000
        if queue_ms * rate_ms > 1:
            wait_ms = max(wait_ms, queue_ms - (1 + math.log(queue_ms * rate_ms)) / rate_ms)
    return fleet.rtt_ms + mean_us / 1000 + wait_ms


def split(fleet: Fleet, parts: int) -> Fleet:
    """Return the fleet whose calls go to any of `parts` keys, each with a part of the limit."""
    limit = fleet.limit
    part = Limit(max(1, limit.amount // parts), limit.per, buckets=limit.buckets, bound=limit.bound)
    return fleet._replace(keys=fleet.keys * parts, limit=part)


def parts_needed(fleet: Fleet, mode: str, costs: Costs = COSTS) -> int | None:
    """Return into how many parts a key has to be split so that a shard can take each of them."""
    for parts in range(1, min(MAX_SHARDS, fleet.limit.amount) + 1):
        if make_plan(split(fleet, parts), mode, costs=costs).key_cores <= BUSY:
            return parts
    return None


@report_errors
def plan(
    processes: Annotated[
        str, typer.Option(metavar="N", help="Processes of the fleet.", show_default=False)
    ],
    calls: Annotated[
        str, typer.Option(metavar="RATE", help="Calls of each per second.", show_default=False)
    ],
    keys: Annotated[
        str, typer.Option(metavar="N", help="Keys that are called, evenly.", show_default=False)
    ],
    limit: Annotated[
        str,
        typer.Option(
            "--limit",
            "-l",
            metavar="LIMIT",
            help="100/second, 5000/day strict.",
            show_default=False,
        ),
    ],
    mode: Annotated[
        str, typer.Option(metavar="MODE", help="direct, leased or eventual.", show_default="all")
    ] = "",
    shards: Annotated[
        str, typer.Option(metavar="N", help="Redis shards.", show_default="as many as it takes")
    ] = "",
    rtt: Annotated[str, typer.Option(metavar="MS", help="A round trip to Redis.")] = "0.5",
    acquire_us: Annotated[
        str,
        typer.Option(
            metavar="US", help="Time of a Redis core for one acquire. It scales all commands."
        ),
    ] = f"{COSTS.acquire:g}",
    as_json: JsonOption = False,
) -> None:
    """Compute what a fleet needs of Redis in each mode. Asks no server.

    Prints commands, cores, shards, memory, the share of calls that do not wait for Redis, the
    permits that leases hold, the p99 of calls that wait, and where a mode ends.
    """
    fleet = Fleet(
        _whole("processes", processes, 10**6),
        _number("calls", calls, 10**6),
        _whole("keys", keys, 10**9),
        Limit(limit),
        _number("rtt", rtt, 10_000),
    )
    if fleet.limit.is_shaped:
        raise ValueError(
            f"limit {limit!r} is paced or warms up; plan computes plain limits: leave the term out"
        )
    if mode and mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")
    scale = _number("acquire-us", acquire_us, 10**6) / COSTS.acquire
    costs = Costs(*(scale * cost for cost in COSTS))
    given = _whole("shards", shards, MAX_SHARDS) if shards else None
    plans = [make_plan(fleet, one, given, costs) for one in ([mode] if mode else MODES)]
    if as_json:
        print(json.dumps([_as_object(fleet, one) for one in plans], indent=1))
        return
    print(_heading(fleet))
    print()
    console = make_console()
    width = console.width if console.is_terminal else None
    Table(_COLUMNS, [_row(one) for one in plans], width).print_to(console)
    print()
    for one in plans:
        print(f"{one.mode}: {_verdict(fleet, one, costs)}")


def _whole(name: str, text: str, most: int) -> int:
    # Not options of type int: typer prints their errors in a box of several lines.
    try:
        number = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise ValueError(f"{name}={text!r} is not a whole number from 1 to {most:,}")
    return number


def _number(name: str, text: str, most: int) -> float:
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        number = 0.0
    if not 0 < number <= most:  # NaN is neither
        raise ValueError(f"{name}={text!r} is not a number above 0 and up to {most:,}")
    return number


_COLUMNS = (
    Column("MODE"),
    Column("COMMANDS/S", align_right=True),
    Column("CORES", align_right=True),
    Column("SHARDS", align_right=True),
    Column("BUSY", align_right=True, omit_order=1),
    Column("MEMORY", align_right=True),
    Column("LOCAL", align_right=True),
    Column("HELD", align_right=True, omit_order=2),
    Column("P99 MS", align_right=True),
    Column("PROCESS", align_right=True, omit_order=3),
)


def _row(plan: Plan) -> list[tuple[str, str]]:
    p99 = "-" if not plan.wait_ms else f"{plan.wait_ms:.1f}"
    cells = (
        plan.mode,
        f"{plan.commands:,.0f}",
        f"{plan.cores:,.2f}",
        "-" if plan.shards is None else f"{plan.shards}",
        f"{100 * plan.busy:,.0f} %",
        _bytes(plan.memory),
        f"{100 * plan.local:.1f} %",
        f"{plan.held:,.0f}",
        p99 if plan.wait_ms < TIMEOUT_MS else f">{TIMEOUT_MS:.0f}",
        _bytes(plan.process_memory),
    )
    return [(cell, "") for cell in cells]


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.0f} kB"


def _heading(fleet: Fleet) -> str:
    load = fleet.key_rate * fleet.window_s / fleet.limit.amount
    share = f"{100 * load:.1f} % of" if load < 2 else f"{load:,.1f} times"
    return (
        f"{fleet.processes:,} process{'es make' if fleet.processes > 1 else ' makes'} "
        f"{format_rate(fleet.processes * fleet.calls)} calls/s on {fleet.keys:,} "
        f"key{'s' if fleet.keys > 1 else ''}, {format_rate(fleet.key_rate)}/s on each: "
        f"{share} {fleet.limit}, {100 * fleet.refused:.1f} % refused"
    )


def _verdict(fleet: Fleet, plan: Plan, costs: Costs) -> str:
    """Return whether a mode can do it, and if it can not, what can."""
    if plan.key_cores > BUSY:
        return f"ends here. {_beyond_one_shard(fleet, plan, costs)}"
    if plan.shards is None:
        return f"ends here. It takes more than {MAX_SHARDS:,} shards"
    if plan.busy >= 1:
        then = "counts are ever older" if plan.mode == "eventual" else "calls end by their timeout"
        return f"ends here. The fullest shard cannot take its commands: {then}"
    full = ""
    if plan.busy > BUSY + 1e-9:
        full = f"; the fullest shard is busy for {100 * plan.busy:.0f} % of its time"
    if plan.mode == "eventual":
        above = f"up to {plan.above:,.0f} permits" if plan.above else "none"
        return f"no call waits; above the limit of a key: {above}{full}"
    if plan.mode == "leased" and leased_load(fleet).leases < 0.05:
        admitted = format_rate(fleet.rate * (1 - fleet.refused))
        return f"as direct: {admitted}/s of a process on a key are too few for leases{full}"
    return f"the limit holds{full}"


def _beyond_one_shard(fleet: Fleet, plan: Plan, costs: Costs) -> str:
    """Return what to do with a key that one shard cannot decide."""
    one_key = (
        f"One key keeps a shard busy for {100 * plan.key_cores:,.0f} % of its time, and more "
        "shards do not help"
    )
    if plan.mode == "eventual":
        interval_s = math.ceil(10 * SYNC_INTERVAL_S * plan.key_cores / BUSY) / 10
        return f"{one_key}: set sync_interval to {interval_s:g} or more"
    fitting = [mode for mode in MODES if make_plan(fleet, mode, costs=costs).shards is not None]
    use = f"use {' or '.join(fitting)}" if fitting else ""
    parts = parts_needed(fleet, plan.mode, costs)
    if parts is None:
        return f"{one_key}" + (f": {use}" if use else "")
    whole, parted = fleet.refused, split(fleet, parts).refused
    halves = (
        f"split the key into {parts} parts, which refuse "
        f"{100 * max(0.0, parted - whole):.1f} % of the calls early"
    )
    return f"{one_key}: {f'{use}, or ' if use else ''}{halves}"


def _as_object(fleet: Fleet, plan: Plan) -> dict[str, object]:
    fields = plan._asdict()
    if math.isinf(plan.wait_ms):
        fields["wait_ms"] = None
    return {"limit": str(fleet.limit), "refused": fleet.refused, **fields}
