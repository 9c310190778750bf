"""`statistic_node` and `try_occupy_next`: Sentinel's StatisticNode."""

from __future__ import annotations

from distwindow.sentinel.nodes import StatisticNode

from .replay import Args, figures, listed
from .replay_leaparray import NODE, window

READ = (
    "pass_qps block_qps total_qps success_qps exception_qps occupied_pass_qps avg_rt min_rt "
    "max_success_qps previous_pass_qps previous_block_qps cur_thread_num total_request total_pass "
    "block_request total_success total_exception waiting"
)


def node_of(params: Args) -> StatisticNode:
    """A new node with the settings of a file."""
    return StatisticNode(
        params["second_sample_count"],
        params["second_interval_ms"],
        occupy_timeout_ms=params["occupy_timeout_ms"],
        # The traces of the flow controllers keep Sentinel's default.
        statistic_max_rt=params.get("statistic_max_rt", 5000),
    )


class StatisticNodeReplay:
    """One node. The controllers' replays have the same operations on their node."""

    def __init__(self, params: Args) -> None:
        self.node = node_of(params)

    def op_add_pass(self, now: int, args: Args) -> None:
        self.node.add_pass_request(now, args["n"])

    def op_add_block(self, now: int, args: Args) -> None:
        self.node.increase_block_qps(now, args["n"])

    def op_add_exception(self, now: int, args: Args) -> None:
        self.node.increase_exception_qps(now, args["n"])

    def op_add_rt_and_success(self, now: int, args: Args) -> None:
        self.node.add_rt_and_success(now, args["rt"], args["n"])

    def op_add_occupied_pass(self, now: int, args: Args) -> None:
        self.node.add_occupied_pass(now, args["n"])

    def op_add_waiting(self, now: int, args: Args) -> None:
        self.node.add_waiting_request(args["t"], args["n"])

    def op_inc_thread(self, now: int, args: Args) -> None:
        self.node.increase_thread_num()

    def op_dec_thread(self, now: int, args: Args) -> None:
        self.node.decrease_thread_num()

    def op_reset(self, now: int, args: Args) -> None:
        self.node.reset()

    def op_waiting(self, now: int, args: Args) -> object:
        return self.node.waiting(now)

    def op_try_occupy_next(self, now: int, args: Args) -> object:
        return self.node.try_occupy_next(
            args["current_time"], args["acquire_count"], args["threshold"]
        )

    def op_read(self, now: int, args: Args) -> object:
        return figures(self.node, READ, now)

    def op_metrics(self, now: int, args: Args) -> object:
        return listed(self.node.metrics(now), NODE)

    def op_second_list_all(self, now: int, args: Args) -> object:
        return [window(each) for each in self.node.second.all_windows()]
