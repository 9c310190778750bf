"""The fixed-window counter, for comparison: at a window's end up to twice the threshold passes."""

from __future__ import annotations

from ...errors import ConfigurationError


class FixedWindow:
    """At most `threshold` calls from the start of a window until it is over.

    A window begins at `start_time` (ms; the first at `now`) and is over when strictly more than
    `interval_ms` have passed; the next call then begins the next window at its own time. `counter`
    counts refused calls, too. Twice the threshold can pass within an instant, at the end of one
    window and the start of the next. This is the textbook algorithm (the introduction to
    sentinel-golang's statistics); do not limit with it.

    Not locked. Raises `ConfigurationError` unless `threshold` is an int of at least 0 and
    `interval_ms` a positive int.
    """

    __slots__ = ("counter", "interval_ms", "start_time", "threshold")

    def __init__(self, threshold: int, interval_ms: int, now: int) -> None:
        # Not isinstance: True is not a number of calls.
        if type(threshold) is not int or threshold < 0:
            raise ConfigurationError(f"threshold must be an int of at least 0, not {threshold!r}")
        if type(interval_ms) is not int or interval_ms <= 0:
            raise ConfigurationError(f"interval_ms must be a positive int, not {interval_ms!r}")
        self.threshold = threshold
        self.interval_ms = interval_ms
        self.start_time = now
        self.counter = 0

    def try_acquire(self, now: int) -> bool:
        """Count one call at `now` (ms). True if it is admitted."""
        if now - self.start_time > self.interval_ms:
            self.start_time = now
            self.counter = 0
        self.counter += 1
        return self.counter <= self.threshold
