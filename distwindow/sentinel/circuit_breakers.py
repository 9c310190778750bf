"""Sentinel's circuit breakers (`AbstractCircuitBreaker` and its two subclasses), in one process.

    closed ---- the statistic crosses the threshold ----> open
    open ------ try_pass at or after next_retry --------> half_open; that call is the probe
    half_open - any call completes well ----------------> closed, and the statistic starts afresh
    half_open - any call completes badly ---------------> open, with a later next_retry
    half_open - a later rule blocks the probe ----------> open, with the same next_retry

Three behaviours of Sentinel's that may surprise, and that the fleet-wide breakers do not share:
the statistic is one bucket aligned to the epoch, not a sliding window; in half-open, the first
completion of any call decides, also of one admitted before the breaker opened; and after a blocked
probe the very next call is a probe again.

Times are arguments, in ms. Nothing here is locked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from ..errors import ConfigurationError, short_repr
from .nodes import is_finite
from .windows.leap_array import LeapArray, check_positive

BreakerState = Literal["closed", "open", "half_open"]
"""`closed` lets calls through, `open` refuses them, `half_open` lets probes through only."""

Observer = Callable[[BreakerState, BreakerState, float | None], object]
"""Called with the previous state, the new state, and the value that opened the breaker or None."""


class _Counts:
    """The completed calls of one interval, and those among them that failed or were slow."""

    __slots__ = ("bad", "total")

    def __init__(self) -> None:
        self.bad = 0
        self.total = 0


class _CountsArray(LeapArray[_Counts]):
    """One bucket, as long as the interval (Sentinel's `SimpleErrorCounterLeapArray`)."""

    __slots__ = ()

    def new_bucket(self, t: int) -> _Counts:
        return _Counts()

    def reset_bucket(self, bucket: _Counts, start: int) -> None:
        bucket.bad = bucket.total = 0


class CircuitBreakerBase(ABC):
    """The states and the statistic of one breaker (Sentinel `AbstractCircuitBreaker`).

    `state` is `"closed"`, `"open"` or `"half_open"`. `next_retry_ms` is when an open breaker may
    let a probe through; 0 before it first opened. Not locked.

    Raises `ConfigurationError` for rules that Sentinel does not load: `time_window_s`,
    `min_request_amount` and `stat_interval_ms` have to be positive ints.
    """

    def __init__(
        self, *, time_window_s: int, min_request_amount: int, stat_interval_ms: int
    ) -> None:
        check_positive(time_window_s=time_window_s, min_request_amount=min_request_amount)
        check_positive(stat_interval_ms=stat_interval_ms)
        self.time_window_s = time_window_s
        self.min_request_amount = min_request_amount
        self.stat_interval_ms = stat_interval_ms
        self.state: BreakerState = "closed"
        self.next_retry_ms = 0
        self._counts = _CountsArray(1, stat_interval_ms)
        self._observers: list[Observer] = []

    def add_observer(self, observer: Observer) -> None:
        """Call `observer(previous, new, value)` at each change of state."""
        self._observers.append(observer)

    def try_pass(self, now: int) -> bool:
        """Return True if a call may go at `now` (ms).

        An open breaker whose retry time has come turns half-open: the call that it lets through is
        the probe, and `state` is `"half_open"` only for that one when this returns True.
        """
        if self.state == "closed":
            return True
        if self.state == "half_open" or now < self.next_retry_ms:
            return False
        self._change("half_open", None)
        return True

    def on_request_complete(self, now: int, *, rt_ms: int, error: bool) -> None:
        """Count a call that ended at `now` (ms) after `rt_ms`; `error` if it raised.

        Raises `ConfigurationError` for a negative `now`.
        """
        counts = self._current(now)
        bad = self.is_bad(rt_ms, error)
        counts.bad += bad
        counts.total += 1
        if self.state == "half_open":
            if bad:
                self._open(now, 1.0)
            else:
                self._change("closed", None, reset_at=now)
        elif self.state == "closed":
            # Sentinel sums all buckets that are not expired. With one bucket that differs from the
            # current one only if time went back, when what was just counted is in no bucket.
            buckets = self._counts.values(now)
            bad_total = sum(bucket.bad for bucket in buckets)
            total = sum(bucket.total for bucket in buckets)
            if total >= self.min_request_amount:
                value = self.statistic(bad_total, total)
                if self.exceeds(value):
                    self._open(now, value)

    def on_probe_blocked(self) -> None:
        """Note that a later rule refused the probe: the breaker is open again.

        `next_retry_ms` stays, so the next call is a probe. As in Sentinel, observers are called
        even if another call's completion has already ended the half-open state.
        """
        if self.state == "half_open":
            self.state = "open"
        self._notify("half_open", "open", 1.0)

    @abstractmethod
    def is_bad(self, rt_ms: int, error: bool) -> bool:
        """Return True if the breaker counts such a call against the service."""

    @abstractmethod
    def statistic(self, bad: int, total: int) -> float:
        """Return what is compared with the threshold."""

    @abstractmethod
    def exceeds(self, value: float) -> bool:
        """Return True if this value of the statistic opens the breaker."""

    def _current(self, now: int) -> _Counts:
        window = self._counts.current_window(now)
        if window is None:
            raise ConfigurationError(f"there is no window at {now} ms, because that is before 0")
        return window.value

    def _open(self, now: int, value: float) -> None:
        self.next_retry_ms = now + self.time_window_s * 1000
        self._change("open", value)

    def _change(self, to: BreakerState, value: float | None, reset_at: int | None = None) -> None:
        previous, self.state = self.state, to
        if reset_at is not None:
            counts = self._current(reset_at)
            counts.bad = counts.total = 0
        self._notify(previous, to, value)

    def _notify(self, previous: BreakerState, to: BreakerState, value: float | None) -> None:
        for observer in self._observers:
            observer(previous, to, value)


class ResponseTimeCircuitBreaker(CircuitBreakerBase):
    """Opens on the ratio of slow calls (Sentinel `ResponseTimeCircuitBreaker`).

    A call is slow if it took more than `count` ms, rounded with halves up. The breaker opens for
    `time_window_s` when more than `slow_ratio_threshold` of at least `min_request_amount` calls of
    an interval of `stat_interval_ms` were slow; with a threshold of exactly 1.0, when all were.
    Errors do not matter. Not locked.

    Raises `ConfigurationError` unless `count` is finite and at least 0 and the ratio is in 0..1.
    """

    def __init__(
        self,
        count: float,
        *,
        time_window_s: int,
        slow_ratio_threshold: float = 1.0,
        min_request_amount: int = 5,
        stat_interval_ms: int = 1000,
    ) -> None:
        super().__init__(
            time_window_s=time_window_s,
            min_request_amount=min_request_amount,
            stat_interval_ms=stat_interval_ms,
        )
        self.max_allowed_rt_ms = math.floor(_threshold("count", count, math.inf) + 0.5)
        self.slow_ratio_threshold = _threshold("slow_ratio_threshold", slow_ratio_threshold, 1.0)

    def is_bad(self, rt_ms: int, error: bool) -> bool:
        """True if the call was slow."""
        return rt_ms > self.max_allowed_rt_ms

    def statistic(self, bad: int, total: int) -> float:
        """Return the ratio of slow calls."""
        return bad / total

    def exceeds(self, value: float) -> bool:
        """True above the threshold, and at 1.0 if that is the threshold."""
        return value > self.slow_ratio_threshold or value == self.slow_ratio_threshold == 1.0


class ExceptionCircuitBreaker(CircuitBreakerBase):
    """Opens on the ratio or the number of errors (Sentinel `ExceptionCircuitBreaker`).

    The breaker opens for `time_window_s` when, of at least `min_request_amount` calls of an
    interval of `stat_interval_ms`, more than `count` failed: a ratio for the strategy
    `"error_ratio"`, a number of calls for `"error_count"`. So a ratio of 1.0 never opens. Response
    times do not matter. Not locked.

    Raises `ConfigurationError` unless `count` is finite and at least 0, and at most 1 as a ratio.
    """

    def __init__(
        self,
        count: float,
        *,
        strategy: Literal["error_ratio", "error_count"],
        time_window_s: int,
        min_request_amount: int = 5,
        stat_interval_ms: int = 1000,
    ) -> None:
        super().__init__(
            time_window_s=time_window_s,
            min_request_amount=min_request_amount,
            stat_interval_ms=stat_interval_ms,
        )
        if strategy not in ("error_ratio", "error_count"):
            raise ConfigurationError(
                f"strategy must be 'error_ratio' or 'error_count', not {strategy!r}"
            )
        self.strategy = strategy
        self.threshold = _threshold("count", count, 1.0 if strategy == "error_ratio" else math.inf)

    def is_bad(self, rt_ms: int, error: bool) -> bool:
        """True if the call failed."""
        return bool(error)

    def statistic(self, bad: int, total: int) -> float:
        """Return the ratio or the number of errors."""
        return bad / total if self.strategy == "error_ratio" else float(bad)

    def exceeds(self, value: float) -> bool:
        """True above the threshold."""
        return value > self.threshold


def _threshold(name: str, value: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} must be a number, not {short_repr(value)}")
    if not (is_finite(value) and 0 <= value <= most):
        bound = f"between 0 and {most:g}" if math.isfinite(most) else "finite and at least 0"
        raise ConfigurationError(f"{name} must be {bound}, not {short_repr(value)}")
    return value
