"""`statistic_node` and `try_occupy_next`: Sentinel's StatisticNode."""

from __future__ import annotations

from distwindow.sentinel.nodes import StatisticNode

from .replay import Args
from .replay_leaparray import window


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
        node = self.node
        return {
            "pass_qps": node.pass_qps(now),
            "block_qps": node.block_qps(now),
            "total_qps": node.total_qps(now),
            "success_qps": node.success_qps(now),
            "exception_qps": node.exception_qps(now),
            "occupied_pass_qps": node.occupied_pass_qps(now),
            "avg_rt": node.avg_rt(now),
            "min_rt": node.min_rt(now),
            "max_success_qps": node.max_success_qps(now),
            "previous_pass_qps": node.previous_pass_qps(now),
            "previous_block_qps": node.previous_block_qps(now),
            "cur_thread_num": node.cur_thread_num,
            "total_request": node.total_request(now),
            "total_pass": node.total_pass(now),
            "block_request": node.block_request(now),
            "total_success": node.total_success(now),
            "total_exception": node.total_exception(now),
            "waiting": node.waiting(now),
        }

    def op_metrics(self, now: int, args: Args) -> object:
        return [
            [
                each.timestamp,
                each.passed,
                each.blocked,
                each.success,
                each.exception,
                each.rt,
                each.occupied_pass,
            ]
            for each in self.node.metrics(now)
        ]

    def op_second_list_all(self, now: int, args: Args) -> object:
        return [window(each) for each in self.node.second.all_windows()]
