"""Laws of pacing and warm-up: the pace is exact, the warm-up is Sentinel's, and no call waits for
longer than `max_wait`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limit
from distwindow.ring.commands import charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.key import shaping_name
from distwindow.ring.limit import Bound
from distwindow.ring.replies import AcquireReply
from distwindow.ring.ring import Ring
from distwindow.sentinel.flow import (
    ThrottlingController,
    WarmUpController,
    WarmUpRateLimiterController,
)
from distwindow.sentinel.nodes import StatisticNode
from distwindow.shaping.commands import AcquireShaped, PeekShaped
from distwindow.shaping.shaping import Shaping, ShapingState, shaping_of
from distwindow.stores.memory import MemoryStore

T0 = 1_700_000_000_123
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)

gaps = st.one_of(st.integers(0, 3), st.integers(0, 400), st.integers(0, 4000))
arrivals = st.lists(st.tuples(gaps, st.integers(1, 4)), min_size=1, max_size=60)
waits_ms = st.sampled_from([0, 1, 5, 100, 500, 2000])
factors = st.integers(2, 6)


def limit_or_reject(*args: Any, **terms: Any) -> Limit:
    """Return the limit; reject the example where a limit can not have these terms."""
    try:
        return Limit(*args, **terms)
    except ConfigurationError:
        assume(False)
        raise


class OneKey:
    """A key of a `MemoryStore`, called at given times."""

    def __init__(self, *limits: Limit) -> None:
        self.limits = limits
        self.values: dict[bytes, Any] = {}
        self.execute = MemoryStore(values=self.values).execute

    def charges(self, cost: int) -> tuple[Charge, ...]:
        return charges_of("k", b"p:{k}", self.limits, cost)

    def acquire(self, now: int, cost: int = 1) -> AcquireReply:
        return self.execute(AcquireShaped(self.charges(cost), now))

    def peek(self, now: int) -> AcquireReply:
        return self.execute(PeekShaped(self.charges(1), now))

    def state(self, limit: Limit | None = None) -> ShapingState:
        ring = charges_of("k", b"p:{k}", [limit or self.limits[0]], 1)[0].ring
        state: ShapingState = self.values[shaping_name(ring)]
        return state

    @property
    def shapings(self) -> dict[bytes, ShapingState]:
        """What is stored beside the rings."""
        return {name: v for name, v in self.values.items() if isinstance(v, ShapingState)}


# -- pacing ---------------------------------------------------------------------------------------


@MANY
@given(
    st.integers(1, 10_000),
    st.sampled_from([1, 250, 1000, 7000, 60_000, 86_400_000]),
    waits_ms,
    arrivals,
)
@example(3, 1000, 2000, [(0, 1)] * 7)
@example(7000, 1000, 500, [(0, 1)] * 40)
@example(10_000_000, 86_400_000, 500, [(0, 4)] * 40)
def test_each_call_proceeds_exactly_its_cost_after_the_one_before(
    amount: int, interval_ms: int, max_wait_ms: int, calls: list[tuple[int, int]]
) -> None:
    key = OneKey(Limit(amount, per=interval_ms / 1000, max_wait=max_wait_ms / 1000))
    now, last = T0, None
    moments: list[tuple[Fraction, int]] = []
    for gap, asked in calls:
        now, cost = now + gap, min(asked, amount)
        arrived = Fraction(now * 1000)
        moment = arrived
        if last is not None:
            moment = max(arrived, last + Fraction(cost * interval_ms * 1000, amount))
        wait = moment - arrived
        reply = key.acquire(now, cost)
        assert reply.admitted == (wait <= max_wait_ms * 1000)
        if not reply.admitted:
            continue
        assert reply.wait_us == math.ceil(wait) <= max_wait_ms * 1000
        last = moment
        state = key.state()
        assert state.moment_us is not None
        assert state.moment_us + Fraction(state.moment_rest, amount) == moment
        moments.append((moment, cost))
    # So in no time is more admitted than the pace allows: what follows a call up to another takes
    # at least its cost at that pace.
    for at, (first, _) in enumerate(moments):
        admitted = 0
        for then, cost in moments[at + 1 :]:
            admitted += cost
            assert admitted * Fraction(interval_ms * 1000, amount) <= then - first


@MANY
@given(st.sampled_from([1, 2, 5, 10, 50, 100, 1000]), waits_ms, arrivals)
def test_pacing_is_sentinels_where_that_counts_in_whole_ms(
    amount: int, max_wait_ms: int, calls: list[tuple[int, int]]
) -> None:
    key = OneKey(Limit(amount, per=1.0, max_wait=max_wait_ms / 1000))
    sentinel = ThrottlingController(max_wait_ms, amount)
    assert not sentinel.use_nano_seconds
    now = T0
    for gap, asked in calls:
        now, cost = now + gap, min(asked, amount)
        result, reply = sentinel.can_pass(now, None, cost), key.acquire(now, cost)
        assert (bool(reply.admitted), reply.wait_us) == (result.passed, result.wait_ms * 1000)


@MANY
@given(st.tuples(st.integers(1, 300), waits_ms), st.tuples(st.integers(1, 300), waits_ms), arrivals)
def test_of_two_paces_both_are_kept_and_the_longer_wait_counts(
    one: tuple[int, int], two: tuple[int, int], calls: list[tuple[int, int]]
) -> None:
    limits = [
        Limit(amount, per=interval, max_wait=wait / 1000)
        for (amount, wait), interval in ((one, 1.0), (two, 60.0))
    ]
    key, now = OneKey(*limits), T0
    proceeded: list[tuple[int, int]] = []
    for gap, asked in calls:
        now += gap
        cost = min(asked, *[limit.amount for limit in limits])
        reply = key.acquire(now, cost)
        if reply.admitted:
            assert reply.wait_us is not None
            assert reply.wait_us <= max(limit.max_wait_ms or 0 for limit in limits) * 1000
            proceeded.append((now * 1000 + reply.wait_us, cost))
    for (before, _), (after, cost) in pairwise(proceeded):
        for limit in limits:
            step = Fraction(cost * limit.interval_ms * 1000, limit.amount)
            assert after - before > step - 1, "waits are rounded up to one us"


# -- warm-up --------------------------------------------------------------------------------------


@MANY
@given(st.integers(2, 300), st.integers(1, 30), factors, st.data())
@example(100, 10, 3, None)
def test_warm_up_is_sentinels(amount: int, warmup_s: int, factor: int, data: Any) -> None:
    """Every decision is that of `WarmUpController`, with two exceptions. After a gap of twice the
    warm-up a limit is cold; Sentinel never cools down at its warning line, and may not above it.
    And a cold limit admits `amount / cold_factor`, where Sentinel's rounding may leave less.
    """
    limit = limit_or_reject(amount, 1.0, 2, warmup=float(warmup_s), cold_factor=factor)
    calls = [(40, 1)] * 400
    if data is not None:
        cold = math.floor(shaping_of(limit, None).coldest_rate())
        calls = data.draw(
            st.lists(
                st.tuples(
                    st.one_of(st.integers(0, 30), st.integers(0, 2000 * warmup_s)),
                    st.integers(1, cold),
                ),
                max_size=200,
            )
        )
    key, now = OneKey(limit), T0
    sentinel, node = WarmUpController(amount, warmup_s, factor), StatisticNode()
    sentinel.sync_token(now, 0)
    assume(sentinel.admitted_qps() >= amount / factor)
    for gap, cost in calls:
        now += gap
        expected = sentinel.can_pass(now, node, cost).passed
        if expected:
            node.add_pass_request(now, cost)
        reply = key.acquire(now, cost)
        assert (bool(reply.admitted), reply.admitted and reply.wait_us) == (expected, 0)
        if reply.admitted:
            assert key.state().tokens == sentinel.stored_tokens * 1000
            assert reply.left == math.floor(sentinel.admitted_qps()) - node.pass_qps(now)


@MANY
@given(st.integers(1, 3000), st.integers(1, 30), factors, waits_ms, arrivals)
@example(100, 10, 3, 500, [(5, 1)] * 400)
def test_the_warm_pace_is_sentinels(
    amount: int, warmup_s: int, factor: int, max_wait_ms: int, calls: list[tuple[int, int]]
) -> None:
    """Tokens and rates are those of `WarmUpRateLimiterController`, and a call proceeds its cost at
    that rate after the one before. (Sentinel then rounds the cost to ms, which is not done here.)
    """
    limit = limit_or_reject(
        amount, 1.0, warmup=float(warmup_s), cold_factor=factor, max_wait=max_wait_ms / 1000
    )
    key, now = OneKey(limit), T0
    sentinel = WarmUpRateLimiterController(amount, warmup_s, max_wait_ms, factor)
    node, last = StatisticNode(), None
    for gap, asked in calls:
        now, cost = now + gap, min(asked, amount)
        sentinel.sync_token(now, int(node.previous_pass_qps(now)))
        rate = Fraction(max(amount / factor, min(float(amount), sentinel.admitted_qps())))
        reply = key.acquire(now, cost)
        moment = Fraction(now * 1000)
        if last is not None:
            moment = max(moment, last + Fraction(cost * 1_000_000) / rate)
        wait = moment - now * 1000
        # Below 1 us: the rounding of a rate that is not warm, never in favour of the caller.
        if reply.admitted:
            assert reply.wait_us is not None
            assert wait - Fraction(1, 10**4) <= reply.wait_us < wait + 2
            assert reply.wait_us <= max_wait_ms * 1000
            node.add_pass_request(now, cost)
            state = key.state()
            assert state.tokens == sentinel.stored_tokens * 1000
            assert state.moment_us is not None
            last = state.moment_us + Fraction(state.moment_rest, amount)
        else:
            assert wait > max_wait_ms * 1000 - 2


@pytest.mark.slow
@settings(MANY, max_examples=20)
@given(
    st.integers(2, 50),
    st.sampled_from([100, 300, 1000, 5000, 60_000]),
    factors,
    st.sampled_from(["leap", "strict"]),
)
@example(100, 1000, 3, "leap")
@example(3, 100, 2, "leap")
@example(2, 60_000, 2, "leap")
def test_a_limit_warms_up_under_demand_and_is_cold_again_after_idle_time(
    amount: int, interval_ms: int, factor: int, bound: Bound
) -> None:
    warmup_s = 10 * max(1.0, interval_ms / 1000)
    limit = limit_or_reject(
        amount, interval_ms / 1000, None, bound, warmup=warmup_s, cold_factor=factor
    )
    key, now = OneKey(limit), T0
    cold = math.floor(shaping_of(limit, None).coldest_rate())
    assert cold == amount // factor
    assert key.peek(now).left == cold
    step_ms = interval_ms // 20
    ends = now + 10 * int(warmup_s * 1000)
    key.acquire(now)
    while now < ends and math.floor(shaping_of(limit, None).rate(key.state())) < amount:
        while key.acquire(now).admitted:
            pass
        now += step_ms
    assert math.floor(shaping_of(limit, None).rate(key.state())) == amount, "it has not warmed up"
    now += int(2.5 * warmup_s * 1000)
    assert key.peek(now).left == cold


# -- both -----------------------------------------------------------------------------------------

shaped_limits = st.builds(
    limit_or_reject,
    st.integers(2, 200),
    st.sampled_from([0.1, 1.0, 3.0, 60.0]),
    st.sampled_from([1, 2, 10]),
    st.sampled_from(["leap", "strict"]),
    max_wait=st.sampled_from([None, 0.0, 0.05, 1.0]),
    warmup=st.sampled_from([None, 3.0, 30.0]),
).filter(lambda limit: limit.is_shaped)


def most_of(limit: Limit) -> int:
    """Return the greatest cost that a call may have."""
    if limit.max_wait_ms is not None:
        return limit.amount
    return math.floor(shaping_of(limit, None).coldest_rate())


@MANY
@given(shaped_limits, arrivals)
def test_a_refused_call_is_admitted_at_its_retry_time_and_not_before(
    limit: Limit, calls: list[tuple[int, int]]
) -> None:
    key, now = OneKey(limit), T0
    for gap, asked in calls:
        now += gap
        cost = min(asked * 7, most_of(limit))
        reply = key.acquire(now, cost)
        if reply.admitted:
            continue
        assert 0 < reply.retry_ms <= reply.reset_ms

        def admits(at: int, cost: int = cost) -> bool:
            twin = OneKey(limit)
            twin.execute = key_copy(key)
            return bool(twin.acquire(at, cost).admitted)

        assert admits(now + reply.retry_ms)
        # Not before, at any of eight moments. (Whoever is refused also opens the next period, so
        # each moment is asked of a store of its own.)
        for part in range(8):
            assert not admits(now + reply.retry_ms * part // 20)


def key_copy(key: OneKey) -> Any:
    """Return `execute` of a store with a copy of what the store of `key` holds."""
    copies = {
        name: value.copy() if isinstance(value, Ring) else value
        for name, value in key.values.items()
    }
    return MemoryStore(values=copies).execute


@MANY
@given(shaped_limits, st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 4)), max_size=40))
def test_it_makes_no_difference_when_an_expired_state_is_deleted(
    limit: Limit, calls: list[tuple[int, int]]
) -> None:
    kept, dropped, now = OneKey(limit), OneKey(limit), T0
    for gap, asked in calls:
        now, cost = now + gap, min(asked, most_of(limit))
        for name in [n for n, state in dropped.shapings.items() if state.expires_at_ms <= now]:
            del dropped.values[name]
        assert kept.acquire(now, cost) == dropped.acquire(now, cost)


@MANY
@given(shaped_limits, arrivals)
def test_a_peek_is_the_decision_of_the_next_call_and_changes_nothing(
    limit: Limit, calls: list[tuple[int, int]]
) -> None:
    key, now = OneKey(limit), T0
    for gap, _ in calls:
        now += gap
        before = key.shapings
        seen = key.peek(now)
        assert key.shapings == before
        reply = key.acquire(now)
        assert (seen.admitted, seen.wait_us, seen.retry_ms) == (
            reply.admitted,
            reply.wait_us,
            reply.retry_ms,
        )


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_the_next_double_is_computed_by_a_sum_in_lua(x: float) -> None:
    unit = 2.0**-53
    assert x + x * (unit * (1 + 2 * unit)) == math.nextafter(x, math.inf)


def test_the_shaping_of_a_limit_is_made_once() -> None:
    limit = Limit("100/second paced 500ms")
    assert shaping_of(limit, 500) is shaping_of(Limit(str(limit)), 500)
    assert isinstance(shaping_of(limit, 10), Shaping)
