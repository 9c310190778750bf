"""The circuit breakers that a scan has met: read, as a table, and for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from ..breaker.commands import ADAPTIVE, BreakerNameParts, StoredBreaker, parse_breaker_hash
from ..breaker.record import STATES
from ..breaker.rules import RULES
from ..ring.key import RingNameParts
from .command import Server, read_each
from .render import Cell, Column, Table, format_rate, json_text, shell_word

_DEFAULTS: dict[str, dict[str, Any]] = {
    rule.kind: {each.name: each.default for each in dataclasses.fields(rule)} for rule in RULES
}
_STATE_STYLES = {"closed": "", "open": "red", "half_open": "yellow"}


class BreakerName(NamedTuple):
    """The name of a breaker that SCAN has returned."""

    server: Server
    raw: bytes
    parts: BreakerNameParts


class FoundBreaker(NamedTuple):
    """A breaker that was read."""

    name: BreakerNameParts
    stored: StoredBreaker
    now_ms: int
    """The server's time when it was read: ms since the epoch."""

    @property
    def state(self) -> str:
        """The state as text; `adaptive` for a breaker that has none."""
        return "adaptive" if self.stored.state == ADAPTIVE else STATES[self.stored.state]

    @property
    def since_s(self) -> float | None:
        """Seconds that it has been in this state; None if it never changed."""
        return max(0, self.now_ms - self.stored.epoch) / 1000 if self.stored.epoch else None


def breaker_page(names: Sequence[BreakerName], server: Server) -> list[tuple[bytes, RingNameParts]]:
    """Return those of these names that are on `server`, each once, as `reset` takes them."""
    found = {one.raw: one.parts.key for one in names if one.server is server}
    return [(raw, RingNameParts(key, 0, 0)) for raw, key in found.items()]


def is_breaker_name(name: bytes) -> bool:
    """True for the name of a breaker, among those of rings, slots and breakers."""
    return name.split(b":")[-3:-2] == [b"breaker"]


def read_breakers(names: Sequence[BreakerName]) -> list[FoundBreaker]:
    """Return the breakers of these names that still exist."""
    unique = {name.raw: (name.server, name) for name in names}  # SCAN may return a name twice
    found = []
    for name, fields, now_ms in read_each(
        unique.values(), lambda pipe, name: pipe.hgetall(name.raw)
    ):
        if isinstance(fields, redis.RedisError):
            continue  # not a hash, or its slot has just been moved
        stored = parse_breaker_hash(fields, name.parts, now_ms)
        if stored is not None:
            found.append(FoundBreaker(name.parts, stored, now_ms))
    return found


def breaker_rank(one: FoundBreaker) -> tuple[Any, ...]:
    """Return what breakers are sorted by: first those that are not closed."""
    return one.stored.state <= 0, one.name.key, one.name.kind


def _rule_text(name: BreakerNameParts) -> str:
    """Return the kind of the rule, and its parameters that are not the usual ones."""
    usual = _DEFAULTS.get(name.kind, {})
    unusual = [f"{one}={value}" for one, value in name.settings if value != usual.get(one)]
    return " ".join([name.kind, *unusual])


def breaker_table(
    found: Sequence[FoundBreaker], width: int | None, after: Table | None = None
) -> Table:
    """Return the table of these breakers."""
    columns = [
        Column("BREAKER"),
        Column("RULE", omit_order=2),
        Column("STATE"),
        Column("SINCE S", align_right=True, omit_order=1),
        Column("CALLS", align_right=True, omit_order=3),
        Column("BAD", align_right=True),
        Column("PROBES", align_right=True, omit_order=4),
    ]
    return Table(columns, [_row(one) for one in found], width, after=after)


def _row(one: FoundBreaker) -> list[Cell]:
    since_s, stored = one.since_s, one.stored
    return [
        (shell_word(one.name.key), ""),
        (_rule_text(one.name), "dim"),
        (one.state, _STATE_STYLES.get(one.state, "")),
        ("-" if since_s is None else format_rate(since_s), ""),
        (f"{stored.total:,}", ""),
        (f"{stored.bad:,}", "red" if stored.bad else ""),
        (f"{stored.probes:,}" if one.state == "half_open" else "-", ""),
    ]


def breaker_object(one: FoundBreaker) -> dict[str, Any]:
    """Return a breaker for JSON."""
    return {
        "key": json_text(one.name.key),
        "rule": one.name.kind,
        "settings": dict(one.name.settings),
        "state": one.state,
        "since_ms": one.stored.epoch,
        "retry_ms": one.stored.retry_ms if one.state == "open" else 0,
        "calls": one.stored.total,
        "bad": one.stored.bad,
        "probes": one.stored.probes if one.state == "half_open" else 0,
        "window_ms": one.name.bucket_ms * one.name.buckets,
        "now_ms": one.now_ms,
    }
