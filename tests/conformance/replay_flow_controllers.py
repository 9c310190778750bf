"""`flow_...`: Sentinel's flow controllers, each over a StatisticNode where it needs one."""

from __future__ import annotations

from distwindow.sentinel.flow import (
    DefaultController,
    PassResult,
    RateLimiterController,
    ThrottlingController,
    WarmUpController,
    WarmUpRateLimiterController,
)

from .replay import Args
from .replay_statistic_node import StatisticNodeReplay


def shown(result: PassResult) -> dict[str, object]:
    """A result as the traces write it."""
    name = "priority_wait" if result.borrowed else "pass" if result else "block"
    return {"result": name, "wait_ms": result.wait_ms}


class DefaultControllerReplay(StatisticNodeReplay):
    """`flow_default`."""

    def __init__(self, params: Args) -> None:
        super().__init__(params)
        self.controller = DefaultController(params["count"], params["grade"])

    def op_can_pass(self, now: int, args: Args) -> object:
        return shown(self.controller.can_pass(now, self.node, args["count"], args["prioritized"]))


class ThrottlingReplay:
    """`flow_throttling`; `now` is in ns where the controller counts in ns."""

    def __init__(self, params: Args) -> None:
        self.controller = ThrottlingController(
            params["max_queueing_time_ms"], params["count"], params["stat_duration_ms"]
        )
        assert self.controller.use_nano_seconds is params["use_nano_seconds"]

    def op_can_pass(self, now: int, args: Args) -> object:
        result: dict[str, object]
        if self.controller.use_nano_seconds:
            wait_ns = self.controller.wait_ns(now, args["count"])
            result = {"result": "block" if wait_ns is None else "pass", "wait_ns": wait_ns or 0}
        else:
            result = shown(self.controller.can_pass(now, acquire_count=args["count"]))
        return {**result, "latest_passed_time": self.controller.latest_passed_time}


class RateLimiterReplay:
    """`flow_rate_limiter_legacy`."""

    def __init__(self, params: Args) -> None:
        self.controller = RateLimiterController(params["max_queueing_time_ms"], params["count"])

    def op_can_pass(self, now: int, args: Args) -> object:
        result = shown(self.controller.can_pass(now, acquire_count=args["count"]))
        return {**result, "latest_passed_time": self.controller.latest_passed_time}


class WarmUpReplay(StatisticNodeReplay):
    """`flow_warm_up`."""

    controller: WarmUpController

    def __init__(self, params: Args) -> None:
        super().__init__(params)
        self.controller = self.make_controller(params)
        expected = (params["warning_token"], params["max_token"], float(params["slope"]))
        made = self.controller
        assert (made.warning_token, made.max_token, made.slope) == expected

    def make_controller(self, params: Args) -> WarmUpController:
        return WarmUpController(
            params["count"], params["warm_up_period_sec"], params["cold_factor"]
        )

    def op_can_pass(self, now: int, args: Args) -> object:
        result = self.controller.can_pass(now, self.node, args["count"], args["prioritized"])
        return {
            **shown(result),
            "stored_tokens": self.controller.stored_tokens,
            "last_filled_time": self.controller.last_filled_time,
        }


class WarmUpRateLimiterReplay(WarmUpReplay):
    """`flow_warm_up_rate_limiter`."""

    controller: WarmUpRateLimiterController

    def make_controller(self, params: Args) -> WarmUpRateLimiterController:
        return WarmUpRateLimiterController(
            params["count"],
            params["warm_up_period_sec"],
            params["max_queueing_time_ms"],
            params["cold_factor"],
        )

    def op_can_pass(self, now: int, args: Args) -> object:
        result = super().op_can_pass(now, args)
        assert isinstance(result, dict)
        return {**result, "latest_passed_time": self.controller.latest_passed_time}
