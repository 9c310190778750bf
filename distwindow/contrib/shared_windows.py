"""Says that limits which an application has declared count in one window, and differ."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import short_repr
from ..ring.limit import Limit


class SharedWindows:
    """The limits of one application, by their key as it is written. The prefix, the key and the
    interval with its buckets name a window; the amount does not.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._first: dict[tuple[str, int, int], tuple[str, Limit]] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(self, key: str, limits: Sequence[Limit], owner: str, advice: str) -> None:
        """Add limits of `owner`. Log once if a window has another amount, and `advice` on that."""
        for limit in limits:
            window = key, limit.bucket_ms, limit.span
            first_owner, first = self._first.setdefault(window, (owner, limit))
            if first.amount != limit.amount and (key, str(limit)) not in self._logged:
                self._logged.add((key, str(limit)))
                self._log.warning(
                    "%s (%s) and %s (%s) count in one window, of %s: each admits while that has "
                    "less than its own amount; %s",
                    first_owner, first, owner, limit, short_repr(key), advice,
                )  # fmt: skip
