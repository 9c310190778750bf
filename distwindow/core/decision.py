"""What a limiter answers: a value that explains itself."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .errors import short_repr
from .limit import Limit

Reason = Literal["ok", "over_limit"]
Source = Literal["store", "lease", "deny_cache", "local"]


class Decision(NamedTuple):
    """The answer to one call. True when allowed; a tuple underneath, because building one is on
    the hot path and a tuple is the cheapest frozen value Python has.
    """

    allowed: bool
    key: Any
    """The key, as `str` where it was given as bytes that are UTF-8: both name the same window. In a
    call over several keys, that of the binding limit.
    """
    cost: int
    limit: Limit
    """The limit that binds: the one that refused (of several, the last to have room again), or
    the one with least remaining."""
    remaining: int
    """Permits left under `limit` after this decision; never negative."""
    retry_after: float
    """Seconds until the same call would be admitted if nobody else called; 0.0 when allowed."""
    reset_after: float
    """Seconds until the window of `limit` is empty if nobody calls again."""
    wait: float
    """Seconds to hold back before proceeding; 0.0 unless permits were borrowed."""
    reason: Reason
    source: Source
    """Who decided: `store` (Redis), or this process: `lease` by permits bought from the store,
    `deny_cache` by a refusal of the store that still holds, `local` by its own window.
    """
    now_ms: int
    """When it was decided, on the store's clock: ms since the epoch."""
    charged: Any = None
    """What was counted where, for `refund`; None when nothing was."""

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={short_repr(getattr(self, name))}" for name in self._fields[:-1])
        return f"Decision({shown})"
