"""The dialogues around admission: look, give back, forget, and record finished calls."""

from __future__ import annotations

from ..consistency.base import Near
from ..core.clock import Clock
from ..core.decision import Decision, Source
from ..core.stats import Stats, stats_of, window_at
from ..protocol.commands import Charge, Peek, Read, Refund, Reset
from ..protocol.keys import AnyKey
from .acquire import decide
from .flush import carry
from .steps import Dialogue


def peek(near: Near, charges: tuple[Charge, ...], source: Source) -> Dialogue[Decision]:
    """The decision these charges of one key would get now."""
    decision = near.peek(charges[0].key)
    if decision is None:
        command = Peek(charges)
        verdict = yield command
        decision = decide(command, verdict, source)
    return decision


def stats(near: Near, charges: tuple[Charge, ...], clock: Clock) -> Dialogue[Stats]:
    """What is recorded of a key in the windows of its limits, this process's part included."""
    key = charges[0].key
    yield from _told(near, key, clock)
    states, now_ms = yield Read(charges)
    windows = tuple(
        window_at(state, charge.limit, now_ms)
        for state, charge in zip(states, charges, strict=True)
    )
    return stats_of(key, windows, now_ms)


def refund(near: Near, decision: Decision, clock: Clock) -> Dialogue[int]:
    """Give back what `decision` was charged, out of the bucket it was charged in; how many permits
    were still there. Raises `ValueError` for a decision that was charged nothing.
    """
    charges = _charged(decision)
    yield from _told(near, decision.key, clock)
    count, _ = yield Refund(charges, charged_ms=decision.now_ms)
    near.forget(decision.key)
    yield from _told(near, decision.key, clock)  # and what it knows of the key is what is so now
    return int(count)


def reset(near: Near, charges: tuple[Charge, ...]) -> Dialogue[None]:
    """Forget the windows of a key."""
    yield Reset(charges)
    near.reset(charges[0].key)


def record(near: Near, decision: Decision, *, failed: bool, rt_ms: int) -> Dialogue[None]:
    """Record one finished call, in the bucket in which it ended."""
    _charged(decision)
    command = near.record(decision, failed, rt_ms)
    if command is not None:
        yield command


def ahead(near: Near, charges: tuple[Charge, ...], clock: Clock) -> Dialogue[None]:
    """Before the store is asked about several keys: it knows what this process has passed of them,
    and has back what it has leased.
    """
    keys = [charge.key for charge in charges]
    yield from near.fetches(keys)
    yield from carry(near.ahead(keys), clock.monotonic)


def _told(near: Near, key: AnyKey, clock: Clock) -> Dialogue[None]:
    """The store knows what was counted here of `key`."""
    yield from carry(near.greeting(), clock.monotonic)
    errand = near.tell(key)
    if errand is not None:
        yield from carry([errand], clock.monotonic)


def _charged(decision: Decision) -> tuple[Charge, ...]:
    if not decision.charged:
        raise ValueError(f"nothing was charged by this decision: {decision!r}")
    charged: tuple[Charge, ...] = decision.charged
    return charged
