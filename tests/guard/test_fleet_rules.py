"""What Sentinel's rules become for the fleet agrees with Sentinel's own classes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import AuthorityRule, Concurrency, ConfigurationError, DegradeRule, FlowRule, Limit
from distwindow.guard.rules import MAX_RUNNING, breaker_rule_of, limit_of, place_of, slots_of
from distwindow.sentinel.rules import breaker_of


@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        (FlowRule("r", 100), "100/second"),
        (FlowRule("r", 0.5), "1/2 seconds"),
        (FlowRule("r", 2.5), "5/2 seconds"),
        (FlowRule("r", 100, control_behavior="rate_limiter"), "100/second paced 500ms"),
        (FlowRule("r", 100, control_behavior="warm_up"), "100/second warmup 10s"),
        (
            FlowRule("r", 100, control_behavior="warm_up_rate_limiter", cold_factor=5),
            "100/second cold factor 5 warmup 10s paced 500ms",
        ),
    ],
)
def test_a_flow_rule_is_a_limit(rule: FlowRule, limit: str) -> None:
    assert limit_of(rule) == Limit(limit)


def test_a_flow_rule_about_running_calls_is_a_number_of_slots() -> None:
    assert slots_of(FlowRule("r", 20.0, grade="thread")) == 20


COUNTS = [0, 0.001, 0.3, 1 / 3, 1, 2, 60, 2.001, 10**6 + 1, 10**7 + 1, 1e9 + 0.5, 1e12, 1e13, 1e300]
INTS = [0, 1, 2, 3, 100, 101, 3599, 86_400, 86_401, 86_400_001, 604_801, 604_800_001]
INTS += [10**13, 10**14]
DEGRADE_CHANGES: list[dict[str, Any]] = [
    *[{field: count} for field in ("count", "slow_ratio_threshold") for count in COUNTS],
    *[
        {field: value}
        for field in ("time_window_s", "min_request_amount", "stat_interval_ms")
        for value in INTS
    ],
]
CASES: list[tuple[Any, dict[str, Any]]] = [
    *[
        (FlowRule, {"count": count, "control_behavior": behavior, **changed})
        for count in COUNTS
        for behavior in ("default", "rate_limiter", "warm_up", "warm_up_rate_limiter")
        for changed in [
            {},
            *[
                {field: value}
                for field in ("warm_up_period_sec", "cold_factor", "max_queueing_time_ms")
                for value in INTS
            ],
        ]
    ],
    *[(FlowRule, {"count": count, "grade": "thread"}) for count in COUNTS],
    *[
        (DegradeRule, {"count": 1, "time_window_s": 1, "grade": grade, **changed})
        for grade in ("slow_request_ratio", "error_ratio", "error_count")
        for changed in DEGRADE_CHANGES
    ],
]


def test_an_error_names_a_field_of_the_rule_and_nothing_that_it_has_not() -> None:
    """Such as `max_wait` of the limit, or `open_for` of the breaker, that the rule becomes."""
    refused = 0
    for kind, fields in CASES:
        try:
            place_of(kind("r", **fields))
        except ConfigurationError as exc:
            refused += 1
            text = str(exc)
        else:
            continue
        name, _, message = text.partition(": ")
        names = {field.name for field in dataclasses.fields(kind)}
        words = set(re.findall(r"\w+", message))
        assert name == f"{kind.__name__} of 'r'"
        assert words & names, text
        assert set(re.findall(r"(\w+)=", message)) <= names, text
        assert not words & {"amount", "stat_duration_ms", "max_wait", "open_for"}, text
    assert 0 < refused < len(CASES)


def test_the_most_running_calls_are_those_of_a_concurrency_limit() -> None:
    Concurrency("memory://", slots_of(FlowRule("r", MAX_RUNNING, grade="thread")))
    with pytest.raises(ConfigurationError):
        Concurrency("memory://", MAX_RUNNING + 1)
    with pytest.raises(ConfigurationError, match=r"count=1000001 is above 1000000"):
        slots_of(FlowRule("r", MAX_RUNNING + 1, grade="thread"))


THRESHOLDS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 2 / 3, 0.9]), st.floats(0, 0.999))


ERRORS = st.one_of(
    st.tuples(st.just("error_ratio"), THRESHOLDS),
    st.tuples(st.just("error_count"), st.integers(0, 6)),
)


@given(ERRORS, st.integers(1, 8), st.lists(st.booleans(), max_size=30))
def test_errors_open_it_where_sentinel_opens(
    of_errors: tuple[Any, float], min_calls: int, errors: list[bool]
) -> None:
    grade, count = of_errors
    rule = DegradeRule("r", count, grade=grade, time_window_s=1, min_request_amount=min_calls)
    _agrees(rule, [(1, error) for error in errors], errors)


@given(
    st.one_of(THRESHOLDS, st.just(1.0)),
    st.integers(1, 8),
    st.lists(st.integers(45, 55), max_size=30),
)
def test_a_ratio_of_slow_calls_opens_where_sentinel_opens(
    ratio: float, min_calls: int, rts_ms: list[int]
) -> None:
    rule = DegradeRule(
        "r", 50, time_window_s=1, min_request_amount=min_calls, slow_ratio_threshold=ratio
    )
    made = breaker_rule_of(rule)
    bad = [made.is_bad(False, rt_ms / 1000) for rt_ms in rts_ms]
    _agrees(rule, [(rt_ms, False) for rt_ms in rts_ms], bad)


def _agrees(rule: DegradeRule, calls: list[tuple[int, bool]], bad: list[bool]) -> None:
    """After each call of one interval, both are open or both are closed."""
    made, oracle = breaker_rule_of(rule), breaker_of(rule)
    for number, (rt_ms, error) in enumerate(calls, 1):
        oracle.on_request_complete(1000, rt_ms=rt_ms, error=error)
        is_open = oracle.state == "open"
        assert made.reached_by([(number, sum(bad[:number]))]) == is_open
        if is_open:
            return


@pytest.mark.parametrize(
    ("strategy", "origin", "allowed"),
    [
        ("allow", "a", True), ("allow", "b", True), ("allow", "c", False), ("allow", "", True),
        ("deny", "a", False), ("deny", "b", False), ("deny", "c", True), ("deny", "", True),
        ("allow", "a,b", False), ("allow", "ab", False),
    ],
)  # fmt: skip
def test_an_authority_rule_lists_whole_origins(strategy: str, origin: str, allowed: bool) -> None:
    rule = AuthorityRule("r", "a, b", strategy)  # type: ignore[arg-type]  # parametrized
    assert rule.allows(origin) is allowed
