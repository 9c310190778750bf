"""The controller that refuses at once (Sentinel `DefaultController`)."""

from __future__ import annotations

from typing import Literal, get_args

from ..core.errors import ConfigurationError
from .checks import check_threshold
from .statistic_node import StatisticNode
from .traffic_shaping import BLOCK, PASS, PassResult, TrafficShapingController

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

    __slots__ = ("count", "grade")

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
