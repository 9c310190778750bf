"""The answer to a call, and what it was charged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from .. import errors
from ..errors import short_repr
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


def limits_in(charges: Iterable[Charge]) -> list[Limit]:
    """Return the limit of each charge."""
    return [charge.limit for charge in charges]


def with_cost(charges: Iterable[Charge], cost: int) -> tuple[Charge, ...]:
    """Return the same charges with `cost` permits each."""
    return tuple(charge._replace(cost=cost) for charge in charges)


Reason = Literal["ok", "over_limit", "borrowed", "paced", "store_down", "shadow"]
Source = Literal["store", "lease", "deny_cache", "local", "policy"]


class Decision(NamedTuple):
    """The answer to one call; true when allowed. It is a tuple because one is built on the hot
    path, and a tuple is the immutable value that Python builds fastest.
    """

    allowed: bool
    key: AnyKey
    """The key, as `str` if it is UTF-8: both name one window; of several keys, that of `limit`."""
    cost: int
    limit: Limit
    """The limit that refused (of several the one with room last), or has fewest permits left."""
    remaining: int
    """Permits left under `limit` after this call; never negative."""
    retry_after: float
    """Seconds until the same call would be admitted if no other calls came; 0.0 when allowed. With
    `enqueue`, seconds until the caller's turn. Where
    `source` is "deny_cache", a call of higher cost than the refused one may have to wait longer.
    """
    reset_after: float
    """Seconds until the window of `limit` is empty if no more calls come."""
    wait: float
    """Seconds to wait before proceeding: until the bucket begins that the permits were borrowed
    from, or until a paced limit lets the call proceed. Otherwise 0.0.
    """
    reason: Reason
    """Why: `ok`; `borrowed`, a priority call that is allowed after `wait`; `paced`, admitted with a
    `wait`; `over_limit`, refused; `store_down`, decided without the store, which is away;
    `shadow`, admitted by a limit in shadow that would have refused, or delayed.
    """
    source: Source
    """The place that decided: `store` (Redis), or this process: `lease` from permits bought from
    the store, `deny_cache` from a cached refusal of the store, `local` from its own window,
    `policy` by `on_store_error` or `on_unknown`.
    """
    now_ms: int
    """When it was decided, by the store's clock, ms since the epoch."""
    charged: tuple[Charge, ...] | None = None
    """The charges that were counted, for `refund`; None when nothing was."""

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={short_repr(getattr(self, name))}" for name in self._fields[:-1])
        return f"Decision({shown})"


def _restored(values: list[Any]) -> Decision:
    """Return the decision of which a `RateLimitExceeded` has these values in its `args`."""
    allowed, key, cost, limit, *others = values
    return Decision(allowed, key, cost, Limit(limit), *others)


errors.restored_decision = _restored
