"""The fleet's adaptive breaker with one process is go-zero's, which replays golden traces; with
several, every call is counted once, and the forced pass is the fleet's.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    BreakerOpen,
    ConfigurationError,
    ErrorCount,
)
from distwindow.breaker.record import AdaptiveRecord
from distwindow.sentinel.google_breaker import GoogleBreaker
from tests.breaker.test_breaker_fleet import LossyStore
from tests.clock_and_stores import T0, ManualClock

START = T0 // 10_000 * 10_000
DRAWS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.001, 0.5, 0.999]))
ELAPSED_MS = st.sampled_from([0, 0, 0, 1, 30, 120, 249, 250, 251, 1000, 1001, 2500, 11_000])


class Draw:
    value = 0.0

    def __call__(self) -> float:
        return self.value


def let_through(breaker: AdaptiveBreaker, outcome: str) -> bool:
    try:
        with breaker.call("k"):
            if outcome == "failure":
                raise OSError
    except BreakerOpen:
        return False
    except OSError:
        pass
    return True


@settings(deadline=None, max_examples=80)
@given(
    history=st.lists(
        st.tuples(ELAPSED_MS, st.sampled_from(["failure"] * 4 + ["success"]), DRAWS),
        min_size=20,
        max_size=120,
    )
)
def test_one_process_does_what_go_zero_does(history: list[tuple[int, str, float]]) -> None:
    clock, draw = ManualClock(START), Draw()
    local = GoogleBreaker(START, draw=draw)
    breaker = AdaptiveBreaker("memory://", draw=draw, time=clock)
    for elapsed_ms, outcome, draw.value in history:
        clock.move(elapsed_ms)
        now = clock.now_ms()
        expected = local.allow(now)
        assert let_through(breaker, outcome) is expected
        if expected:
            local.mark_failure(now) if outcome == "failure" else local.mark_success(now)


def fleet(number: int) -> tuple[ManualClock, LossyStore, list[AdaptiveBreaker]]:
    clock = ManualClock(START)
    store = LossyStore(clock)
    breakers = [AdaptiveBreaker(store, draw=lambda: 0.0, time=clock) for _ in range(number)]
    return clock, store, breakers


def records(store: LossyStore) -> list[AdaptiveRecord]:
    """Return what is stored of each breaker."""
    return [v for v in store._values.by_name.values() if isinstance(v, AdaptiveRecord)]


@settings(deadline=None, max_examples=100)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["success", "failure", "tick", "wait"])),
        max_size=60,
    ),
    faults=st.lists(st.sampled_from(["", "", "request lost", "reply lost"]), max_size=20),
)
def test_every_call_is_counted_once(history: list[tuple[int, str]], faults: list[str]) -> None:
    clock, store, breakers = fleet(3)
    store.faults = faults
    expected = {"success": 0, "failure": 0, "drop": 0}
    for which, action in history[:30]:  # within one window
        if action == "wait":
            clock.move(250)
        elif action == "tick":
            _flush(breakers[which])
        else:
            expected[action if let_through(breakers[which], action) else "drop"] += 1
    store.faults = []
    for breaker in [*breakers, *breakers]:
        _flush(breaker)
    counted = {"success": 0, "failure": 0, "drop": 0}
    for record in records(store):
        for counts in record.window(250, 40, clock.now_ms()):
            for name in counted:
                counted[name] += getattr(counts, name)
    assert counted == expected


def test_what_the_store_refuses_is_counted_later() -> None:
    clock, store, (breaker,) = fleet(1)
    assert let_through(breaker, "failure")
    store.refused = b""
    for _ in range(5):
        clock.move(250)
        assert let_through(breaker, "success")
        _flush(breaker)
    store.refused = None
    for _ in range(2):
        _flush(breaker)
    (record,) = records(store)
    assert sum(counts.calls for counts in record.window(250, 40, clock.now_ms())) == 6


def test_the_failures_of_all_processes_drop_the_calls_of_each() -> None:
    clock, _, breakers = fleet(4)
    for _ in range(5):
        for breaker in breakers:
            let_through(breaker, "failure")
    for _ in range(2):
        clock.move(250)
        for breaker in breakers:
            _flush(breaker)
    clock.move(1)  # what is known is older than the sync interval
    assert not any(let_through(breaker, "failure") for breaker in breakers)
    assert all(breaker.drop_probability("k") > 0.5 for breaker in breakers)


def test_the_forced_pass_is_the_fleets() -> None:
    clock, _, breakers = fleet(5)
    for breaker in breakers:
        for _ in range(6):
            let_through(breaker, "failure")
    passes = 0
    breakers[0]._states._algorithm.draw = lambda: 1.0  # type: ignore[attr-defined]  # the first pass
    let_through(breakers[0], "failure")
    breakers[0]._states._algorithm.draw = lambda: 0.0  # type: ignore[attr-defined]
    for _ in range(40):  # ten seconds
        clock.move(250)
        for breaker in breakers:
            passes += let_through(breaker, "failure")
            _flush(breaker)
    # More than a second lies between two: with a tick of 250 ms at least 1.25 s.
    assert 7 <= passes <= 8


def test_a_process_that_never_passed_claims_the_pass_when_the_others_stop() -> None:
    clock, _, (passes, waits) = fleet(2)
    for breaker in (passes, waits):
        for _ in range(6):
            let_through(breaker, "failure")
        _flush(breaker)
    passes._states._algorithm.draw = lambda: 1.0  # type: ignore[attr-defined]  # its calls pass
    assert let_through(passes, "failure")
    _flush(passes)
    let_through_again = []
    for _ in range(8):  # two seconds
        clock.move(250)
        let_through_again.append(let_through(waits, "failure"))
        _flush(waits)
    assert sum(let_through_again) == 1


def test_a_refresh_that_was_overtaken_is_not_taken() -> None:
    clock, store, (breaker, other) = fleet(2)
    assert let_through(breaker, "success")
    _flush(breaker)
    states: Any = breaker._states
    state = states.get_or_create("k")
    (refresh,) = states.outgoing_of(state)
    sent_at, overtaken = clock.monotonic(), store.execute(refresh.command)
    for _ in range(20):
        let_through(other, "failure")
    _flush(other)
    clock.move(250)
    let_through(breaker, "success")
    _flush(breaker)
    refresh.on_reply(overtaken, sent_at)
    assert states.drop_probability(state) > 0.5


def test_it_recovers() -> None:
    clock, _, (breaker,) = fleet(1)
    for _ in range(50):
        let_through(breaker, "failure")
    assert not let_through(breaker, "success")
    clock.move(11_000)
    assert let_through(breaker, "success")
    assert breaker.drop_probability("k") == 0


def _flush(breaker: AdaptiveBreaker) -> None:
    try:
        breaker.flush()
    except Exception as exc:
        assert "lost" in str(exc) or "refuses" in str(exc)  # noqa: PT017 - it is sent again at the next tick


@pytest.mark.parametrize("made", [AdaptiveBreaker, AsyncAdaptiveBreaker])
def test_k_may_be_given_without_its_name(made: Any) -> None:
    assert repr(made("memory://", 2.5)) == repr(made("memory://", k=2.5))
    assert repr(made("memory://", 2.5)) != repr(made("memory://"))
    with pytest.raises(ConfigurationError, match="k must be a number, not ErrorCount"):
        made("memory://", ErrorCount(5))
