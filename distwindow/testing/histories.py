"""Histories of commands, made from numbers: the input on which stores are compared.

All times are in the commands, and no bucket is shorter than a minute, so that no store drops a ring
by a clock of its own while a history is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

from ..borrow.commands import Borrow
from ..errors import ConfigurationError
from ..ring.command import Command
from ..ring.commands import (
    CURRENT_BUCKET,
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
from ..ring.key import AnyKey, line_name, ring_name_prefix
from ..ring.limit import Limit
from ..ring.stats import Bucket
from ..shaping.commands import AcquireShaped, PeekShaped, ReadShaped
from ..waiting.commands import AcquireTurn

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

COMMAND_NAMES = (
    *["acquire"] * 5, *["borrow"] * 3, *["lease"] * 2, *["flush"] * 3, *["refund"] * 2, "peek",
    "read", "reset", *["acquire_shaped"] * 3, "peek_shaped", *["acquire_turn"] * 3,
)  # fmt: skip
"""The commands of a history. The more often one is named here, the more often it is drawn."""

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
    """Response time of a `flush`; how far back a `refund` or `flush` reaches; extra of a lease; how
    long a `borrow` may wait.
    """
    flag: bool
    """`write_limit` of an `acquire`, `prefetch` of a lease, `pull` of a flush; whether a `borrow`
    may take the whole limit, and whether a `refund` is of borrowed permits; `takes_next` of an
    `acquire_turn`, and whether a `reset` also deletes lines.
    """
    amount_change: int
    """By how much the limits are raised."""


def random_history(seed: int, length: int = 40) -> list[HistoryStep]:
    """Return the history of `seed`, which is the same in every process."""
    random = Random(seed)
    return [_random_step(random) for _ in range(length)]


def _random_step(random: Random) -> HistoryStep:
    elapsed = random.choice(
        (
            random.randint(0, 3),
            random.choice(_JUMPS_MINUTES) * MINUTE_MS + random.choice((-1, 0, 0, 1)),
            random.randint(-20 * MINUTE_MS, 20 * MINUTE_MS),
            0,
        )
    )
    return HistoryStep(
        random.choice(COMMAND_NAMES),
        elapsed,
        random.sample(range(len(LIMITS)), random.choice((1, 1, 2, 3))),
        random.randint(1, 6),
        random.randint(1, 4),
        random.randint(0, 5),
        random.random() < 0.5,
        random.choice(_AMOUNT_CHANGES),
    )


def commands_of(history: Sequence[HistoryStep], key: AnyKey) -> Iterator[Command[Any]]:
    """Yield the commands of a history on `key`: each step, and after it a `Read` of its rings, and
    of how their limits are shaped.
    """
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
    """Return a call under the same limits, shaped by `_TERMS`. Its cost is one that the limits can
    admit.
    """
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
    """Return charges of the buckets that began, or will begin, `calls` buckets after an earlier
    moment.
    """
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
