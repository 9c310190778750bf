"""The fixed-window counter, kept as the thing to compare with: its edges let through up to 2x."""

from __future__ import annotations

from ..core.errors import ConfigurationError


class FixedWindow:
    """At most `threshold` calls from the start of a window until it is over.

    A window begins at `start_time` (ms; first `now`) and is over when more than `interval_ms` have
    passed, strictly; the call that finds it over begins the next, at its own time. `counter`
    counts refused calls too. So two windows' worth can pass within an instant, at the edge: the
    textbook algorithm (the introduction to sentinel-golang's statistics), not one to limit with.

    Not locked. Raises `ConfigurationError` unless `threshold` is an int of at least 0 and
    `interval_ms` a positive int.
    """

    __slots__ = ("counter", "interval_ms", "start_time", "threshold")

    def __init__(self, threshold: int, interval_ms: int, now: int) -> None:
        # Exactly int: True is no number of calls.
        if type(threshold) is not int or threshold < 0:
            raise ConfigurationError(f"threshold must be an int of at least 0, not {threshold!r}")
        if type(interval_ms) is not int or interval_ms <= 0:
            raise ConfigurationError(f"interval_ms must be a positive int, not {interval_ms!r}")
        self.threshold = threshold
        self.interval_ms = interval_ms
        self.start_time = now
        self.counter = 0

    def try_acquire(self, now: int) -> bool:
        """Count one call at `now` (ms); may it go ahead?"""
        if now - self.start_time > self.interval_ms:
            self.start_time = now
            self.counter = 0
        self.counter += 1
        return self.counter <= self.threshold
