"""Controllers that let calls pass at an even pace (Sentinel `ThrottlingController`)."""

from __future__ import annotations

from ..core.errors import ConfigurationError
from .checks import check_int, check_threshold
from .java import round_half_up
from .statistic_node import StatisticNode
from .traffic_shaping import BLOCK, PassResult, TrafficShapingController

NS_PER_MS = 1_000_000


class PacedQueue:
    """Calls that pass one after the other, each its own cost after the one before.

    `latest_passed_time` is the time at which the last admitted call passes, in the unit of the
    arguments. Idle time earns nothing: after it, the next call passes at once and no second one
    with it.
    """

    __slots__ = ("latest_passed_time",)

    def __init__(self) -> None:
        self.latest_passed_time = -1

    def try_enter(self, now: int, cost: int, max_wait: int) -> int | None:
        """Return how long a call of this cost waits; None if longer than `max_wait`."""
        passes_at = self.latest_passed_time + cost
        wait = max(0, passes_at - now)
        if wait > max_wait:
            return None
        self.latest_passed_time = max(now, passes_at)
        return wait


class ThrottlingController(TrafficShapingController):
    """Lets `count` permits pass per `stat_duration_ms`, evenly; no call waits longer than
    `max_queueing_time_ms`.

    It counts in whole ms, or in ns where ms would be inexact (`use_nano_seconds`): if the rounded
    `count` does not divide `stat_duration_ms`, or if more than one permit passes per ms. A call of
    0 or fewer permits always passes; with a `count` of 0 no other does.

    Raises `ConfigurationError` for a negative or NaN argument, and for a `count` between 0 and 0.5:
    it rounds to 0, by which Sentinel then divides.
    """

    __slots__ = (
        "_queue",
        "count",
        "max_queueing_time_ms",
        "stat_duration_ms",
        "use_nano_seconds",
    )

    def __init__(
        self, max_queueing_time_ms: int, count: float, stat_duration_ms: int = 1000
    ) -> None:
        check_int("max_queueing_time_ms", max_queueing_time_ms, 0)
        check_threshold("count", count)
        check_int("stat_duration_ms", stat_duration_ms, 1)
        self.max_queueing_time_ms = max_queueing_time_ms
        self.count = count
        self.stat_duration_ms = stat_duration_ms
        self.use_nano_seconds = count > 0 and (
            stat_duration_ms % _whole_count(count) != 0 or count / stat_duration_ms > 1
        )
        self._queue = PacedQueue()

    @property
    def latest_passed_time(self) -> int:
        """When the last admitted call passes: in ns with `use_nano_seconds`, else in ms."""
        return self._queue.latest_passed_time

    def can_pass(
        self,
        now: int,
        node: StatisticNode | None = None,
        acquire_count: int = 1,
        prioritized: bool = False,
    ) -> PassResult:
        """Decide at `now` (ms). A wait in ns is rounded up to ms; `node` is not used."""
        if self.use_nano_seconds:
            wait_ns = self.wait_ns(now * NS_PER_MS, acquire_count)
            wait = None if wait_ns is None else -(-wait_ns // NS_PER_MS)
        else:
            wait = self._wait(now, acquire_count, 1.0 * self.stat_duration_ms, 1)
        return BLOCK if wait is None else PassResult(True, wait)

    def wait_ns(self, now_ns: int, acquire_count: int = 1) -> int | None:
        """Admit a call at `now_ns` (ns) and return how long it waits, in ns; None if refused.

        Raises `ConfigurationError` if this controller counts in ms.
        """
        if not self.use_nano_seconds:
            raise ConfigurationError("this controller counts in ms: call can_pass")
        duration_ns = 1.0 * NS_PER_MS * self.stat_duration_ms
        return self._wait(now_ns, acquire_count, duration_ns, NS_PER_MS)

    def _wait(self, now: int, acquire_count: int, duration: float, units_per_ms: int) -> int | None:
        if acquire_count <= 0:
            return 0
        if self.count == 0:
            return None
        cost = round_half_up(duration * acquire_count / self.count)
        return self._queue.try_enter(now, cost, self.max_queueing_time_ms * units_per_ms)


class RateLimiterController(TrafficShapingController):
    """The controller that `ThrottlingController` replaced; it always counts in ms.

    As in Sentinel it limits nothing above 2000 permits per second, because the cost of a call
    rounds to 0 ms, and lets 1000 pass per second from 1000 up to 2000. Use `ThrottlingController`.
    Raises `ConfigurationError` for a negative or NaN argument.
    """

    __slots__ = ("_queue", "count", "max_queueing_time_ms")

    def __init__(self, max_queueing_time_ms: int, count: float) -> None:
        check_int("max_queueing_time_ms", max_queueing_time_ms, 0)
        check_threshold("count", count)
        self.max_queueing_time_ms = max_queueing_time_ms
        self.count = count
        self._queue = PacedQueue()

    @property
    def latest_passed_time(self) -> int:
        """When the last admitted call passes, in ms."""
        return self._queue.latest_passed_time

    def can_pass(
        self,
        now: int,
        node: StatisticNode | None = None,
        acquire_count: int = 1,
        prioritized: bool = False,
    ) -> PassResult:
        """Decide at `now` (ms). `node` is not used."""
        if acquire_count <= 0:
            return PassResult(True)
        if self.count == 0:
            return BLOCK
        cost = round_half_up(acquire_count / self.count * 1000)
        wait = self._queue.try_enter(now, cost, self.max_queueing_time_ms)
        return BLOCK if wait is None else PassResult(True, wait)


def _whole_count(count: float) -> int:
    whole = round_half_up(count)
    if whole == 0:
        raise ConfigurationError(
            f"count must be 0 or at least 0.5 to be paced, not {count!r}: for a slower pace use a "
            "longer stat_duration_ms"
        )
    return whole
