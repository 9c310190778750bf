"""The circuit breakers of a store, and how they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..breaker.commands import ADAPTIVE, BreakerNameParts, StoredBreaker, parse_breaker_hash
from ..breaker.record import STATES
from .servers import Server, read_hashes


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

    @property
    def rank(self) -> tuple[Any, ...]:
        """What breakers are sorted by: first those that are not closed."""
        return self.stored.state <= 0, self.name.key, self.name.kind


def read_breakers(server: Server, names: Mapping[bytes, BreakerNameParts]) -> list[FoundBreaker]:
    """Return the breakers of these names that still exist."""
    found = []
    now_ms, hashes = read_hashes(server, list(names)) if names else (0, [])
    for name, fields in zip(names.values(), hashes, strict=True):
        if isinstance(fields, Exception):
            continue  # not a hash, or its slot has just been moved
        stored = parse_breaker_hash(fields, name, now_ms)
        if stored is not None:
            found.append(FoundBreaker(name, stored, now_ms))
    return found
