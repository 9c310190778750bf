"""Laws of Sentinel's flow controllers: what they admit, and how calls are paced."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distwindow.sentinel.flow import (
    NS_PER_MS,
    DefaultController,
    RateLimiterController,
    ThrottlingController,
    WarmUpController,
    WarmUpRateLimiterController,
)
from distwindow.sentinel.nodes import StatisticNode, divide, round_half_up

ORIGIN = 1_700_000_000_123

rates = st.one_of(
    st.floats(0.5, 3000), st.sampled_from([1.0, 2.4, 10.0, 30.0, 999.5, 1000.0, 2500.0])
)
waits = st.sampled_from([0, 5, 100, 500, 2000])
arrivals = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 4)), max_size=40)


@given(st.floats(-1e18, 1e18))
@example(0.49999999999999994)
@example(-0.5)
@example(2.0**52 + 0.5)
def test_halves_are_rounded_up_and_nothing_else_is(value: float) -> None:
    assert round_half_up(value) == math.floor(Fraction(value) + Fraction(1, 2))


def test_rounding_and_dividing_what_is_not_finite_is_as_in_java() -> None:
    assert round_half_up(math.nan) == 0
    assert round_half_up(math.inf) == 2**63 - 1
    assert round_half_up(-math.inf) == -(2**63)
    assert divide(1.0, 0.0) == math.inf
    assert divide(-1.0, 0.0) == -math.inf
    assert math.isnan(divide(0.0, 0.0))
    assert math.isnan(divide(math.nan, 0.0))
    assert divide(1.0, 4.0) == 0.25


@given(rates, waits, arrivals)
def test_each_call_passes_its_own_cost_after_the_one_before(
    rate: float, max_wait_ms: int, calls: list[tuple[int, int]]
) -> None:
    controller = ThrottlingController(max_wait_ms, rate)
    per_ms = NS_PER_MS if controller.use_nano_seconds else 1
    now, last = ORIGIN, None
    for gap, count in calls:
        now += gap
        arrival = now * per_ms
        cost = round_half_up(1000.0 * per_ms * count / rate)
        if controller.use_nano_seconds:
            wait = controller.wait_ns(arrival, count)
        else:
            result = controller.can_pass(now, acquire_count=count)
            wait = result.wait_ms if result else None
        # The pass time is the earliest that keeps the distance: nobody waits longer than that.
        passes_at = arrival if last is None else max(arrival, last + cost)
        assert wait == (
            passes_at - arrival if passes_at - arrival <= max_wait_ms * per_ms else None
        )
        if wait is not None:
            last = passes_at
            assert controller.latest_passed_time == passes_at


@given(rates, waits, arrivals)
def test_the_pace_in_ms_is_that_in_ns_with_waits_rounded_up(
    rate: float, max_wait_ms: int, calls: list[tuple[int, int]]
) -> None:
    by_ms, by_ns = (ThrottlingController(max_wait_ms, rate) for _ in range(2))
    if not by_ms.use_nano_seconds:
        return
    now = ORIGIN
    for gap, count in calls:
        now += gap
        result, wait_ns = by_ms.can_pass(now, None, count), by_ns.wait_ns(now * NS_PER_MS, count)
        assert bool(result) is (wait_ns is not None)
        assert result.wait_ms == math.ceil(Fraction(wait_ns or 0, NS_PER_MS))


@given(st.floats(2001, 1e6), arrivals)
def test_the_legacy_limiter_limits_nothing_above_2000_per_second(
    rate: float, calls: list[tuple[int, int]]
) -> None:
    controller = RateLimiterController(0, rate)
    now = ORIGIN
    for gap, _ in calls:
        now += gap
        assert controller.can_pass(now) == (True, 0, False)


def test_the_legacy_cost_is_divided_before_it_is_multiplied() -> None:
    # As Sentinel computes it: 7.5 ms would be rounded up to 8, and 1000 / count is a little less.
    count = 133.33333333333334
    controller = RateLimiterController(100, count)
    assert [controller.can_pass(ORIGIN).wait_ms for _ in range(2)] == [0, 8]
    assert 1000 / count < 7.5 == 1 / count * 1000


@pytest.mark.parametrize(
    ("count", "duration_ms", "in_ns"),
    [
        (10, 1000, False),
        (30, 1000, True),  # 1000 / 30 is no whole number of ms
        (29.6, 1000, True),
        (1000, 1000, False),
        (1000.4, 1000, True),  # more than one per ms, although 1000 divides 1000
        (1000.4, 2000, False),
        (120, 60_000, False),
        (0, 1000, False),
    ],
)
def test_a_pace_is_kept_in_ns_where_ms_would_be_inexact(
    count: float, duration_ms: int, in_ns: bool
) -> None:
    assert ThrottlingController(0, count, duration_ms).use_nano_seconds is in_ns


@pytest.mark.parametrize("kind", [ThrottlingController, RateLimiterController])
def test_a_pace_of_0_refuses_all_but_calls_that_take_nothing(
    kind: type[ThrottlingController] | type[RateLimiterController],
) -> None:
    controller = kind(500, 0)
    assert not controller.can_pass(ORIGIN)
    assert controller.can_pass(ORIGIN, acquire_count=0)
    assert controller.latest_passed_time == -1


# -- DefaultController ------------------------------------------------------------------------


@given(st.floats(0, 30), arrivals, st.sampled_from([(1, 1000), (2, 1000), (10, 1000)]))
def test_the_passes_of_a_window_never_exceed_the_threshold(
    threshold: float, calls: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    node, controller = StatisticNode(*shape), DefaultController(threshold)
    now = ORIGIN
    for gap, count in calls:
        now += gap
        room = node.pass_qps(now) + count <= threshold
        result = controller.can_pass(now, node, count)
        assert result == (room, 0, False)
        if result:
            node.add_pass_request(now, count)
        assert node.pass_qps(now) <= threshold


@given(st.integers(0, 4), st.lists(st.booleans(), max_size=30))
def test_running_calls_never_exceed_the_threshold(limit: int, calls: list[bool]) -> None:
    node, controller = StatisticNode(), DefaultController(limit, "thread")
    for begins in calls:
        # Only a rate can borrow, so priority changes nothing here.
        if begins and controller.can_pass(ORIGIN, node, 1, True):
            node.increase_thread_num()
        elif node.cur_thread_num:
            node.decrease_thread_num()
        assert 0 <= node.cur_thread_num <= limit
    assert node.waiting(ORIGIN) == 0


# -- warm-up ----------------------------------------------------------------------------------

warm_ups = st.builds(WarmUpController, st.floats(1, 500), st.integers(2, 30), st.integers(2, 10))


@given(warm_ups)
def test_the_admitted_rate_falls_from_the_threshold_to_its_cold_part(
    controller: WarmUpController,
) -> None:
    if controller.max_token == controller.warning_token:
        return
    admitted = []
    for tokens in range(controller.warning_token, controller.max_token + 1):
        controller.stored_tokens = tokens
        admitted.append(controller.admitted_qps())
    assert admitted == sorted(admitted, reverse=True)
    assert admitted[0] == pytest.approx(controller.count)
    assert admitted[-1] == pytest.approx(controller.count / controller.cold_factor)
    if controller.warning_token:
        controller.stored_tokens = controller.warning_token - 1
        assert controller.admitted_qps() == controller.count


@given(warm_ups, st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 600)), max_size=40))
def test_tokens_stay_between_0_and_the_most_and_are_filled_once_a_second(
    controller: WarmUpController, seconds: list[tuple[int, int]]
) -> None:
    now = ORIGIN
    for gap, passed in seconds:
        now += gap
        tokens, filled = controller.stored_tokens, controller.last_filled_time
        controller.sync_token(now, passed)
        assert 0 <= controller.stored_tokens <= controller.max_token
        assert controller.last_filled_time == now - now % 1000
        if filled == controller.last_filled_time:
            assert controller.stored_tokens == tokens


@given(st.sampled_from([1, 10, 40]), st.integers(4, 10), st.integers(2, 4))
def test_a_resource_that_is_always_asked_becomes_warm_in_its_period(
    rate: int, period_s: int, cold_factor: int
) -> None:
    node, controller = StatisticNode(10, 1000), WarmUpController(rate * 10, period_s, cold_factor)
    now = ORIGIN - ORIGIN % 1000
    for second in range(3 * period_s):
        first = now + second * 1000
        for at in range(first, first + 1000, 20):
            while controller.can_pass(at, node):
                node.add_pass_request(at, 1)
        if second == 0:
            assert node.pass_qps(first + 999) <= rate * 10 / cold_factor + 1
    assert controller.stored_tokens < controller.warning_token
    assert node.previous_pass_qps(now + 3 * period_s * 1000) == rate * 10


def test_a_warm_up_without_tokens_refuses_every_call_and_the_paced_one_admits_every_call() -> None:
    node = StatisticNode()
    refusing, pacing = WarmUpController(1, 1), WarmUpRateLimiterController(1, 1, 0)
    for now in range(ORIGIN, ORIGIN + 5000, 500):
        assert not refusing.can_pass(now, node)
        assert pacing.can_pass(now, node) == (True, 0, False)
