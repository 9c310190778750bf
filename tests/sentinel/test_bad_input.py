"""What the structures of `distwindow.sentinel` refuse: the error names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from distwindow.errors import ConfigurationError
from distwindow.sentinel import (
    DefaultController,
    DegradeRule,
    FlowRule,
    RateLimiterController,
    SlotChain,
    StatisticNode,
    ThrottlingController,
    WarmUpController,
    WarmUpRateLimiterController,
)

NO_COUNT = [-1, -0.001, math.nan, math.inf, True, "10", None]
NO_WAIT = [-1, 0.5, math.nan, True, "500", None]


@pytest.mark.parametrize("count", NO_COUNT)
@pytest.mark.parametrize(
    "make",
    [
        DefaultController,
        lambda count: ThrottlingController(500, count),
        lambda count: RateLimiterController(500, count),
        lambda count: WarmUpController(count, 10),
        lambda count: WarmUpRateLimiterController(count, 10, 500),
        lambda count: FlowRule("a", count),
        lambda count: DegradeRule("a", count, time_window_s=1),
        lambda threshold: StatisticNode().try_occupy_next(1000, 1, threshold),
    ],
)
def test_a_threshold_has_to_be_a_finite_number_of_at_least_0(
    make: Callable[[Any], object], count: object
) -> None:
    with pytest.raises(ConfigurationError, match=r"\b(count|threshold) must be "):
        make(count)


@pytest.mark.parametrize("wait", NO_WAIT)
@pytest.mark.parametrize(
    "make",
    [
        lambda wait: ThrottlingController(wait, 10),
        lambda wait: RateLimiterController(wait, 10),
        lambda wait: WarmUpRateLimiterController(10, 10, wait),
        lambda wait: FlowRule("a", 10, max_queueing_time_ms=wait),
    ],
)
def test_a_longest_wait_has_to_be_whole_milliseconds_of_at_least_0(
    make: Callable[[Any], object], wait: object
) -> None:
    with pytest.raises(ConfigurationError, match="max_queueing_time_ms must be an int of at lea"):
        make(wait)


@pytest.mark.parametrize("count", [0.4, 0.49, 1e-9])
@pytest.mark.parametrize(
    "make",
    [
        lambda count: ThrottlingController(500, count),
        lambda count: FlowRule("a", count, control_behavior="rate_limiter"),
    ],
)
def test_a_pace_that_rounds_to_0_is_refused(make: Callable[[float], object], count: float) -> None:
    with pytest.raises(ConfigurationError, match=r"count must be 0 or at least 0\.5 to be paced"):
        make(count)


def test_a_pace_of_a_half_is_not() -> None:
    assert ThrottlingController(3000, 0.5).can_pass(1_700_000_000_000)
    assert ThrottlingController(0, 0).can_pass(1_700_000_000_000) == (False, 0, False)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: ThrottlingController(500, 10, 0), "stat_duration_ms must be an int of at least 1"),
    (lambda: ThrottlingController(500, 10).wait_ns(1), "this controller counts in ms"),
    (lambda: WarmUpController(10, 0), "warm_up_period_sec must be an int of at least 1, not 0"),
    (lambda: WarmUpController(10, 10, 1), "cold_factor must be an int of at least 2, not 1"),
    (lambda: WarmUpController(1e12, 10), "stores more than 2147483647 tokens"),
    (lambda: WarmUpRateLimiterController(0, 10, 500), "count must be above 0 to be paced"),
    (lambda: DefaultController(1, "qsp"), "grade must be 'qps' or 'thread', not 'qsp'"),  # type: ignore[arg-type]
    (lambda: StatisticNode(3, 1000), "interval_ms=1000 cannot be divided evenly into 3 buckets"),
    (lambda: StatisticNode(occupy_timeout_ms=-1), "occupy_timeout_ms must be an int of at lea"),
    (lambda: StatisticNode(statistic_max_rt=0), "statistic_max_rt must be an int of at least 1"),
    (lambda: FlowRule("", 1), "FlowRule: resource must be a name, not ''"),
    (lambda: FlowRule("a", 1, limit_app=" "), "FlowRule of 'a': limit_app must be a name"),
    (lambda: FlowRule("a", 1, grade="QPS"), "grade must be one of 'qps', 'thread', not 'QPS'"),  # type: ignore[arg-type]
    (lambda: FlowRule("a", 1, strategy=0), "strategy must be one of 'direct', 'relate', 'chain'"),  # type: ignore[arg-type]
    (lambda: FlowRule("a", 1, strategy="relate"), "ref_resource, for strategy 'relate', must be"),
    (lambda: FlowRule("a", 1, control_behavior="warm"), "control_behavior must be one of"),  # type: ignore[arg-type]
    (
        lambda: FlowRule("a", 1, grade="thread", control_behavior="rate_limiter"),
        "control_behavior 'rate_limiter' works with grade 'qps' only",
    ),
    (
        lambda: FlowRule("a", 1, control_behavior="warm_up", warm_up_period_sec=1),
        "stores no tokens above the warning line",
    ),
    (lambda: FlowRule("a", 1, cold_factor=1), "FlowRule of 'a': cold_factor must be an int of at"),
    (lambda: DegradeRule("a", 1, time_window_s=0), "DegradeRule of 'a': time_window_s must be"),
    (
        lambda: DegradeRule("a", 1.1, time_window_s=1, grade="error_ratio"),
        "DegradeRule of 'a': count must be between 0 and 1",
    ),
    (
        lambda: DegradeRule("a", 1, time_window_s=1, slow_ratio_threshold=math.nan),
        "DegradeRule of 'a': slow_ratio_threshold must be between 0 and 1",
    ),
    (lambda: DegradeRule("a", 1, time_window_s=1, grade="rt"), "grade must be one of 'slow_requ"),  # type: ignore[arg-type]
    (lambda: SlotChain([{"resource": "a"}]), "rules must be FlowRule and DegradeRule, not {'res"),  # type: ignore[list-item]
    (lambda: SlotChain([], max_resources=0), "max_resources must be an int of at least 1"),
    (lambda: SlotChain([]).enter(-1, "a"), "now must be an int of at least 0, not -1"),
    (lambda: SlotChain([]).enter(1.5, "a"), "now must be an int of at least 0, not 1.5"),  # type: ignore[arg-type]
    (lambda: SlotChain([]).enter(1, ""), "resource must be a name"),
    (lambda: SlotChain([]).enter(1, "a", context=""), "context must be a name"),
    (lambda: SlotChain([]).enter(1, "a", origin=None), "origin must be a name or empty, not None"),  # type: ignore[arg-type]
    (lambda: SlotChain([]).enter(1, "a", entry_type="in"), "entry_type must be 'IN' or 'OUT'"),  # type: ignore[arg-type]
    (lambda: SlotChain([]).enter(1, "a", count=-1), "count must be an int of at least 0, not -1"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_an_error_names_the_field_and_says_what_it_may_be(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make()
    assert message in str(raised.value)


def test_nothing_is_counted_before_time_0() -> None:
    node = StatisticNode()
    for add in (
        lambda: node.add_pass_request(-1, 1),
        lambda: node.add_rt_and_success(-1, 5, 1),
        lambda: node.add_waiting_request(-1, 1),
        lambda: node.add_occupied_pass(-1, 1),
    ):
        with pytest.raises(ConfigurationError, match="before time 0"):
            add()
    assert (node.pass_qps(-1), node.min_rt(-1), node.total_request(-1)) == (0.0, 5000.0, 0)
    assert (node.pass_qps(0), node.waiting(0), node.total_pass(0)) == (0.0, 0, 0)


def test_an_entry_is_exited_once_and_the_counts_stay_right() -> None:
    chain = SlotChain([FlowRule("a", 1, grade="thread")])
    entry = chain.enter(1000, "a")
    refused = chain.enter(1000, "a")
    assert refused.blocked_by == FlowRule("a", 1, grade="thread")
    with pytest.raises(ConfigurationError, match="cannot exit the call of 'a': it was blocked"):
        refused.exit(1000)
    entry.exit(1010)
    with pytest.raises(ConfigurationError, match="cannot exit the call of 'a': it has exited alre"):
        entry.exit(1020, error=True)
    node = chain.cluster_node("a")
    assert node is not None
    assert (node.cur_thread_num, node.total_success(1020), node.total_exception(1020)) == (0, 1, 0)
    assert chain.enter(1020, "a")
