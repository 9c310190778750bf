"""Limits: strings parse, `str()` round-trips, defaults divide evenly."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limit
from distwindow.ring.limit import Bound, parse_limits

DAY = 86_400_000

intervals = st.one_of(
    st.integers(1, 100_000),
    st.builds(
        lambda n, unit: n * unit,
        st.integers(1, 90),
        st.sampled_from([1000, 60_000, 3_600_000, DAY]),
    ),
)
limits = st.builds(
    lambda amount, ms, bound: Limit(amount, ms / 1000, bound=bound),
    st.integers(1, 10**12),
    intervals,
    st.sampled_from(["leap", "strict"]),
)


@given(limits)
def test_str_round_trips(limit: Limit) -> None:
    assert Limit(str(limit)) == limit
    assert eval(repr(limit), {"Limit": Limit}) == limit
    assert hash(Limit(str(limit))) == hash(limit)


@given(limits, st.data())
def test_str_round_trips_with_any_buckets(limit: Limit, data: st.DataObject) -> None:
    divisors = [number for number in range(1, 513) if limit.interval_ms % number == 0]
    buckets = data.draw(st.sampled_from(divisors))
    limit = Limit(limit.amount, limit.per, buckets, limit.bound)
    assert Limit(str(limit)) == limit
    assert limit.bucket_ms * limit.buckets == limit.interval_ms


@given(limits)
def test_the_default_is_the_largest_divisor(limit: Limit) -> None:
    most = 60 if limit.bound == "strict" else 10
    divisors = [n for n in range(1, most + 1) if limit.interval_ms % n == 0]
    assert limit.buckets == divisors[-1]
    assert limit.span == limit.buckets + (limit.bound == "strict")


@pytest.mark.parametrize(
    ("text", "amount", "per"),
    [
        ("100/second", 100, 1), ("100/s", 100, 1), ("100/sec", 100, 1), ("100/seconds", 100, 1),
        ("100 / second", 100, 1), ("100 per second", 100, 1), ("  100/second  ", 100, 1),
        ("10 per 2 hours", 10, 7200), ("100/5m", 100, 300), ("100/5 min", 100, 300),
        ("5000/day", 5000, 86400), ("1/week", 1, 604800), ("3/2d", 3, 172800), ("9/hr", 9, 3600),
        ("1_000/minute", 1000, 60), ("7/250ms", 7, 0.25), ("7/0.25s", 7, 0.25),
        ("100/SECOND", 100, 1), ("100 PER Minute", 100, 60), ("1/1.5 hours", 1, 5400),
    ],
)  # fmt: skip
def test_limit_strings_parse(text: str, amount: int, per: float) -> None:
    assert Limit(text) == Limit(amount, per)


def test_bound_and_buckets_in_the_string() -> None:
    assert Limit("5000/day strict 24 buckets") == Limit(5000, 86400, 24, "strict")
    assert Limit("5/s strict").buckets == 50
    assert Limit("5/s", buckets=4, bound="strict") == Limit("5/s strict 4 buckets")
    assert Limit("5/s leap") == Limit("5/s")


def test_it_is_a_value() -> None:
    limit = Limit("5/s strict")
    assert pickle.loads(pickle.dumps(limit)) == copy.deepcopy(limit) == limit
    assert len({limit, Limit("5/s strict"), Limit("5/s")}) == 2
    with pytest.raises(AttributeError):
        # Assigning to a frozen limit is what is tested here.
        limit.amount = 6  # type: ignore[misc]
    other: object = str(limit)
    assert limit != other


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("10/month", "10/30 days"),
        ("10 per 2 months", "10/60 days"),
        ("5/year", "5/365 days"),
        ("1,000/minute", "1000/minute"),
        ("1,000/month", "1000/30 days"),
        ("12,345,678 per day", "12345678 per day"),
    ],
)
def test_what_is_to_be_written_instead_is_a_limit(text: str, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=f"write .*['\"]{instead}['\"]$"):
        Limit(text)
    assert Limit(instead).amount > 1


@given(text=st.text("10_,./ smdleapstrictpacedwarmupcoldfactorbuckets;|-+", max_size=24))
@example(text="1__0/s")
@example(text="1_/s")
def test_any_text_is_a_limit_or_a_configuration_error(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        assert parse_limits(text)


@pytest.mark.parametrize("bound", ["leap", "strict"])
@pytest.mark.parametrize(
    ("buckets", "nearest"), [(3, "2 or 4"), (7, "5 or 8"), (300, "250 or 500")]
)
def test_the_nearest_divisors_are_named(bound: Bound, buckets: int, nearest: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the nearest that do: {nearest}"):
        Limit(5, per=1, buckets=buckets, bound=bound)


def test_several_limits_in_one_string_parse() -> None:
    several = parse_limits("5/s, 100/m; 1000/hour strict | 5000/day")
    assert several == (Limit("5/s"), Limit("100/m"), Limit("1000/hour strict"), Limit("5000/day"))
    assert parse_limits("5/s|100/m") == several[:2]
    assert parse_limits(several) == parse_limits(reversed(several)) == several
    assert parse_limits(Limit("5/s")) == (Limit("5/s"),)


def test_the_same_buckets_twice() -> None:
    for pair in ("5/s,7/s", "5/s,5/s", "5/s 10 buckets, 7/s"):
        with pytest.raises(ConfigurationError, match="count the same buckets"):
            parse_limits(pair)
    # Limits with other bucket lengths are counted apart, even over the same interval.
    assert len(parse_limits("5/s, 7/s 5 buckets, 7/s strict 10 buckets")) == 3


@pytest.mark.parametrize(
    "spec",
    ["x" * 9000, "x; " * 3000, "5/" + "x" * 9000, "1/s; " + "z" * 9000, ["y" * 9000], b"z" * 9000,
     "1," + "000," * 3000 + "000/s", [b"z" * 9000], "9" * 9000 + "/s", "5/" + "9" * 9000 + "s",
     "5/s " + "9" * 9000 + " buckets", "5/s paced " + "9" * 9000 + "s",
     "5/s paced 5" + "x" * 9000],
)  # fmt: skip
def test_an_error_does_not_repeat_a_long_text(spec: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_limits(spec)  # type: ignore[arg-type]  # a mistake
    assert len(str(caught.value)) < 700
