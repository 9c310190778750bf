"""Decides which of many equal failures are logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable


class FailureLog:
    """Lets each kind of failure be logged once in `every_s` seconds, and counts the others.

    The kinds must be few: they are kept forever. Two threads may log the same failure twice.
    """

    def __init__(self, every_s: float, monotonic: Callable[[], float]) -> None:
        self._every_s = every_s
        self._monotonic = monotonic
        self._logged: dict[Hashable, tuple[float, int]] = {}
        """By kind: when it was logged last, and how many failures were not logged since."""

    def unlogged_before(self, kind: Hashable) -> int | None:
        """Return how many failures of this kind were not logged since the last that was; None if
        this one is not to be logged either.
        """
        now_s = self._monotonic()
        logged_s, unlogged = self._logged.get(kind, (-math.inf, 0))
        if now_s - logged_s < self._every_s:
            self._logged[kind] = (logged_s, unlogged + 1)
            return None
        self._logged[kind] = (now_s, 0)
        return unlogged
