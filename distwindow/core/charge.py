"""What a call counts, and where: one charge for each limit of its key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .key import AnyKey
from .limit import Limit


class Charge(NamedTuple):
    """One ring and what one call counts in it."""

    ring: bytes
    limit: Limit
    cost: int
    key: AnyKey
    bucket_start_ms: int | None = None
    """The start of the bucket it was counted in, where that may not be the bucket of the decision's
    `now_ms`: a ring is ahead of a clock that was set back, or a lease was charged before.
    """


def charged_in(charges: tuple[Charge, ...], starts: Sequence[int]) -> tuple[Charge, ...]:
    """The same charges, counted in the buckets of these starts."""
    return tuple(
        charge._replace(bucket_start_ms=start)
        for charge, start in zip(charges, starts, strict=True)
    )


def limits_in(charges: tuple[Charge, ...]) -> list[Limit]:
    """The limits that these are charged under."""
    return [charge.limit for charge in charges]


def with_cost(charges: Iterable[Charge], cost: int) -> tuple[Charge, ...]:
    """The same rings, for `cost` permits."""
    return tuple(charge._replace(cost=cost) for charge in charges)
