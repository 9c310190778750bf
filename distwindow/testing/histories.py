"""Histories of commands, made from numbers: the input on which stores are compared. `FEATURES` has
those of each feature.

All times are in the commands, and no bucket is shorter than a minute, so that no store drops a ring
by a clock of its own while a history is executed. When an expired sender record is deleted is up to
a store, and a clock that is set back makes one valid again: senders begin anew after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, NamedTuple

from ..borrow.commands import BORROW_COMMANDS, Borrow
from ..breaker.commands import (
    BREAKER_COMMANDS,
    PROBE_ACTIONS,
    AdaptiveFlush,
    BreakerCommand,
    BreakerFlush,
    BreakerProbe,
    adaptive_name_suffix,
    breaker_name,
)
from ..breaker.record import AdaptiveCounts, CallCounts
from ..breaker.rules import BreakerRule, ConsecutiveFailures, ErrorCount, ErrorRatio, SlowRatio
from ..concurrency.commands import (
    MAX_PLACES,
    PLACE_MS,
    SLOT_COMMANDS,
    Free,
    Hold,
    HolderName,
    Holders,
    Renew,
)
from ..errors import ConfigurationError
from ..minute.commands import VIEW_COMMANDS, ViewFlush, ViewRead, views_name
from ..minute.view import ALL_ORIGINS
from ..ring.command import Command
from ..ring.commands import (
    CURRENT_BUCKET,
    RING_COMMANDS,
    Acquire,
    Flush,
    Lease,
    Peek,
    Read,
    Refund,
    Reset,
    charges_of,
)
from ..ring.decision import BorrowedCharge, Charge
from ..ring.key import AnyKey, line_name, ring_name_prefix, slots_name
from ..ring.limit import Limit
from ..ring.stats import Bucket
from ..runtime.options import OTHER_ORIGINS
from ..shaping.commands import SHAPING_COMMANDS, AcquireShaped, PeekShaped, ReadShaped
from ..stores.memory import MemoryStore
from ..upstream.commands import UPSTREAM_COMMANDS, Lower, PauseCommand, pause_name
from ..waiting.commands import WAITING_COMMANDS, AcquireTurn

MINUTE_MS = 60_000
START_MS = 1_700_000_040_000
"""When histories begin: the start of a minute, but not of every bucket."""

LIMITS = (
    Limit(5, per=60, buckets=1),
    Limit(9, per=60, buckets=1, bound="strict"),
    Limit(8, per=120, buckets=2),
    Limit(6, per=180, buckets=3, bound="strict"),
    Limit(7, per=300, buckets=5),
    Limit(12, per=720, buckets=12),
    Limit(13, per=780, buckets=13, bound="strict"),
    Limit(11, per=780, buckets=13),
    # The largest amount: sums must stay exact, and be written in plain digits.
    Limit(10**12, per=14_400, buckets=4),
)
LARGEST_LIMIT_INDEX = len(LIMITS) - 1

LIMIT_COMMANDS: dict[str, tuple[str, ...]] = {
    "windows": (
        *["acquire"] * 5, *["lease"] * 2, *["flush"] * 3, *["refund"] * 2, "peek", "read", "reset",
    ),
    "shaping": (*["acquire_shaped"] * 3, "peek_shaped"),
    "borrowing": ("borrow",) * 3,
    "waiting": ("acquire_turn",) * 3,
}  # fmt: skip
"""Commands under limits, by feature. The more often one is named, the more often it is drawn."""
COMMAND_NAMES = tuple(name for names in LIMIT_COMMANDS.values() for name in names)

_TERMS: tuple[dict[str, float], ...] = (
    {"max_wait": 90.0},
    {"warmup": 600.0},
    {"warmup": 900.0, "max_wait": 300.0, "cold_factor": 2},
    {"max_wait": 0.0},
    {"warmup": 240.0, "cold_factor": 2},
    {},
)
"""By what the limits of the commands `acquire_shaped` and `peek_shaped` are shaped, in turn."""

_JUMPS_MINUTES = (0, 1, 2, 3, 5, 12, 13, 14, 15, -1, -2, -5, -13, -14, -15, -400, 400)
"""Minutes between two commands, such that windows just end, and clocks are set back."""
_CROWDED_ELAPSED_MS = (
    0, 0, 0, 1, MINUTE_MS // 7, MINUTE_MS - 1, MINUTE_MS, MINUTE_MS + 1, 2 * MINUTE_MS,
    3 * MINUTE_MS, 5 * MINUTE_MS, -1, -MINUTE_MS,
)  # fmt: skip
_AMOUNT_CHANGES = (0, 0, 0, 0, -2, -1, 1, 4)


class HistoryStep(NamedTuple):
    """One command, as numbers that a generator can draw."""

    name: str
    elapsed_ms: int
    """Since the command before; below 0 where the clock was set back."""
    limits: Sequence[int]
    """Which of `LIMITS`."""
    cost: int
    calls: int
    """Equal calls in one `acquire`, buckets in a `flush`."""
    size: int
    """Response time; reach of a `refund` or `flush`; extra of a lease; the wait of a `borrow`."""
    flag: bool
    """`write_limit` of an `acquire`, `prefetch` of a lease, `pull` of a flush; whether a `borrow`
    may take the whole limit, and whether a `refund` is of borrowed permits; `takes_next` of an
    `acquire_turn`, and whether a `reset` also deletes lines.
    """
    amount_change: int
    """By how much the limits are raised."""


def random_history(
    seed: int | Random, length: int = 40, names: Sequence[str] = COMMAND_NAMES
) -> list[HistoryStep]:
    """Return the history of `seed`, the same in every process, of commands of these names."""
    random = seed if isinstance(seed, Random) else Random(seed)
    return [_random_step(random, names) for _ in range(length)]


def crowded_history(random: Random, length: int, names: Sequence[str]) -> list[HistoryStep]:
    """Return a history. Three of four have mostly full windows, and half of these one ring."""
    history, kind = random_history(random, length, names), random.randrange(4)
    if kind == 0:
        return history
    ring = [random.randrange(len(LIMITS))] if kind > 1 else None
    return [
        step._replace(
            limits=ring or step.limits,
            elapsed_ms=random.choice([*_CROWDED_ELAPSED_MS, step.elapsed_ms]),
        )
        for step in history
    ]


def _random_step(random: Random, names: Sequence[str]) -> HistoryStep:
    elapsed = random.choice(
        (
            random.randint(0, 3),
            random.choice(_JUMPS_MINUTES) * MINUTE_MS + random.choice((-1, 0, 0, 1)),
            random.randint(-20 * MINUTE_MS, 20 * MINUTE_MS),
            0,
        )
    )
    name = random.choice(names)
    return HistoryStep(
        name,
        elapsed,
        random.sample(range(len(LIMITS)), random.choice((1, 1, 2, 3))),
        random.randint(1, 6),
        random.randint(1, 4),
        random.randint(0, 5),
        random.random() < 0.5 and (name != "refund" or "borrow" in names),
        random.choice(_AMOUNT_CHANGES),
    )


def commands_of(history: Sequence[HistoryStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on `key`, and after each step a `Read` of its rings."""
    now, past = START_MS, [START_MS]
    for step in history:
        now = max(0, now + step.elapsed_ms)
        charges = _charges_of_step(step, key)
        command = _command(step, charges, now, past)
        yield command
        past.append(now)
        shaped = isinstance(command, (AcquireShaped, PeekShaped))
        yield ReadShaped(command.charges, now) if shaped else Read(charges, now)


def charges_for(key: AnyKey, limits: Sequence[Limit], cost: int) -> tuple[Charge, ...]:
    """Return the charges of a call of `cost`. No ring is charged twice, because limiters never do
    that: a limit of one strict bucket has the same ring as one of two leap buckets.
    """
    charges = charges_of(key, ring_name_prefix("conformance", key), limits, cost)
    return tuple({charge.ring: charge for charge in charges}.values())


def _charges_of_step(step: HistoryStep, key: AnyKey) -> tuple[Charge, ...]:
    cost = step.cost * 10**11 if list(step.limits) == [LARGEST_LIMIT_INDEX] else step.cost
    limits = [
        Limit(min(10**12, limit.amount + step.amount_change), limit.per, limit.buckets, limit.bound)
        for limit in (LIMITS[i] for i in step.limits)
    ]
    return charges_for(key, limits, cost)


def _command(
    step: HistoryStep, charges: tuple[Charge, ...], now: int, past: Sequence[int]
) -> Command[Any]:
    if step.name == "acquire":
        return Acquire(charges, now, calls=step.calls, write_limit=step.flag)
    if step.name == "peek":
        return Peek(charges, now)
    if step.name == "lease":
        return Lease(charges, now, extra=step.size * step.calls, prefetch=step.flag)
    if step.name == "flush":
        return _flush(step, charges, now, past)
    if step.name == "borrow":
        share = 1 if step.flag else 2
        max_borrowed = tuple(charge.limit.amount // share for charge in charges)
        max_wait_ms = step.size * step.calls * MINUTE_MS
        return Borrow(charges, now, max_wait_ms=max_wait_ms, max_borrowed=max_borrowed)
    if step.name == "refund" and step.flag:
        return Refund(_borrowed_charges(step, charges, past), now, now)
    if step.name == "refund":
        return Refund(charges, now, past[-1 - step.size % len(past)])
    if step.name == "read":
        return Read(charges, now)
    if step.name == "reset":
        lines = [charge._replace(ring=line_name(charge.ring)) for charge in charges]
        return Reset((*charges, *lines) if step.flag else charges, now)
    if step.name == "acquire_turn":
        # Turns that are over, and such that are still to come.
        held_ms = past[-1 - step.size % len(past)] + step.calls * MINUTE_MS // 2
        return AcquireTurn(charges, now, held_ms=held_ms if step.size else 0, takes_next=step.flag)
    return _shaped(step, charges, now)


def _shaped(step: HistoryStep, charges: tuple[Charge, ...], now: int) -> AcquireShaped | PeekShaped:
    """Return a call under the same limits, shaped by `_TERMS`, of a cost that they can admit."""
    shaped = []
    for number, charge in enumerate(charges):
        limit = charge.limit
        terms: dict[str, Any] = _TERMS[(step.size + number) % len(_TERMS)]
        if limit.amount < 10**9:
            with suppress(ConfigurationError):  # the warm-up may be too short for the amount
                limit = Limit(limit.amount, limit.per, limit.buckets, limit.bound, **terms)
        shaped.append(charge._replace(limit=limit, cost=min(charge.cost, limit.amount)))
    if step.name == "peek_shaped":
        return PeekShaped(tuple(shaped), now)
    cap_ms = MINUTE_MS if step.calls == 4 else None
    return AcquireShaped(tuple(shaped), now, write_limit=step.flag, cap_ms=cap_ms)


def _borrowed_charges(
    step: HistoryStep, charges: tuple[Charge, ...], past: Sequence[int]
) -> tuple[Charge, ...]:
    """Return charges of the buckets that begin `calls` buckets after an earlier moment."""
    moment = past[-1 - step.size % len(past)]
    starts = [
        moment - moment % charge.limit.bucket_ms + step.calls * charge.limit.bucket_ms
        for charge in charges
    ]
    return tuple(
        BorrowedCharge(*charge[:4], start) for charge, start in zip(charges, starts, strict=True)
    )


def _flush(step: HistoryStep, charges: tuple[Charge, ...], now: int, past: Sequence[int]) -> Flush:
    """Return a flush of counts of now and of earlier, by one of three senders or without one."""
    moments = [
        now,
        past[-1 - step.size % len(past)],
        past[-1 - step.calls % len(past)],
        CURRENT_BUCKET,
    ][: step.calls]
    cost = charges[0].cost
    size, ended = step.size, step.calls
    buckets = [Bucket(t, cost - 1, size, ended - 1, size % 2, size * 3, size) for t in moments]
    return Flush(
        charges,
        now,
        counts=tuple(tuple(buckets[i % 2 :]) for i in range(len(charges))),
        sender=("", "a", "0b", "c0ffee")[cost % 4],
        seq=max(0, len(past) + step.amount_change),
        pull=step.flag,
    )


SLOT_TTLS_MS = (10 * MINUTE_MS, 10 * MINUTE_MS, 3 * MINUTE_MS, 60 * MINUTE_MS)


class SlotStep(NamedTuple):
    """One command on slots, as numbers, and a read of the holders after it."""

    name: str
    elapsed_ms: int
    limit: int
    holders: Sequence[int]
    asks: str
    """Of a hold: whether for a place in the line, as who is new or as the head of a process."""
    waited_ms: Sequence[int]


def random_slot_history(random: Random, length: int) -> list[SlotStep]:
    """Return a history of commands on the slots of one resource."""
    ends = [end + ms for end in (*SLOT_TTLS_MS, PLACE_MS) for ms in (-1, 0, 1)]
    set_back = [-1, *(-MINUTE_MS * minutes for minutes in (1, 10, 60, 600))]
    return [
        SlotStep(
            random.choice(("hold", "hold", "hold", "hold", "renew", "free", "holders")),
            random.choice(
                (
                    random.randint(0, 2),
                    random.choice(ends),
                    random.choice(set_back),
                    random.randint(-5 * MINUTE_MS, 5 * MINUTE_MS),
                )
            ),
            random.randint(0, 4),
            [random.randint(0, 7) for _ in range(random.randint(1, 4))],
            random.choice(("", "new", "head", "head")),
            [random.randint(0, 5000) for _ in range(random.randint(0, MAX_PLACES))],
        )
        for _ in range(length)
    ]


def slot_ttl_ms(number: int) -> int:
    """Return the time to live of this holder's slot."""
    return SLOT_TTLS_MS[number % len(SLOT_TTLS_MS)]


def holder_name(number: int) -> bytes:
    """Return the name of this holder. The odd ones are of one process, the even ones of another."""
    return HolderName(3, slot_ttl_ms(number), f"a{number % 2}.{number}", "host:1").encode()


def slot_commands_of(history: Sequence[SlotStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on the slots of `key`."""
    now, name = START_MS, slots_name("conformance", key)
    for step in history:
        now += step.elapsed_ms
        first, ttl_ms = step.holders[0], slot_ttl_ms(step.holders[0])
        holders = tuple(map(holder_name, step.holders))
        if step.name == "hold":
            waited_ms = {"": (), "new": (0,), "head": tuple(step.waited_ms)}[step.asks]
            yield Hold(
                (), now, slots_name=name, limit=step.limit, ttl_ms=ttl_ms,
                holder=holder_name(first), is_head=step.asks == "head", waited_ms=waited_ms,
            )  # fmt: skip
        elif step.name == "renew":
            yield Renew((), now, slots_name=name, ttl_ms=ttl_ms, holders=holders)
        elif step.name == "free":
            yield Free((), now, slots_name=name, holders=holders)
        yield Holders((), now, slots_name=name)


BREAKER_RULES: tuple[BreakerRule, ...] = (
    ErrorRatio(0.5, window=300, min_calls=3, open_for=120, buckets=5, probe_timeout=60),
    ErrorRatio(0.1, window=60, min_calls=1, open_for=60, buckets=1, probes=2),
    SlowRatio(max_rt=0.2, ratio=1 / 3, window=720, min_calls=2, open_for=180, buckets=12, probes=3),
    ErrorCount(4, window=120, open_for=60, buckets=2, probe_timeout=120),
    ErrorCount(10**12, window=600, open_for=1, buckets=60),
    ConsecutiveFailures(7, open_for=90),
    ConsecutiveFailures(2, open_for=1, probes=2),
)
_BREAKER_MINUTES = (0, 1, 2, 3, 5, 12, 75, 400, -1, -3, -13, -400)
_SENDERS = ("", "", "a", "0b", "c0ffee")


class BreakerStep(NamedTuple):
    """One command on a circuit breaker, as numbers."""

    rule: BreakerRule
    elapsed_ms: int
    is_flush: bool
    calls: int
    bad: int
    back: int
    """How far back in the history the epoch of a flush, and its bucket, are."""
    sender: str
    seq: int
    action: int
    """Which of `PROBE_ACTIONS`."""
    probe: int


def random_breaker_history(random: Random, length: int) -> list[BreakerStep]:
    """Return a history of commands on a breaker of one rule."""
    rule = random.choice(BREAKER_RULES)
    return [
        BreakerStep(
            rule,
            random.choice(
                (
                    random.choice(_BREAKER_MINUTES) * MINUTE_MS + random.choice((-1, 0, 0, 1)),
                    random.randint(0, 4 * MINUTE_MS),
                    random.choice((0, 0, 1, 999)),
                )
            ),
            random.random() < 0.5,
            random.randint(0, 6),
            random.randint(0, 6),
            random.choice((0, 0, 0, 0, 1, 1, 2, 3)),
            random.choice(_SENDERS),
            random.randint(0, 12),
            random.choice((0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 6)),
            random.randint(0, 3),
        )
        for _ in range(length)
    ]


def breaker_commands_of(history: Sequence[BreakerStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on the breaker of `key`. They depend on the replies of a
    `MemoryStore` of their own, which know the epochs.
    """
    now, store, seen, restarts = START_MS, MemoryStore(), [(0, START_MS)], 0
    for step in history:
        now = max(0, now + step.elapsed_ms)
        restarts += step.elapsed_ms < 0
        rule, name = step.rule, breaker_name("conformance", key, step.rule)
        epoch, start = seen[-1 - step.back % len(seen)]
        command: BreakerCommand
        if step.is_flush:
            ended = [(epoch, start), (seen[-1][0], now), (seen[-1][0], 10**13)][: step.calls % 4]
            counts = tuple(CallCounts(*at, step.calls, min(step.bad, step.calls)) for at in ended)
            sender = step.sender and f"{step.sender}{restarts:x}"
            command = BreakerFlush(
                (), now, rule=rule, name=name, counts=counts, sender=sender, seq=step.seq
            )
        else:
            action, probe_id = PROBE_ACTIONS[step.action], f"a.{step.probe}"
            command = BreakerProbe((), now, rule=rule, name=name, action=action, probe_id=probe_id)
        seen.append((store.execute(command).epoch, now))
        yield command


class AdaptiveStep(NamedTuple):
    """One flush of an adaptive breaker, as numbers."""

    buckets: int
    elapsed_ms: int
    counted: Sequence[Sequence[int]]
    """How many minutes before the flush, and the calls that succeeded, failed and were dropped."""
    sender: str
    seq: int
    passed_back: int
    """How many minutes ago a call has passed; 0: none."""
    force_ms: int


def random_adaptive_history(random: Random, length: int) -> list[AdaptiveStep]:
    """Return a history of flushes of one adaptive breaker."""
    buckets = random.choice((1, 5, 40))
    return [
        AdaptiveStep(
            buckets,
            random.choice((0, 1, 999, *(MINUTE_MS * m for m in (1, 3, 6, 40, -1, -5, -400)), -1)),
            [
                (random.randint(0, 3), *(random.randint(0, 4) for _ in range(3)))
                for _ in range(random.randint(0, 3))
            ],
            random.choice(("", "a", "0b")),
            random.randint(0, 9),
            random.choice((0, 0, 1, 2)),
            random.choice((0, 1, MINUTE_MS, 3 * MINUTE_MS)),
        )
        for _ in range(length)
    ]


def adaptive_commands_of(history: Sequence[AdaptiveStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on the adaptive breaker of `key`."""
    now, restarts, width = START_MS, 0, MINUTE_MS
    for step in history:
        now = max(0, now + step.elapsed_ms)
        restarts += step.elapsed_ms < 0
        suffix = adaptive_name_suffix(1.5, width, step.buckets)
        yield AdaptiveFlush(
            (), now,
            name=ring_name_prefix("conformance", key) + suffix,
            bucket_ms=width, buckets=step.buckets, force_ms=step.force_ms,
            passed_ms=max(0, now - step.passed_back * width) if step.passed_back else 0,
            counts=tuple(AdaptiveCounts(max(0, now - ago * width), *n) for ago, *n in step.counted),
            sender=step.sender and f"{step.sender}{restarts:x}", seq=step.seq,
        )  # fmt: skip


_ORIGINS = (ALL_ORIGINS, ALL_ORIGINS, "a", "b", "c", "{d}", "ü\x00", OTHER_ORIGINS)
_VIEW_SECONDS = (0, 1, 30, 59, 60, 61, 150, -1, -59, -60, -61, -200)


class CountedSecond(NamedTuple):
    """What one origin did in one second."""

    origin: str
    back_s: int
    """How many seconds before the flush; negative: after it."""
    passed: int
    blocked: int
    ended: int
    """How many calls ended, half of them with an error."""
    rt_ms: int


class ViewStep(NamedTuple):
    """One flush of minute views, as numbers, and the read after it."""

    elapsed_ms: int
    counted: Sequence[CountedSecond]
    sender: str
    seq: int
    max_origins: int


def random_view_history(random: Random, length: int) -> list[ViewStep]:
    """Return a history of flushes to the minute views of one key."""
    return [
        ViewStep(
            random.choice(
                (
                    random.choice(_VIEW_SECONDS) * 1000 + random.choice((-1, 0, 0, 1)),
                    random.randint(0, 5000),
                    0,
                )
            ),
            [
                CountedSecond(
                    random.choice(_ORIGINS),
                    random.choice((random.randint(-2, 4), random.randint(58, 61))),
                    random.randint(0, 5),
                    random.randint(0, 3),
                    random.randint(0, 4),
                    random.randint(0, 90),
                )
                for _ in range(random.randint(0, 6))
            ],
            random.choice(_SENDERS),
            random.randint(0, 12),
            random.choice((1, 2, 2, 3, 1000)),
        )
        for _ in range(length)
    ]


def view_commands_of(history: Sequence[ViewStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on the minute views of `key`."""
    now, name, restarts = START_MS, views_name("conformance", key), 0
    for step in history:
        now = max(100_000, now + step.elapsed_ms)
        restarts += step.elapsed_ms < 0
        by_origin: dict[str, list[Bucket]] = {}
        for each in step.counted:
            bucket = Bucket(
                now // 1000 * 1000 - each.back_s * 1000, each.passed, each.blocked,
                each.ended - each.ended // 2, each.ended // 2, each.ended * each.rt_ms,
                each.rt_ms if each.ended else None,
            )  # fmt: skip
            by_origin.setdefault(each.origin, []).append(bucket)
        counted = tuple((origin, tuple(buckets)) for origin, buckets in by_origin.items())
        yield ViewFlush(
            (), now, name=name, counts=counted or ((ALL_ORIGINS, ()),),
            sender=step.sender and f"{step.sender}{restarts:x}", seq=step.seq,
            max_origins=step.max_origins,
        )  # fmt: skip
        yield ViewRead((), now, name=name)


class UpstreamStep(NamedTuple):
    """One command on the pause of a key, or one that lowers its limits, as numbers."""

    what: Any
    """That of a pause, or "lower" or "acquire"."""
    elapsed_ms: int
    call: int
    first_ms: int
    second_ms: int
    jitter: int
    limits: Sequence[int]
    cost: int


def random_upstream_history(random: Random, length: int) -> list[UpstreamStep]:
    """Return a history of commands on one pause, and on the rings of one key."""
    return [
        UpstreamStep(
            random.choice(("ask", "ask", "ask", "tell", "ok", "free", "lower", "acquire")),
            random.choice((0, 0, 1, 99, 100, 1000, random.randint(-500, 5000), MINUTE_MS)),
            random.randint(0, 2),
            random.choice((0, 0, 1, 500, 1500, 10**12, 9 * 10**12)),
            random.choice((0, 1, 900, 10**6)),
            random.choice((0, 1, 100)),
            random.sample(range(len(LIMITS)), random.randint(1, 3)),
            random.randint(1, 12),
        )
        for _ in range(length)
    ]


def upstream_commands_of(history: Sequence[UpstreamStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on the pause and the rings of `key`."""
    now, name = START_MS, pause_name("conformance", key)
    for step in history:
        now = max(0, now + step.elapsed_ms)
        charges = charges_for(key, [LIMITS[i] for i in step.limits], step.cost)
        if step.what == "acquire":
            yield Acquire(charges, now)
        elif step.what == "lower":
            yield Lower(charges, now, resets_ms=tuple(step.first_ms for _ in charges))
            yield Read(charges, now)
        else:
            yield PauseCommand(
                (), now, name=name, what=step.what, call=f"a{step.call}", first_ms=step.first_ms,
                second_ms=step.second_ms, jitter=step.jitter,
            )  # fmt: skip


class Feature(NamedTuple):
    """What stores are compared by: random histories of the commands of one feature."""

    scripts: frozenset[str]
    """The names of its commands. A history may have those of windows, too."""
    random_history: Callable[[Random, int], list[Any]]
    """Return a history of so many steps, each of which has `elapsed_ms`."""
    commands_of: Callable[[Any, AnyKey], Iterator[Command[Any]]]


def _under_limits(commands: Iterable[type[Command[Any]]], *names: str) -> Feature:
    history = partial(crowded_history, names=names)
    return Feature(frozenset(command.script for command in commands), history, commands_of)


FEATURES: dict[str, Feature] = {
    "windows": Feature(
        frozenset(command.script for command in RING_COMMANDS),
        partial(random_history, names=LIMIT_COMMANDS["windows"]),
        commands_of,
    ),
    "shaping": _under_limits(
        SHAPING_COMMANDS, *["acquire_shaped"] * 6, *["peek_shaped"] * 2, "acquire", "reset"
    ),
    "borrowing": _under_limits(
        BORROW_COMMANDS,
        *["borrow"] * 6, *["acquire"] * 4, *["refund"] * 2, "flush", "lease", "peek",
    ),
    "waiting": _under_limits(
        WAITING_COMMANDS,
        *["acquire_turn"] * 8, *["acquire"] * 2, "lease", "flush", "refund", "reset",
    ),
    "slots": Feature(frozenset(SLOT_COMMANDS), random_slot_history, slot_commands_of),
    "breakers": Feature(frozenset(BREAKER_COMMANDS), random_breaker_history, breaker_commands_of),
    "adaptive breakers": Feature(
        frozenset({AdaptiveFlush.script}), random_adaptive_history, adaptive_commands_of
    ),
    "upstreams": Feature(
        frozenset(command.script for command in UPSTREAM_COMMANDS),
        random_upstream_history,
        upstream_commands_of,
    ),
    "minute views": Feature(frozenset(VIEW_COMMANDS), random_view_history, view_commands_of),
}  # fmt: skip
"""Every feature of the stores, by its name."""


def limits_together(without: Iterable[str] = ()) -> Feature:
    """Return the commands of all limits in one history, but for those of some features."""
    kept = {feature: names for feature, names in LIMIT_COMMANDS.items() if feature not in without}
    names = [name for each in kept.values() for name in each]
    return Feature(frozenset(names), partial(crowded_history, names=names), commands_of)
