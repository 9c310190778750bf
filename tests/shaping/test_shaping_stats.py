"""Laws of what statistics say of a limit that is paced or warms up: they agree with what the next
call is told.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter
from distwindow.shaping.shaping import Shaping, ShapingState, shaping_of, shaping_stats
from distwindow.testing import ManualClock

MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
T0 = 1_700_000_000_123

gaps = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 30_000)), min_size=1, max_size=40)
paced = st.builds(
    Limit,
    st.integers(1, 300),
    st.sampled_from([0.1, 1.0, 60.0]),
    max_wait=st.sampled_from([0.0, 0.5, 100.0]),
)
warming = st.builds(
    Limit,
    st.integers(10, 300),
    st.sampled_from([0.1, 1.0, 3.0]),
    max_wait=st.sampled_from([None, 0.5, 100.0]),
    warmup=st.sampled_from([3.0, 20.0]),
)


@MANY
@given(st.one_of(paced, warming), gaps)
def test_the_next_call_waits_for_the_backlog_and_one_step_more(
    limit: Limit, elapsed: list[int]
) -> None:
    assume(limit.max_wait_ms is not None)
    clock = ManualClock(T0)
    limiter = Limiter("memory://", limit, time=clock)
    for ms in elapsed:
        clock.advance(ms / 1000)
        limiter.try_acquire("k")
        shaping, peeked = limiter.stats("k").windows[0].shaping, limiter.peek("k")
        assert shaping is not None
        assert shaping.pace_ms == limit.interval_ms / shaping.rate
        if shaping.promised_until_ms is None:
            assert shaping.backlog_ms == 0
            continue
        assert shaping.promised_until_ms == clock.now_ms() + math.ceil(shaping.backlog_ms)
        wait_ms = shaping.backlog_ms + shaping.pace_ms
        if peeked.allowed:
            assert peeked.wait * 1000 == pytest.approx(wait_ms, abs=0.002)
        else:
            assert wait_ms > (limit.max_wait_ms or 0) - 0.002


@MANY
@given(warming, gaps)
def test_the_rate_is_what_an_empty_window_admits(limit: Limit, elapsed: list[int]) -> None:
    assume(limit.max_wait_ms is None)
    clock = ManualClock(T0)
    limiter = Limiter("memory://", limit, time=clock)
    for ms in elapsed:
        clock.advance(ms / 1000)
        limiter.try_acquire("k")
        window, left = limiter.stats("k").windows[0], limiter.peek("k").remaining
        assert window.shaping is not None
        assert left == max(0, math.floor(window.shaping.rate) - window.passed)
        tokens, warning = window.shaping.stored_tokens, window.shaping.warning_tokens
        assert tokens is not None
        assert warning is not None
        assert (window.shaping.rate == limit.amount) == (tokens <= warning)
        assert tokens <= (window.shaping.max_tokens or 0)
        assert (window.shaping.pace_ms, window.shaping.backlog_ms) == (None, 0)


@MANY
@given(st.one_of(paced, warming), gaps)
def test_it_makes_no_difference_when_an_expired_state_is_deleted(
    limit: Limit, elapsed: list[int]
) -> None:
    shaping: Shaping = shaping_of(limit, limit.max_wait_ms)
    state: ShapingState | None = None
    now = T0
    for ms in elapsed:
        now += ms
        kept = None if state is not None and now >= state.expires_at_ms else state
        assert shaping_stats(limit, kept, now) == shaping_stats(limit, state, now)
        current = shaping.at(state, now)
        wait_us = shaping.wait_us(current, shaping.rate(current), 1, now)
        if wait_us <= shaping.max_wait_us:
            state = shaping.admitted(current, 1, now, wait_us)


def test_a_plain_limit_has_none() -> None:
    limiter = Limiter("memory://", ["10/second", "100/minute paced 5s"], time=ManualClock(T0))
    plain, shaped = limiter.stats("k").windows
    assert plain.shaping is None
    assert shaped.shaping is not None
