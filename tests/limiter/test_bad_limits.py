"""Limits that can never work raise one clear error that names the value and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distwindow import ConfigurationError, Limit, Limiter
from tests.limiter.first_call import each_limiter, error_of

LIMITS: dict[Any, str] = {
    "": "not understood",
    " ": "not understood",
    "100": "not understood",
    "/second": "not understood",
    "100/": "not understood",
    "100//second": "not understood",
    "100/second/minute": "not understood",
    "-1/second": "not understood",
    "0.5/second": "write it as '1/2 second'",
    "1.5/minute": "write it as '3/2 minute'",
    "0.25 per 2 hours": "write it as '1/8 hours'",
    "100 requests per minute": "write it as '100/minute'",
    "100r/m": "write it as '100/m'",
    "5 calls/second strict": "write it as '5/second strict'",
    "0.0/second": "not understood",
    "100 requests per day and user": "not understood",
    "1e3/second": "not understood",
    "١٠/second": "not understood",
    "nan/second": "not understood",
    "inf/second": "not understood",
    "100/second loose": "not understood",
    "100 per second per minute": "not understood",
    "100/second;": "not understood",
    "100/fortnight": "is not a unit of time",
    "100/0s": "outside 0.001 s to ten years",
    "100/11 years": "is not a unit of time",
    "10/month": 'a month has no fixed length; write days, such as "10/30 days"',
    "10 per 2 Months": 'a month has no fixed length; write days, such as "10/60 days"',
    "5000/year strict": 'a year has no fixed length; write days, such as "5000/365 days"',
    "200k/minute": "'200k' is not understood; write the number in full",
    "1M per day": "'1M' is not understood; write the number in full",
    "1,000/minute": "write amounts without a comma: '1000/minute'",
    "5/s; 1,000,000/day": "write amounts without a comma: '5/s; 1000000/day'",
    "5/minute|6/fortnight": "'fortnight' is not a unit of time",
    "100/999999 days": "outside 0.001 s to ten years",
    "100/0.5ms": "not a whole number of milliseconds",
    "0/second": "the amount, 0, is outside 1 to 1000000000000",
    "1000000000001/second": "the amount, 1000000000001, is outside 1 to 1000000000000",
    "100/second 7 buckets": "the nearest that do: 5 or 8",
    "100/second 0 buckets": "the number of buckets, 0, is outside 1 to 512",
    "100/second 513 buckets": "the number of buckets, 513, is outside 1 to 512",
    "5/minute; 7/minute": "count the same buckets",
    None: "is not a limit",
    5: "is not a limit",
    1.5: "is not a limit",
    True: "is not a limit",
    b"5/minute": "is not a limit",
    (): "no limit was given",
    (5,): "5 is not a limit",
    (None,): "None is not a limit",
}


@each_limiter
@pytest.mark.parametrize("limits", LIMITS, ids=repr)
def test_limits_that_are_none(limiter_class: type, limits: Any) -> None:
    exc = error_of(limiter_class, "memory://", limits=limits)
    assert isinstance(exc, ConfigurationError)
    assert LIMITS[limits] in str(exc)


BOTH_SHOWN = "5/minute; 7/minute"  # each of the two strings is valid


@pytest.mark.parametrize("text", [t for t in LIMITS if isinstance(t, str) and t != BOTH_SHOWN])
def test_a_limit_string_that_is_none_is_shown(text: str) -> None:
    assert repr(text) in str(error_of(Limiter, "memory://", limits=text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amount": 0}, "amount=0"),
        ({"amount": -1}, "amount=-1"),
        ({"amount": 1.5}, "amount=1.5"),
        ({"amount": True}, "amount=True"),
        ({"amount": math.nan}, "amount=nan"),
        ({"amount": None}, "amount=None"),
        ({"amount": 10**12 + 1}, "amount=1000000000001"),
        ({"amount": 5, "per": 0}, "outside 0.001 s to ten years"),
        ({"amount": 5, "per": -1}, "outside 0.001 s to ten years"),
        ({"amount": 5, "per": math.nan}, "per=nan"),
        ({"amount": 5, "per": math.inf}, "per=inf"),
        ({"amount": 5, "per": "60"}, "per='60'"),
        ({"amount": 5, "per": True}, "per=True"),
        ({"amount": 5, "per": 0.0015}, "per=0.0015"),
        ({"amount": 5, "buckets": 3}, "the nearest that do: 2 or 4"),
        ({"amount": 5, "buckets": 1.0}, "buckets=1.0"),
        ({"amount": 5, "buckets": True}, "buckets=True"),
        ({"amount": 5, "buckets": 0}, "buckets=0"),
        ({"amount": 5, "bound": "loose"}, 'neither "leap" nor "strict"'),
        ({"amount": "5/minute", "per": 1}, "already has an interval"),
    ],
)
def test_a_limit_that_is_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Limit(**arguments)
    assert message in str(caught.value)
