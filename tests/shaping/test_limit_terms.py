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
from distwindow.ring.limit import parse_limits

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
        ("100/s paced -1s", "paced -1s is outside 0 s to a day"),
        ("100/s paced 0.5ms", "paced 0.5ms is not a whole number of milliseconds"),
        ("100/s paced 1s paced 2s", "'paced' is written twice"),
        ("100/s warmup 10s warmup 10s", "'warmup' is written twice"),
        ("100/s warmup 0s", "warmup 0s is outside"),
        ("100/s warmup 2 days", "warmup 2 days is outside"),
        ("100/s cold factor 1 warmup 10s", "cold factor 1 is not a whole number"),
        ("100/s paced nan", "'nan' is not understood; what may follow the interval is, in this"),
        ("100/s warmup 10s 5 buckets", "'5 buckets' is not understood; what may follow"),
        ("100/s pace 5ms", "'pace 5ms' is not understood; what may follow"),
        ("100/s warm up 5s", "'warm up 5s' is not understood; what may follow"),
        ("100/s paced 5ms strict", "'strict' is not understood; what may follow the interval"),
        ("100/s warmup 9s cold factor 3", "'cold factor 3' is not understood; what may follow"),
        ("2/s warmup 10s", "an amount of 2 is less than the cold factor 3, so a cold limit"),
        ("1/s warmup 1s paced 1s", "warmup 1s is too short for 1 permits in 1 s"),
        ("5000/day warmup 1h", "warmup 1h is shorter than one second, or than the interval"),
        ("10000001/s paced 1s", "an amount of 10000001 is more than 10000000"),
    ],
)
def test_a_bad_string_is_an_error_that_shows_it(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Limiter("memory://", text)
    assert str(raised.value).startswith(f"limit {text!r}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "given", "has"),
    [
        ("100/s", {"per": 1.0}, "an interval"),
        ("100/s leap", {"bound": "leap"}, "a bound"),
        ("100/s 5 buckets", {"buckets": 10}, "a number of buckets"),
        ("100/s paced 5ms", {"max_wait": 1.0}, "a pace"),
        ("100/s paced 0ms", {"max_wait": 0.0}, "a pace"),
        ("100/s warmup 10s", {"warmup": 5.0}, "a warm-up"),
        ("100/s cold factor 4 warmup 10s", {"cold_factor": 5}, "a cold factor"),
    ],
)
def test_what_the_string_says_is_not_given_again(
    text: str, given: dict[str, Any], has: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Limit(text, **given)
    ((name, value),) = given.items()
    expected = f"limit {text!r}: the string already has {has}; leave out {name}={value!r}"
    assert str(raised.value) == expected


def test_what_the_string_leaves_out_may_be_given() -> None:
    limit = Limit("100/s warmup 10s", buckets=5, bound="strict", max_wait=0.5, cold_factor=4)
    assert str(limit) == "100/second strict 5 buckets cold factor 4 warmup 10s paced 500ms"


def test_an_error_names_each_term_as_it_was_given() -> None:
    with pytest.raises(ConfigurationError, match="max_wait=-1 s is outside"):
        Limit("100/s warmup 10s", max_wait=-1)
    with pytest.raises(ConfigurationError, match="warmup 0s is outside"):
        Limit("100/s warmup 0s", max_wait=1)


def test_a_paced_limit_may_have_fewer_permits_than_a_cold_one_divides_by() -> None:
    assert Limit("2/second warmup 10s paced 2s").cold_factor == 3
