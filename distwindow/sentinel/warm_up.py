"""Controllers that admit less after an idle time (Sentinel `WarmUpController`).

An idle resource stores tokens, up to `max_token`. The more are stored, the colder it is, and the
lower the rate that is admitted:

    rate
    count     |------------------.
              |                   ' .
              |                      '  .
    count / f |                          '  -
              +------------------|----------|-- stored tokens
              0            warning_token  max_token        f = cold_factor
"""

from __future__ import annotations

import math

from ..core.errors import ConfigurationError
from .checks import check_int, check_threshold
from .java import divide, round_half_up
from .statistic_node import StatisticNode
from .throttling import PacedQueue
from .traffic_shaping import BLOCK, PASS, PassResult, TrafficShapingController

_MAX_TOKENS = 2**31 - 1


class WarmUpController(TrafficShapingController):
    """Refuses above `count` passes per second, and above less until the resource is warm.

    It starts cold. Once a second the tokens of the past time are stored, where the resource is warm
    or passed less than the cold rate, and the passes of the second before are taken away.

    With `max_token` equal to `warning_token` (for example `count` 1 and a period of 1 s) no call
    ever passes, as in Sentinel. Raises `ConfigurationError` for a negative or NaN argument, a
    period below 1 s, a cold factor below 2, and for more tokens than Sentinel's 32 bits hold.
    """

    __slots__ = (
        "cold_factor",
        "count",
        "last_filled_time",
        "max_token",
        "slope",
        "stored_tokens",
        "warning_token",
    )

    def __init__(self, count: float, warm_up_period_sec: int, cold_factor: int = 3) -> None:
        check_threshold("count", count)
        check_int("warm_up_period_sec", warm_up_period_sec, 1)
        check_int("cold_factor", cold_factor, 2)
        self.count = count
        self.cold_factor = cold_factor
        self.warning_token = int(warm_up_period_sec * count) // (cold_factor - 1)
        above = int(2 * warm_up_period_sec * count / (1.0 + cold_factor))
        self.max_token = self.warning_token + above
        if self.max_token > _MAX_TOKENS:
            raise ConfigurationError(
                f"count={count!r} for warm_up_period_sec={warm_up_period_sec} stores more than "
                f"{_MAX_TOKENS} tokens: use a shorter period"
            )
        self.slope = divide(divide(cold_factor - 1.0, count), above)
        self.stored_tokens = 0
        self.last_filled_time = 0

    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        """Decide at `now` (ms)."""
        passed = int(node.pass_qps(now))
        self.sync_token(now, int(node.previous_pass_qps(now)))
        return PASS if passed + acquire_count <= self.admitted_qps() else BLOCK

    def admitted_qps(self) -> float:
        """Return the rate that the stored tokens admit; NaN where Sentinel's is, which admits
        nothing."""
        if self.stored_tokens < self.warning_token:
            return self.count
        above = self.stored_tokens - self.warning_token
        interval = above * self.slope + divide(1.0, self.count)
        return math.nextafter(1.0 / interval, math.inf)

    def sync_token(self, now: int, pass_qps: int) -> None:
        """Store the tokens of the time since the last call in another second, then take
        `pass_qps` away."""
        second = now - now % 1000
        if second <= self.last_filled_time:
            return
        self.stored_tokens = max(0, self._refilled(second, pass_qps) - pass_qps)
        self.last_filled_time = second

    def _refilled(self, second: int, pass_qps: int) -> int:
        tokens, warning = self.stored_tokens, self.warning_token
        is_idle = pass_qps < int(self.count) // self.cold_factor
        if tokens < warning or (tokens > warning and is_idle):
            tokens = int(tokens + (second - self.last_filled_time) * self.count / 1000)
        return min(tokens, self.max_token)


class WarmUpRateLimiterController(WarmUpController):
    """A warm-up that paces instead of refusing: the colder, the slower the pace.

    No call waits longer than `max_queueing_time_ms`. The passes of the present second are not
    looked at. With `max_token` equal to `warning_token` the cost of a call is NaN in Sentinel, and
    every call passes, here too; `FlowRule` refuses such settings. Raises `ConfigurationError` as
    `WarmUpController` does, and for a `count` of 0, for which the cost is always NaN.
    """

    __slots__ = ("_queue", "max_queueing_time_ms")

    def __init__(
        self,
        count: float,
        warm_up_period_sec: int,
        max_queueing_time_ms: int,
        cold_factor: int = 3,
    ) -> None:
        super().__init__(count, warm_up_period_sec, cold_factor)
        if count == 0:
            raise ConfigurationError(
                "count must be above 0 to be paced; a DefaultController of 0 refuses every call"
            )
        check_int("max_queueing_time_ms", max_queueing_time_ms, 0)
        self.max_queueing_time_ms = max_queueing_time_ms
        self._queue = PacedQueue()

    @property
    def latest_passed_time(self) -> int:
        """When the last admitted call passes, in ms."""
        return self._queue.latest_passed_time

    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        """Decide at `now` (ms)."""
        self.sync_token(now, int(node.previous_pass_qps(now)))
        cost = round_half_up(acquire_count / self.admitted_qps() * 1000)
        wait = self._queue.try_enter(now, cost, self.max_queueing_time_ms)
        return BLOCK if wait is None else PassResult(True, wait)
