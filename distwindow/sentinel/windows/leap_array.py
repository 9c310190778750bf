"""LeapArray: a sliding window as a ring of aligned buckets (Sentinel `LeapArray`).

The interval I is cut into n buckets of L = I / n ms. The bucket of a time `t` starts at `t - t % L`
and lies in slot `t // L % n`, so each slot is used again one interval later:

    n = 4, L = 250      slot   0      1      2      3      0      1
                             |------|------|------|------|------|------|
                        start 0     250    500    750    1000   1250
                                     ^                      ^
                                     the oldest counted     t = 1100

A rotating operation at `t` updates the slot of `t`, and no other. Expired buckets stay in their
slots until a later bucket replaces them; readers recognize them by their age.

Nothing in this module is locked, and nothing reads a clock: times are arguments, in ms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from ...errors import ConfigurationError, short_repr

B = TypeVar("B")


def check_positive(**values: object) -> None:
    """Raise `ConfigurationError` unless each of `values` is a positive int."""
    for name, value in values.items():
        # Not isinstance: True is not a count, and 1000.0 would make every start a float.
        if type(value) is not int or value <= 0:
            raise ConfigurationError(f"{name} must be a positive int, not {short_repr(value)}")


def bucket_length_ms(
    sample_count: int, interval_ms: int, names: tuple[str, str] = ("sample_count", "interval_ms")
) -> int:
    """Return the length in ms of one of `sample_count` equal buckets of `interval_ms`.

    Raises `ConfigurationError`, with their `names`, unless both are positive ints and the first
    divides the second.
    """
    check_positive(**dict(zip(names, (sample_count, interval_ms), strict=True)))
    length, rest = divmod(interval_ms, sample_count)
    if rest:
        raise ConfigurationError(
            f"{names[1]}={interval_ms} cannot be divided evenly into {sample_count} buckets"
        )
    return length


class Window(Generic[B]):
    """One bucket and its time, `[start, start + length_ms)` ms (Sentinel `WindowWrap`).

    An array reuses its windows: a later bucket in the same slot changes `start` and resets `value`.
    """

    __slots__ = ("length_ms", "start", "value")

    def __init__(self, start: int, length_ms: int, value: B) -> None:
        self.start = start
        self.length_ms = length_ms
        self.value = value

    def contains(self, t: int) -> bool:
        """True if `t` is in this window."""
        return self.start <= t < self.start + self.length_ms

    def __repr__(self) -> str:
        return f"Window({self.start}, {self.length_ms}, {self.value!r})"


class LeapArray(ABC, Generic[B]):
    """The array of windows, for any type of bucket; a subclass makes and resets buckets.

    Only `current_window` rotates. All other methods read what is there, by Sentinel's rules:

    - a window is expired when `t - start` is strictly more than the interval: at exactly the
      interval it still counts, until a rotation replaces it;
    - a window that starts after `t` is not expired.

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
        """Return an empty bucket for the window of `t`."""

    @abstractmethod
    def reset_bucket(self, bucket: B, start: int) -> None:
        """Empty `bucket` for the window that begins at `start`, which is later than its own."""

    def horizon(self, t: int) -> int:
        """Return the earliest start that is not expired at `t`."""
        return t - self.interval_ms

    def overtaken(self, t: int, later: Window[B]) -> Window[B] | None:
        """Return what `current_window(t)` returns if its slot already holds `later`, a later
        window.

        As in Sentinel this is a new window outside the array, so what is added to it is lost.
        """
        length = self.window_length_ms
        return Window(t - t % length, length, self.new_bucket(t))

    @property
    def interval_sec(self) -> float:
        """The interval in seconds."""
        return self.interval_ms / 1000.0

    def current_window(self, t: int) -> Window[B] | None:
        """Return the window of `t`, made or reset if it is not there yet; None for a negative `t`.

        Rotates the slot of `t`. If time has gone back by an interval or more, see `overtaken`.
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
        """True if `window` is expired at `t`."""
        return window.start < self.horizon(t)

    def windows(self, t: int) -> list[Window[B]]:
        """Return the windows that are not expired at `t`. Does not rotate."""
        horizon = self.horizon(t)
        return [w for w in self._slots if w is not None and w.start >= horizon]

    def values(self, t: int) -> list[B]:
        """Return the buckets of `windows(t)`; none for a negative `t`. Does not rotate."""
        return [w.value for w in self.windows(t)] if t >= 0 else []

    def all_windows(self) -> list[Window[B]]:
        """Return every window, expired or not. Does not rotate."""
        return [w for w in self._slots if w is not None]

    def window_value(self, t: int) -> B | None:
        """Return the bucket of the window of `t`; None if it is not there. Does not rotate."""
        if t < 0:
            return None
        window = self._slots[self._slot(t)]
        return window.value if window is not None and window.contains(t) else None

    def previous_window(self, t: int, now: int) -> Window[B] | None:
        """Return the window before that of `t` if it is not expired at `now`. Does not rotate.

        With one bucket this is the current window itself. None for a negative `t`. Raises
        `ConfigurationError` where Sentinel's `getPreviousWindow` indexes outside its array: at time
        0, unless there is only one bucket.
        """
        if t < 0:
            return None
        before = t - self.window_length_ms
        window = self._slots[self._slot(before)]
        if window is None or self.is_deprecated(now, window):
            return None
        return window if window.start + self.window_length_ms >= before else None

    def valid_head(self, t: int, now: int) -> Window[B] | None:
        """Return the oldest window of the interval that ends with the window of `t`. Does not
        rotate.

        None if its slot is empty or holds a window that is expired at `now`. Raises
        `ConfigurationError` for a `t` before time 0 that has no slot.
        """
        window = self._slots[self._slot(t + self.window_length_ms)]
        return None if window is None or self.is_deprecated(now, window) else window

    def _slot(self, t: int) -> int:
        """Return the slot of `t`, also before time 0, where Java's division rounds toward zero."""
        if t >= 0:
            return t // self.window_length_ms % self.sample_count
        # In Python -1 % n is the last slot; Java's -1 % n is outside the array.
        if -t // self.window_length_ms % self.sample_count:
            raise ConfigurationError(f"there is no window at {t} ms, because that is before time 0")
        return 0
