"""The rules of fleet-wide circuit breakers: when one opens, for how long, and how it is probed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from ..errors import ConfigurationError

Measure = Literal["ratio", "count", "in_a_row"]
"""The measure that the threshold bounds: bad calls divided by all calls, bad calls, or the bad
calls since the last good one.
"""

MAX_BREAKER_BUCKETS = 60
"""The most buckets of a rule: each call of the script reads all of them."""
MAX_SECONDS = 7 * 86_400
"""The longest window, `open_for` and `probe_timeout`: longer is more likely a wrong unit."""
MAX_CALLS = 10**12
"""The largest number of calls in a rule: sums stay exact in Lua's doubles."""
MAX_PROBES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRule:
    """Base class of all `RULES`: use one of these.

    A rule looks at the calls that ended in the last `window` seconds, counted in `buckets` buckets.
    It opens the breaker for `open_for` seconds when at least `min_calls` ended and the bad ones
    among them reach the threshold. After that, calls of the whole fleet are let through as probes,
    at most `probes` at a time. When so many have succeeded, the breaker closes and counts afresh;
    when one has failed, it opens again. A probe may take any time: another call gets it when its
    process was silent for `probe_timeout` seconds.

    Raises `ConfigurationError` for values that can never work.
    """

    kind: ClassVar[str]
    """The name of the rule in the store's keys."""
    measure: ClassVar[Measure]

    window: float = 10.0
    min_calls: int = 20
    open_for: float = 5.0
    probes: int = 1
    probe_timeout: float = 10.0
    buckets: int = 10

    def __post_init__(self) -> None:
        check_whole("min_calls", self.min_calls, MAX_CALLS)
        check_whole("probes", self.probes, MAX_PROBES)
        check_whole("buckets", self.buckets, MAX_BREAKER_BUCKETS)
        for name in ("window", "open_for", "probe_timeout"):
            milliseconds(name, getattr(self, name))
        if self.window_ms % self.buckets:
            raise ConfigurationError(
                f"window={self.window!r}: {self.window_ms} ms cannot be divided evenly into "
                f"buckets={self.buckets!r}"
            )
        if type(self) is BreakerRule:
            return  # the base class itself: it has no measure, and no breaker takes it
        if self.measure == "ratio":
            check_ratio(self.threshold)
        else:
            check_whole("count", self.threshold, MAX_CALLS)

    @property
    def threshold(self) -> float:
        """The ratio or number of bad calls at which the breaker opens."""
        found: float = getattr(self, "ratio" if self.measure == "ratio" else "count")
        return found

    def is_bad(self, failed: bool, rt_s: float) -> bool:
        """True if a call that ended so after `rt_s` seconds counts against the service."""
        return failed

    @property
    def window_ms(self) -> int:
        """The window in ms."""
        return round(self.window * 1000)  # whole, as `__post_init__` has checked

    @property
    def bucket_ms(self) -> int:
        """The width of a bucket in ms."""
        return self.window_ms // self.buckets

    @property
    def open_ms(self) -> int:
        """`open_for` in ms."""
        return round(self.open_for * 1000)

    @property
    def probe_ms(self) -> int:
        """`probe_timeout` in ms."""
        return round(self.probe_timeout * 1000)

    def reached_by(self, counts: Sequence[tuple[int, int]]) -> bool:
        """True if these (all, bad) of a window's buckets, oldest first, open a closed breaker."""
        total, bad = sum(c[0] for c in counts), sum(c[1] for c in counts)
        if total < self.min_calls:
            return False
        return (bad / total if self.measure == "ratio" else bad) >= self.threshold


@dataclass(frozen=True, slots=True)
class ErrorRatio(BreakerRule):
    """Opens when at least `ratio` of the calls failed (0 < `ratio` <= 1). See `BreakerRule`."""

    kind: ClassVar[str] = "error_ratio"
    measure: ClassVar[Measure] = "ratio"

    ratio: float


@dataclass(frozen=True, slots=True)
class SlowRatio(BreakerRule):
    """Opens when at least `ratio` of the calls took more than `max_rt` seconds, whether or not they
    failed. See `BreakerRule`.
    """

    kind: ClassVar[str] = "slow_ratio"
    measure: ClassVar[Measure] = "ratio"

    max_rt: float
    ratio: float = 0.5

    def __post_init__(self) -> None:
        BreakerRule.__post_init__(self)
        if not is_number(self.max_rt) or not 0 <= self.max_rt <= MAX_SECONDS:
            raise ConfigurationError(
                f"max_rt={self.max_rt!r} is not a number of seconds from 0 to {MAX_SECONDS}"
            )
        if self.max_rt > max(self.window, 60):
            raise ConfigurationError(
                f"max_rt={self.max_rt!r} is more than a minute, and longer than window="
                f"{self.window!r}; both are seconds: write {self.max_rt / 1000:g} for "
                f"{self.max_rt:g} ms, or a longer window"
            )

    def is_bad(self, failed: bool, rt_s: float) -> bool:
        """True if the call was slow."""
        return rt_s > self.max_rt


@dataclass(frozen=True, slots=True)
class ErrorCount(BreakerRule):
    """Opens when `count` calls failed. See `BreakerRule`; `min_calls` is 1 by default here."""

    kind: ClassVar[str] = "error_count"
    measure: ClassVar[Measure] = "count"

    count: int
    min_calls: int = field(default=1, kw_only=True)


@dataclass(frozen=True, slots=True)
class ConsecutiveFailures(BreakerRule):
    """Opens when `count` calls in a row failed, however far apart they are: each success begins
    anew. `open_for`, `probes` and `probe_timeout` are those of `BreakerRule`.

    The row is the fleet's: the flushes of all processes in the order in which the store takes them,
    and in each flush its calls in the order in which they ended. So every failed call since the
    last success counts, whichever processes made them. A row is forgotten when no call has ended
    for ten minutes and `open_for`: calls that rare would all pass an open breaker, as probes.
    """

    kind: ClassVar[str] = "consecutive_failures"
    measure: ClassVar[Measure] = "in_a_row"

    count: int
    # How late a flush is taken. A row has no window.
    window: float = field(default=600.0, init=False, repr=False)
    buckets: int = field(default=60, init=False, repr=False)
    min_calls: int = field(default=1, init=False, repr=False)


RULES: tuple[type[BreakerRule], ...] = (ErrorRatio, SlowRatio, ErrorCount, ConsecutiveFailures)
"""Every rule."""


def settings_of(rule: BreakerRule) -> dict[str, float]:
    """Return every parameter of `rule` by its name, those of its kind alone first. Times that are
    whole ms are exactly these, so that rules that do the same have equal settings.
    """
    of_all = len(fields(BreakerRule))
    in_order = (*fields(rule)[of_all:], *fields(rule)[:of_all])
    times = {"window": rule.window_ms, "open_for": rule.open_ms, "probe_timeout": rule.probe_ms}
    found = {each.name: getattr(rule, each.name) for each in in_order}
    return found | {name: ms / 1000 for name, ms in times.items()}


def check_whole(name: str, value: object, most: int) -> None:
    """Raise `ConfigurationError` unless `value` is an int from 1 to `most`."""
    # Not isinstance: True is not a number of calls.
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigurationError(f"{name}={value!r} is not a whole number from 1 to {most}")


def check_ratio(ratio: object) -> None:
    """Raise `ConfigurationError` unless `ratio` is above 0 and at most 1."""
    if not is_number(ratio) or not 0 < ratio <= 1:  # type: ignore[operator]  # it is a number
        raise ConfigurationError(f"ratio={ratio!r} is not a number above 0 and at most 1")


def milliseconds(name: str, seconds: float) -> int:
    """Return `seconds` in ms. Raises `ConfigurationError` unless that is whole and at least 1."""
    if not is_number(seconds) or not 0 < seconds <= MAX_SECONDS:
        raise ConfigurationError(
            f"{name}={seconds!r} is not a number of seconds above 0 and at most {MAX_SECONDS}"
        )
    ms = round(seconds * 1000)
    if ms < 1 or not math.isclose(ms, seconds * 1000, rel_tol=1e-9):
        raise ConfigurationError(f"{name}={seconds!r} is not a whole number of milliseconds")
    return ms


def is_number(value: object) -> bool:
    """True for a finite int or float."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]  # only numbers get here
