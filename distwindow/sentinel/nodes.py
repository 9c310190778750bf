"""The statistics of one resource, or of one caller of it (Sentinel `StatisticNode`)."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import ConfigurationError, short_repr
from .windows.bucket_leap_array import BucketLeapArray, Event, MetricNode, OccupiableLeapArray
from .windows.leap_array import bucket_length_ms

MAX_INT = 10**13
"""The largest int of a rule: floats and Lua's numbers are exact up to here."""


def is_finite(value: float) -> bool:
    """True for a number that a float can hold: an int may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_threshold(name: str, value: float) -> None:
    """Raise unless `value` is a finite number of at least 0."""
    if type(value) is int and not is_finite(value):
        raise ConfigurationError(f"{name} is larger than any float: {short_repr(value)}")
    if type(value) not in (int, float) or not is_finite(value) or value < 0:
        raise ConfigurationError(
            f"{name} must be a finite number of at least 0, not {short_repr(value)}"
        )


def check_int(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise unless `value` is an int of at least `least`, and at most `most`, if that is given."""
    # Not isinstance: True is not a number.
    if type(value) is not int or value < least:
        raise ConfigurationError(
            f"{name} must be an int of at least {least}, not {short_repr(value)}"
        )
    if most is not None and value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {short_repr(value)}")


def check_word(rule: str, field: str, value: object, words: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `words`."""
    if value not in words:
        listed = ", ".join(repr(word) for word in words)
        raise ConfigurationError(
            f"{rule}: {field} must be one of {listed}, not {short_repr(value)}"
        )


_MAX_LONG = 2**63 - 1


def round_half_up(value: float) -> int:
    """Return `Math.round(value)`: halves go up, NaN is 0, and infinity is the largest long."""
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return _MAX_LONG if value > 0 else -_MAX_LONG - 1
    whole = math.floor(value)
    # The difference is exact, whereas `value + 0.5` may be rounded up to the next integer.
    return whole + (value - whole >= 0.5)


def divide(dividend: float, divisor: float) -> float:
    """Return `dividend / divisor`; for a divisor of 0 (not -0.0), infinity or NaN."""
    if divisor:
        return dividend / divisor
    if math.isnan(dividend) or dividend == 0:
        return math.nan
    return math.copysign(math.inf, dividend)


MINUTE_BUCKETS = 60
MINUTE_MS = 60_000


class NodeConfig(NamedTuple):
    """The settings that Sentinel has once per process, and here each node has its own.

    `sample_count` and `interval_ms` are those of the second counter (`SampleCountProperty`,
    `IntervalProperty`), `occupy_timeout_ms` is the wait from which a borrowed pass is too late
    (`OccupyTimeoutProperty`), `statistic_max_rt` (ms) is the initial smallest response time
    (`SentinelConfig`).
    """

    sample_count: int = 2
    interval_ms: int = 1000
    occupy_timeout_ms: int = 500
    statistic_max_rt: int = 5000

    def check(self) -> None:
        """Raise `ConfigurationError` for a value that cannot work; it names the field."""
        bucket_length_ms(self.sample_count, self.interval_ms)
        check_int("occupy_timeout_ms", self.occupy_timeout_ms, 0)
        check_int("statistic_max_rt", self.statistic_max_rt, 1)


class StatisticNode:
    """A second counter, a minute counter and the number of running calls.

    The second counter can lend passes of windows to come; the minute counter, of 60 windows of
    1 s, cannot. Rates (`..._qps`) are those of the second counter, per second of its interval;
    totals are those of the minute counter. `now` is in ms, and every method that takes it rotates.
    Before time 0 nothing can be counted (`ConfigurationError`), and every figure is that of an idle
    node. Response times are in ms. Not locked.

    `cur_thread_num` is what `increase_thread_num` and `decrease_thread_num` count. As in Sentinel
    it can become negative; `SlotChain` never lets it.
    """

    __slots__ = ("_last_fetched", "config", "cur_thread_num", "minute", "second")

    def __init__(
        self,
        sample_count: int = 2,
        interval_ms: int = 1000,
        *,
        occupy_timeout_ms: int = 500,
        statistic_max_rt: int = 5000,
    ) -> None:
        self.config = NodeConfig(sample_count, interval_ms, occupy_timeout_ms, statistic_max_rt)
        self.config.check()
        self.second = self._new_second()
        self.minute = BucketLeapArray(MINUTE_BUCKETS, MINUTE_MS, statistic_max_rt)
        self.cur_thread_num = 0
        self._last_fetched = -1

    def reset(self) -> None:
        """Begin with a new second counter; the minute counter and the threads stay."""
        self.second = self._new_second()

    def add_pass_request(self, now: int, count: int) -> None:
        """Count `count` passes."""
        self._add(now, Event.PASS, count)

    def increase_block_qps(self, now: int, count: int) -> None:
        """Count `count` refusals."""
        self._add(now, Event.BLOCK, count)

    def increase_exception_qps(self, now: int, count: int) -> None:
        """Count `count` exceptions."""
        self._add(now, Event.EXCEPTION, count)

    def add_rt_and_success(self, now: int, rt: int, success_count: int) -> None:
        """Count `success_count` completed calls, and one response time of `rt` ms for them all."""
        self._add(now, Event.SUCCESS, success_count)
        self._add(now, Event.RT, rt)

    def add_waiting_request(self, future_time: int, count: int) -> None:
        """Lend `count` passes from the window of `future_time` (ms) of the second counter."""
        self.second.add_waiting(future_time, count)

    def add_occupied_pass(self, now: int, count: int) -> None:
        """Count `count` borrowed passes in the minute counter, as passes and as borrowed."""
        self.minute.add(now, Event.OCCUPIED_PASS, count)
        self.minute.add(now, Event.PASS, count)

    def increase_thread_num(self) -> None:
        """Count one running call more."""
        self.cur_thread_num += 1

    def decrease_thread_num(self) -> None:
        """Count one running call less."""
        self.cur_thread_num -= 1

    def pass_qps(self, now: int) -> float:
        """Return the passes per second, borrowed ones included once their window has begun."""
        return self.second.average(now, Event.PASS)

    def block_qps(self, now: int) -> float:
        """Return the refusals per second."""
        return self.second.average(now, Event.BLOCK)

    def total_qps(self, now: int) -> float:
        """Return passes and refusals per second."""
        return self.pass_qps(now) + self.block_qps(now)

    def success_qps(self, now: int) -> float:
        """Return the completed calls per second, failed ones included."""
        return self.second.average(now, Event.SUCCESS)

    def exception_qps(self, now: int) -> float:
        """Return the exceptions per second."""
        return self.second.average(now, Event.EXCEPTION)

    def occupied_pass_qps(self, now: int) -> float:
        """Return 0: the second counter never has borrowed passes under their own name."""
        return self.second.average(now, Event.OCCUPIED_PASS)

    def max_success_qps(self, now: int) -> float:
        """Return the successes of the best bucket as a rate; an idle node has one in it."""
        second = self.second
        return float(second.max_success(now)) * second.sample_count / second.interval_sec

    def avg_rt(self, now: int) -> float:
        """Return the sum of response times per completed call, in ms; 0 without any."""
        success = self.second.total(now, Event.SUCCESS)
        return self.second.total(now, Event.RT) / success if success else 0.0

    def min_rt(self, now: int) -> float:
        """Return the smallest response time in ms, at least 1; `statistic_max_rt` without any."""
        return float(self.second.min_rt(now))

    def waiting(self, now: int) -> int:
        """Return the passes that are lent from windows to come."""
        return self.second.waiting(now)

    def previous_pass_qps(self, now: int) -> float:
        """Return the passes of the whole second before the present one."""
        return float(self.minute.previous_pass(now))

    def previous_block_qps(self, now: int) -> float:
        """Return the refusals of the whole second before the present one."""
        return float(self.minute.previous_block(now))

    def total_pass(self, now: int) -> int:
        """Return the passes of the last minute."""
        return self.minute.total(now, Event.PASS)

    def block_request(self, now: int) -> int:
        """Return the refusals of the last minute."""
        return self.minute.total(now, Event.BLOCK)

    def total_request(self, now: int) -> int:
        """Return passes and refusals of the last minute."""
        return self.total_pass(now) + self.block_request(now)

    def total_success(self, now: int) -> int:
        """Return the completed calls of the last minute, failed ones included."""
        return self.minute.total(now, Event.SUCCESS)

    def total_exception(self, now: int) -> int:
        """Return the exceptions of the last minute."""
        return self.minute.total(now, Event.EXCEPTION)

    def metrics(self, now: int) -> list[MetricNode]:
        """Return the seconds of the last minute that are over, not empty and new to the caller.

        Oldest first. Each second is returned once: nothing older than what has been returned is
        returned again, also where it was counted late.
        """
        this_second = now - now % 1000
        nodes = [
            node
            for node in self.minute.details(now)
            if self._last_fetched < node.timestamp < this_second and max(node[1:]) > 0
        ]
        nodes.sort()
        if nodes:
            self._last_fetched = nodes[-1].timestamp
        return nodes

    def try_occupy_next(self, now: int, acquire_count: int, threshold: float) -> int:
        """Return in how many ms `acquire_count` passes could be borrowed under `threshold` per
        second; `occupy_timeout_ms` if not before that.

        Changes nothing but rotates. A pass is borrowed by `add_waiting_request` at the time that
        was returned. The wait reaches to the start of the first window to come in which the passes
        that are still counted then, those lent and these ones are at most the threshold. Raises
        `ConfigurationError` for a negative, infinite or NaN threshold.
        """
        check_threshold("threshold", threshold)
        second, timeout_ms = self.second, self.config.occupy_timeout_ms
        max_count = threshold * second.interval_ms / 1000
        borrowed = second.waiting(now)
        if borrowed >= max_count:
            return timeout_ms
        length = second.window_length_ms
        oldest = now - now % length + length - second.interval_ms
        wait_ms = length - now % length
        passed = second.total(now, Event.PASS)
        # At each boundary one window more has left; Sentinel looks each up without rotating.
        while oldest < now and wait_ms < timeout_ms:
            leaving = second.window_pass(oldest)
            if passed + borrowed + acquire_count - leaving <= max_count:
                return wait_ms
            oldest += length
            wait_ms += length
            passed -= leaving
        return timeout_ms

    def _add(self, now: int, event: Event, n: int) -> None:
        self.second.add(now, event, n)
        self.minute.add(now, event, n)

    def _new_second(self) -> OccupiableLeapArray:
        config = self.config
        return OccupiableLeapArray(config.sample_count, config.interval_ms, config.statistic_max_rt)
