"""The terms of a limit that is paced or warms up: strings, keywords, and bad input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limit, Limiter
from distwindow.core.limit import parse_limits

seconds = st.one_of(
    st.integers(0, 86_400).map(float), st.integers(0, 86_400_000).map(lambda ms: ms / 1000)
)


@given(
    st.integers(1, 10**7),
    st.sampled_from([0.1, 1.0, 60.0, 7200.0]),
    st.sampled_from([("leap", None), ("strict", None), ("leap", 5)]),
    st.none() | seconds,
    st.none() | seconds,
    st.none() | st.integers(2, 100),
)
def test_str_round_trips(
    amount: int,
    per: float,
    ring: tuple[Any, int | None],
    max_wait: float | None,
    warmup: float | None,
    factor: int | None,
) -> None:
    try:
        limit = Limit(
            amount, per, ring[1], ring[0], max_wait=max_wait, warmup=warmup, cold_factor=factor
        )
    except ConfigurationError:
        assume(False)
        raise
    assert Limit(str(limit)) == limit
    assert eval(repr(limit), {"Limit": Limit}) == limit
    assert pickle.loads(pickle.dumps(limit)) == limit == copy.copy(limit)
    assert hash(Limit(str(limit))) == hash(limit)
    assert parse_limits(f"{limit}; 3/week") == (limit, Limit("3/week"))


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("100/second paced 500ms", {"max_wait": 0.5}),
        ("100/second PACED 0.5 s", {"max_wait": 0.5}),
        ("100/second paced 0ms", {"max_wait": 0.0}),
        ("100/second warmup 10s", {"warmup": 10.0}),
        ("100/second warmup 1 minute", {"warmup": 60.0, "cold_factor": 3}),
        ("100/second cold factor 5 warmup 10s", {"warmup": 10.0, "cold_factor": 5}),
        ("100/second warmup 10s paced 500ms", {"max_wait": 0.5, "warmup": 10.0}),
        ("100/second paced 500 ms  warmup 10 seconds", {"max_wait": 0.5, "warmup": 10.0}),
    ],
)
def test_a_string_and_keywords_make_the_same_limit(text: str, terms: dict[str, Any]) -> None:
    assert Limit(text) == Limit(100, per=1.0, **terms) == Limit("100/s", **terms)
    assert Limit(text).is_shaped


def test_the_terms_come_last_and_the_warm_up_comes_first() -> None:
    limit = Limit(90, 7200, 24, "strict", max_wait=90.0, warmup=10_800.0, cold_factor=4)
    assert str(limit) == "90/2 hours strict 24 buckets cold factor 4 warmup 3h paced 90s"
    assert (limit.max_wait_ms, limit.warmup_ms, limit.cold_factor) == (90_000, 10_800_000, 4)


def test_a_plain_limit_is_not_shaped() -> None:
    limit = Limit("100/second")
    assert not limit.is_shaped
    assert (limit.max_wait_ms, limit.warmup_ms, limit.cold_factor) == (None, None, None)
    assert limit != Limit("100/second paced 0ms")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"max_wait": -0.001}, r"max_wait=-0\.001 s is outside 0 s to a day"),
        ({"max_wait": math.nan}, "max_wait=nan s is outside"),
        ({"max_wait": math.inf}, "max_wait=inf s is outside"),
        ({"max_wait": 86_401}, "max_wait=86401 s is outside"),
        ({"max_wait": 0.0005}, "max_wait=0.0005 s is not a whole number of milliseconds"),
        ({"max_wait": "1s"}, "max_wait='1s' is not a number of seconds"),
        ({"max_wait": True}, "max_wait=True is not a number of seconds"),
        ({"warmup": 0}, "warmup=0 s is outside 0.001 s to a day"),
        ({"warmup": -10.0}, "warmup=-10.0 s is outside"),
        ({"warmup": math.nan}, "warmup=nan s is outside"),
        ({"warmup": 86_401.0}, "warmup=86401.0 s is outside"),
        ({"warmup": 0.999}, "warmup=0.999 s is shorter than one second"),
        ({"cold_factor": 3}, "cold_factor=3 means nothing without a warm-up"),
        ({"warmup": 10.0, "cold_factor": 1}, "cold_factor=1 is not a whole number from 2 to 100"),
        ({"warmup": 10.0, "cold_factor": -3}, "cold_factor=-3 is not a whole number"),
        ({"warmup": 10.0, "cold_factor": 0}, "cold_factor=0 is not a whole number"),
        ({"warmup": 10.0, "cold_factor": 2.5}, "cold_factor=2.5 is not a whole number"),
        ({"warmup": 10.0, "cold_factor": 101}, "cold_factor=101 is not a whole number"),
        ({"warmup": 10.0, "cold_factor": math.nan}, "cold_factor=nan is not a whole number"),
    ],
)
def test_a_bad_term_is_an_error_that_names_it(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Limit(100, per=1.0, **terms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100/s paced", "'paced' needs a duration; write it like \"paced 500ms\""),
        ("100/s warmup", "'warmup' needs a duration; write it like \"warmup 10s\""),
        ("100/s warmup paced 1s", "'warmup' needs a duration"),
        ("100/s paced 3 parsecs", "'parsecs' is not a unit of time"),
        ("100/s paced -1s", "max_wait=-1.0 s is outside"),
        ("100/s paced 1s paced 2s", "'paced' is written twice"),
        ("100/s warmup 10s warmup 10s", "'warmup' is written twice"),
        ("100/s warmup 0s", "warmup=0.0 s is outside"),
        ("100/s warmup 2 days", "warmup=172800.0 s is outside"),
        ("100/s cold factor 1 warmup 10s", "cold_factor=1 is not a whole number"),
        ("100/s paced nan", "not understood"),
        ("100/s warmup 10s 5 buckets", "not understood"),
        ("2/s warmup 10s", "amount=2 is less than cold_factor=3, so a cold limit would admit noth"),
        ("1/s warmup 1s paced 1s", "warmup=1 s is too short for 1 permits in 1 s"),
        ("5000/day warmup 1h", "warmup=3600 s is shorter than one second, or than the interval"),
        ("10000001/s paced 1s", "amount=10000001 is more than 10000000"),
    ],
)
def test_a_bad_string_is_an_error_that_shows_it(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Limiter("memory://", text)
    assert str(raised.value).startswith(f"limit {text!r}: ")
    assert message in str(raised.value)


def test_a_paced_limit_may_have_fewer_permits_than_a_cold_one_divides_by() -> None:
    assert Limit("2/second warmup 10s paced 2s").cold_factor == 3
