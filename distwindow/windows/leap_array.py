"""LeapArray: a sliding window as a ring of aligned buckets (Sentinel `LeapArray`).

The interval I is cut into n buckets of L = I / n ms. The bucket of a time `t` starts at `t - t % L`
and lies in slot `t // L % n`, so each slot is used again one interval later:

    n = 4, L = 250      slot   0      1      2      3      0      1
                             |------|------|------|------|------|------|
                        start 0     250    500    750    1000   1250
                                     ^                      ^
                                     the oldest counted     t = 1100

A rotating operation at `t` brings the slot of `t` up to date, and no other. Buckets of past laps
stay in their slots until their turn comes; they are told from live ones by their age.

Nothing in this module is locked and nothing reads a clock: times are ms, as arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from ..core.errors import ConfigurationError

B = TypeVar("B")


def bucket_length_ms(sample_count: int, interval_ms: int) -> int:
    """The length in ms of each of `sample_count` equal buckets of `interval_ms`.

    Raises `ConfigurationError` unless both are positive ints and the one divides the other.
    """
    for name, value in (("sample_count", sample_count), ("interval_ms", interval_ms)):
        # Exactly int: True is no count, and 1000.0 would make every start a float.
        if type(value) is not int or value <= 0:
            raise ConfigurationError(f"{name} must be a positive int, not {value!r}")
    length, rest = divmod(interval_ms, sample_count)
    if rest:
        raise ConfigurationError(
            f"interval_ms must divide evenly: {interval_ms} ms in {sample_count} buckets"
        )
    return length


class Window(Generic[B]):
    """One bucket and its place in time: `[start, start + length_ms)` (Sentinel `WindowWrap`).

    A window in an array is used again: a later lap moves its `start` and resets its `value`.
    """

    __slots__ = ("length_ms", "start", "value")

    def __init__(self, start: int, length_ms: int, value: B) -> None:
        self.start = start
        self.length_ms = length_ms
        self.value = value

    def contains(self, t: int) -> bool:
        """Does `t` lie in this window?"""
        return self.start <= t < self.start + self.length_ms

    def __repr__(self) -> str:
        return f"Window({self.start}, {self.length_ms}, {self.value!r})"


class LeapArray(ABC, Generic[B]):
    """The ring of windows, for any kind of bucket; a subclass says how one is made and reset.

    Only `current_window` rotates. All else reads what is there, by these rules of Sentinel:

    - a window is expired when `t - start` is more than the interval, strictly: one aged exactly
      the interval still counts, as long as no rotation has put the new lap in its slot;
    - a window that starts in the future is not expired.

    Windows are listed in slot order, not in order of time. Not locked. Raises
    `ConfigurationError` as `bucket_length_ms` does.
    """

    __slots__ = ("_slots", "interval_ms", "sample_count", "window_length_ms")

    def __init__(self, sample_count: int, interval_ms: int) -> None:
        self.window_length_ms = bucket_length_ms(sample_count, interval_ms)
        self.sample_count = sample_count
        self.interval_ms = interval_ms
        self._slots: list[Window[B] | None] = [None] * sample_count

    @abstractmethod
    def new_bucket(self, t: int) -> B:
        """An empty bucket for the window of `t`."""

    @abstractmethod
    def reset_bucket(self, bucket: B, start: int) -> None:
        """Empty `bucket` for the window that begins at `start`, later than its own."""

    def horizon(self, t: int) -> int:
        """The earliest start that is not expired at `t`."""
        return t - self.interval_ms

    def overtaken(self, t: int, later: Window[B]) -> Window[B] | None:
        """What `current_window(t)` gives when its slot already holds `later`, of a later lap.

        As in Sentinel a new window that is not in the array: what is added to it is lost.
        """
        length = self.window_length_ms
        return Window(t - t % length, length, self.new_bucket(t))

    @property
    def interval_sec(self) -> float:
        """The interval in seconds."""
        return self.interval_ms / 1000.0

    def current_window(self, t: int) -> Window[B] | None:
        """The window of `t`, made or reset if it is not there yet; None for a negative `t`.

        Rotates the slot of `t`. If time has gone back by a lap or more, see `overtaken`.
        """
        if t < 0:
            return None
        length = self.window_length_ms
        number = t // length
        slot = number % self.sample_count
        start = number * length
        window = self._slots[slot]
        if window is None:
            window = self._slots[slot] = Window(start, length, self.new_bucket(t))
            return window
        if window.start < start:
            self.reset_bucket(window.value, start)
            window.start = start
        elif window.start > start:
            return self.overtaken(t, window)
        return window

    def is_deprecated(self, t: int, window: Window[B]) -> bool:
        """Is `window` expired at `t`?"""
        return window.start < self.horizon(t)

    def windows(self, t: int) -> list[Window[B]]:
        """The windows that are not expired at `t`. Does not rotate."""
        horizon = self.horizon(t)
        return [w for w in self._slots if w is not None and w.start >= horizon]

    def values(self, t: int) -> list[B]:
        """The buckets of `windows(t)`; none for a negative `t`. Does not rotate."""
        return [w.value for w in self.windows(t)] if t >= 0 else []

    def all_windows(self) -> list[Window[B]]:
        """Every window there is, expired or not. Does not rotate."""
        return [w for w in self._slots if w is not None]

    def window_value(self, t: int) -> B | None:
        """The bucket of the window that `t` lies in; None if it is not there. Does not rotate."""
        if t < 0:
            return None
        window = self._slots[self._slot(t)]
        return window.value if window is not None and window.contains(t) else None

    def previous_window(self, t: int, now: int) -> Window[B] | None:
        """The window before that of `t`, if there is one not expired at `now`. Does not rotate.

        With one bucket this is the current window itself. None for a negative `t`. Raises
        `ConfigurationError` where Sentinel's `getPreviousWindow` runs out of its array: at time 0,
        unless there is only one bucket.
        """
        if t < 0:
            return None
        before = t - self.window_length_ms
        window = self._slots[self._slot(before)]
        if window is None or self.is_deprecated(now, window):
            return None
        return window if window.start + self.window_length_ms >= before else None

    def valid_head(self, t: int, now: int) -> Window[B] | None:
        """The oldest window of the interval that ends with the window of `t`. Does not rotate.

        None if its slot is empty or holds a window that is expired at `now`. Raises
        `ConfigurationError` for a `t` before time 0 that has no slot.
        """
        window = self._slots[self._slot(t + self.window_length_ms)]
        return None if window is None or self.is_deprecated(now, window) else window

    def _slot(self, t: int) -> int:
        """The slot of `t`, also before time 0, where Java's division goes toward zero."""
        if t >= 0:
            return t // self.window_length_ms % self.sample_count
        # Python's own -1 % n would silently find the last slot.
        if -t // self.window_length_ms % self.sample_count:
            raise ConfigurationError(f"there is no window at {t} ms, before time 0")
        return 0
