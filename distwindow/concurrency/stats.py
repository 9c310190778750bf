"""Statistics of a concurrency limit: who holds its slots."""

from __future__ import annotations

from dataclasses import dataclass

from ..ring.key import AnyKey


@dataclass(frozen=True)
class Holder:
    """One holder of a slot."""

    name: str
    """The `name` of its `Concurrency`; by default host and process id."""
    expires_in: float
    """Seconds until its slot is free, unless it is renewed."""


@dataclass(frozen=True)
class ConcurrencyStats:
    """The slots of one key."""

    key: AnyKey
    limit: int
    held: int
    """Slots that are held now, by all processes; more than `limit` where that was lowered."""
    waiting: int
    """Callers that wait for a slot in this process."""
    holders: tuple[Holder, ...]
    """The first deadline first."""
    now_ms: int
    """The store's time, ms since the epoch."""
