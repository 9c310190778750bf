"""What a call counts in which ring: one charge for each limit of its key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .key import AnyKey
from .limit import Limit


class Charge(NamedTuple):
    """One ring and the permits that one call counts in it."""

    ring: bytes
    limit: Limit
    cost: int
    key: AnyKey
    bucket_start_ms: int | None = None
    """The start of the bucket it was counted in, ms since the epoch; None for the bucket of the
    decision's `now_ms`. They differ where a ring is ahead of a clock that was set back, and where a
    lease was charged earlier.
    """


class BorrowedCharge(Charge):
    """A charge of a call that borrowed: it is counted in a bucket that had not begun."""

    __slots__ = ()


def with_bucket_starts(charges: tuple[Charge, ...], starts: Sequence[int]) -> tuple[Charge, ...]:
    """Return the same charges, counted in the buckets that begin at `starts` (ms)."""
    return tuple(
        charge._replace(bucket_start_ms=start)
        for charge, start in zip(charges, starts, strict=True)
    )


def limits_in(charges: tuple[Charge, ...]) -> list[Limit]:
    """Return the limit of each charge."""
    return [charge.limit for charge in charges]


def with_cost(charges: Iterable[Charge], cost: int) -> tuple[Charge, ...]:
    """Return the same charges with `cost` permits each."""
    return tuple(charge._replace(cost=cost) for charge in charges)
