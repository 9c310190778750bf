"""Sentinel's controllers of traffic: refuse, throttle, warm up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

from ..errors import ConfigurationError
from .nodes import StatisticNode, check_int, check_threshold, divide, round_half_up


class PassResult(NamedTuple):
    """A controller's answer, true if the call may pass.

    The caller has to wait for `wait_ms` ms before it goes on. `borrowed` is true if the pass was
    borrowed from a window to come (Sentinel's `PriorityWaitException`): the node has counted it
    already, and the caller must not count it again.
    """

    passed: bool
    wait_ms: int = 0
    borrowed: bool = False

    def __bool__(self) -> bool:
        return self.passed


PASS = PassResult(True)
BLOCK = PassResult(False)


class TrafficShapingController(ABC):
    """Decides whether a call may pass, by the statistics of its node.

    It records neither passes nor refusals: its caller does, as Sentinel's `StatisticSlot`.
    Not locked.
    """

    @abstractmethod
    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        """Decide at `now` (ms) about a call that takes `acquire_count` permits."""


FlowGrade = Literal["qps", "thread"]


class DefaultController(TrafficShapingController):
    """Refuses a call that would exceed `count` passes per second, or `count` running calls.

    `grade` says which: `"qps"` or `"thread"`. The rate so far is truncated to an integer before
    the comparison, `count` is not. A prioritized call that would be refused by its rate borrows
    from a coming window of the node where that is possible before the node's `occupy_timeout_ms`.

    As in Sentinel, concurrent callers of a shared node can exceed the threshold: checking and
    counting are two steps. Raises `ConfigurationError` for a negative, infinite or NaN `count`,
    and for another `grade`.
    """

    def __init__(self, count: float, grade: FlowGrade = "qps") -> None:
        check_threshold("count", count)
        if grade not in get_args(FlowGrade):
            raise ConfigurationError(f"grade must be 'qps' or 'thread', not {grade!r}")
        self.count = count
        self.grade = grade

    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        """Decide at `now` (ms); where the pass is borrowed, the node has counted it already."""
        used = node.cur_thread_num if self.grade == "thread" else int(node.pass_qps(now))
        if used + acquire_count <= self.count:
            return PASS
        if not prioritized or self.grade != "qps":
            return BLOCK
        wait_ms = node.try_occupy_next(now, acquire_count, self.count)
        if wait_ms >= node.config.occupy_timeout_ms:
            return BLOCK
        node.add_waiting_request(now + wait_ms, acquire_count)
        node.add_occupied_pass(now, acquire_count)
        return PassResult(True, wait_ms, borrowed=True)


NS_PER_MS = 1_000_000


class PacedQueue:
    """Calls that pass one after the other, each its own cost after the one before. Idle time earns
    nothing: after it, one call passes at once, and no second one.
    """

    latest_passed_time = -1
    """When the last admitted call passes, in the unit of the arguments."""

    def try_enter(self, now: int, cost: int, max_wait: int) -> int | None:
        """Return how long a call of this cost waits; None if longer than `max_wait`."""
        passes_at = self.latest_passed_time + cost
        wait = max(0, passes_at - now)
        if wait > max_wait:
            return None
        self.latest_passed_time = max(now, passes_at)
        return wait


class ThrottlingController(PacedQueue, TrafficShapingController):
    """Lets `count` permits pass per `stat_duration_ms`, evenly; no call waits longer than
    `max_queueing_time_ms`.

    It counts in whole ms, or in ns where ms would be inexact (`use_nano_seconds`): if the rounded
    `count` does not divide `stat_duration_ms`, or if more than one permit passes per ms. A call of
    0 or fewer permits always passes; with a `count` of 0 no other does. `latest_passed_time` is
    when the last admitted call passes, in the unit in which it counts.

    Raises `ConfigurationError` for a negative or NaN argument, and for a `count` between 0 and 0.5:
    it rounds to 0, by which Sentinel then divides.
    """

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
        return self.try_enter(now, cost, self.max_queueing_time_ms * units_per_ms)


class RateLimiterController(PacedQueue, TrafficShapingController):
    """The controller that `ThrottlingController` replaced; it always counts in ms.

    As in Sentinel it limits nothing above 2000 permits per second, because the cost of a call
    rounds to 0 ms, and lets 1000 pass per second from 1000 up to 2000. Use `ThrottlingController`.
    Raises `ConfigurationError` for a negative or NaN argument.
    """

    def __init__(self, max_queueing_time_ms: int, count: float) -> None:
        check_int("max_queueing_time_ms", max_queueing_time_ms, 0)
        check_threshold("count", count)
        self.max_queueing_time_ms = max_queueing_time_ms
        self.count = count

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
        wait = self.try_enter(now, cost, self.max_queueing_time_ms)
        return BLOCK if wait is None else PassResult(True, wait)


def _whole_count(count: float) -> int:
    whole = round_half_up(count)
    if whole == 0:
        raise ConfigurationError(
            f"count must be 0 or at least 0.5 to be paced, not {count!r}: for a slower pace use a "
            "longer stat_duration_ms"
        )
    return whole


_MAX_TOKENS = 2**31 - 1


class WarmUpController(TrafficShapingController):
    """Refuses above `count` passes per second, and above less until the resource is warm.

    It starts cold. Once a second the tokens of the past time are stored, where the resource is warm
    or passed less than the cold rate, and the passes of the second before are taken away.

    With `max_token` equal to `warning_token` (for example `count` 1 and a period of 1 s) no call
    ever passes, as in Sentinel. Raises `ConfigurationError` for a negative or NaN argument, a
    period below 1 s, a cold factor below 2, and for more tokens than Sentinel's 32 bits hold.

    An idle resource stores tokens, up to `max_token`. The more are stored, the colder it is, and
    the lower the rate that is admitted:

      rate
      count     |------------------.
                |                   ' .
                |                      '  .
      count / f |                          '  -
                +------------------|----------|-- stored tokens
                0            warning_token  max_token        f = cold_factor
    """

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


class WarmUpRateLimiterController(PacedQueue, WarmUpController):
    """A warm-up that paces instead of refusing: the colder, the slower the pace.

    No call waits longer than `max_queueing_time_ms`. The passes of the present second are not
    looked at. With `max_token` equal to `warning_token` the cost of a call is NaN in Sentinel, and
    every call passes, here too; `FlowRule` refuses such settings. Raises `ConfigurationError` as
    `WarmUpController` does, and for a `count` of 0, for which the cost is always NaN.
    """

    def __init__(
        self, count: float, warm_up_period_sec: int, max_queueing_time_ms: int, cold_factor: int = 3
    ) -> None:
        super().__init__(count, warm_up_period_sec, cold_factor)
        if count == 0:
            raise ConfigurationError(
                "count must be above 0 to be paced; a DefaultController of 0 refuses every call"
            )
        check_int("max_queueing_time_ms", max_queueing_time_ms, 0)
        self.max_queueing_time_ms = max_queueing_time_ms

    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        self.sync_token(now, int(node.previous_pass_qps(now)))
        cost = round_half_up(acquire_count / self.admitted_qps() * 1000)
        wait = self.try_enter(now, cost, self.max_queueing_time_ms)
        return BLOCK if wait is None else PassResult(True, wait)
