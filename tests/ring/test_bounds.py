"""The two bounds, compared with models that are simple enough to be checked by reading.

leap     exactly what a sum over a dictionary of buckets admits; at most the limit in any
         aligned window, at most twice that in an arbitrary one
strict   at most the limit in any window; in return a saturated key gets n / (n + 1) of it
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import BucketLeapArray, Event, Limit
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.limit import Bound
from tests.clock_and_stores import T0, Execute, fresh_key

W = 60_000
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Arrival(NamedTuple):
    later: int
    """ms since the arrival before."""
    cost: int
    calls: int


class Admission(NamedTuple):
    at: int
    cost: int


def limits(bound: Bound) -> st.SearchStrategy[Limit]:
    return st.builds(
        lambda amount, buckets: Limit(amount, buckets * W / 1000, buckets, bound),
        st.integers(4, 14),
        st.integers(1, 9),
    )


forward = st.one_of(
    st.integers(0, 2), st.sampled_from([W // 3, W - 1, W, W + 1, 2 * W]), st.integers(0, 12 * W)
)
any_step = st.one_of(forward, st.integers(-12 * W, 0), st.sampled_from([-W, -1, -200 * W]))
costs, calls = st.integers(1, 4), st.integers(1, 5)
arrivals = st.lists(st.builds(Arrival, forward, costs, calls), min_size=1, max_size=40)
arrivals_in_any_order = st.lists(
    st.builds(Arrival, any_step, costs, calls), min_size=1, max_size=40
)
callers_per_script_call = st.sampled_from([1, 4])  # at most


def admissions_of(
    execute: Execute, limit: Limit, coming: list[Arrival], most: int = 1
) -> list[Admission]:
    """Return what is admitted of these arrivals; `most` calls at most share a script call."""
    key, now, admitted = fresh_key(), T0, []
    for later, cost, count in coming:
        now += later
        charges = charges_of(key, ring_name_prefix("bounds", key), [limit], cost)
        while count:
            calls = min(count, most)
            reply = execute(Acquire(charges, now, calls=calls))
            admitted += [Admission(now, cost)] * reply.admitted
            count -= calls
    return admitted


class BucketModel:
    """Buckets in a dictionary, summed anew for each call."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.buckets: dict[int, int] = {}

    def admits(self, now: int, cost: int) -> bool:
        width, span = self.limit.bucket_ms, self.limit.span
        newest = max(self.buckets, default=now // width)
        if newest * width - now > span * width:  # the clock was set back by more than a window
            self.buckets.clear()
            newest = now // width
        newest = max(newest, now // width)
        self.buckets.setdefault(newest, 0)
        used = sum(n for number, n in self.buckets.items() if number > newest - span)
        if used + cost > self.limit.amount:
            return False
        self.buckets[newest] += cost
        return True


def expected(limit: Limit, coming: list[Arrival]) -> list[Admission]:
    model, now, admitted = BucketModel(limit), T0, []
    for later, cost, count in coming:
        now += later
        admitted += [Admission(now, cost) for _ in range(count) if model.admits(now, cost)]
    return admitted


@settings(LENIENT, max_examples=50)
@given(
    limit=st.one_of(limits("leap"), limits("strict")),
    coming=arrivals_in_any_order,
    most=callers_per_script_call,
)
def test_exactly_what_the_model_admits(
    execute: Execute, limit: Limit, coming: list[Arrival], most: int
) -> None:
    assert admissions_of(execute, limit, coming, most) == expected(limit, coming)


@settings(LENIENT, max_examples=50)
@given(limit=limits("leap"), coming=arrivals)
def test_leap_is_check_then_count_on_a_leap_array(
    execute: Execute, limit: Limit, coming: list[Arrival]
) -> None:
    array, now, admitted = BucketLeapArray(limit.buckets, limit.interval_ms), T0, []
    for later, cost, count in coming:
        now += later
        for _ in range(count):
            if array.total(now, Event.PASS) + cost <= limit.amount:
                array.add(now, Event.PASS, cost)
                admitted.append(Admission(now, cost))
    assert admissions_of(execute, limit, coming) == admitted


@settings(LENIENT, max_examples=50)
@given(limit=limits("leap"), coming=arrivals, most=callers_per_script_call)
def test_leap_keeps_every_aligned_window_and_twice_the_limit_anywhere(
    execute: Execute, limit: Limit, coming: list[Arrival], most: int
) -> None:
    admitted = admissions_of(execute, limit, coming, most)
    assert most_in_aligned(admitted, limit, limit.buckets) <= limit.amount
    assert most_in_any(admitted, limit.interval_ms) <= 2 * limit.amount


@settings(LENIENT, max_examples=50)
@given(limit=limits("strict"), coming=arrivals, most=callers_per_script_call)
def test_strict_keeps_every_window_there_is(
    execute: Execute, limit: Limit, coming: list[Arrival], most: int
) -> None:
    admitted = admissions_of(execute, limit, coming, most)
    assert most_in_any(admitted, limit.interval_ms) <= limit.amount
    assert most_in_aligned(admitted, limit, limit.buckets + 1) <= limit.amount


def most_in_aligned(admitted: list[Admission], limit: Limit, buckets: int) -> int:
    """Return the most admitted in any `buckets` consecutive buckets."""
    numbers = {at // limit.bucket_ms for at, _ in admitted}
    return max(
        (
            sum(cost for at, cost in admitted if first <= at // limit.bucket_ms < first + buckets)
            for first in numbers
        ),
        default=0,
    )


def most_in_any(admitted: list[Admission], interval_ms: int) -> int:
    """Return the most admitted in any [t, t + interval) that begins with an admission."""
    return max(
        (
            sum(cost for at, cost in admitted if begin <= at < begin + interval_ms)
            for begin, _ in admitted
        ),
        default=0,
    )


# -- what a bound costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [1, 2, 5, 10])
@pytest.mark.parametrize("bound", ["leap", "strict"])
def test_a_saturated_key_gets_its_share(execute: Execute, bound: Bound, buckets: int) -> None:
    """That is the limit per interval under `leap`, and n / (n + 1) of it under `strict`."""
    limit = Limit(7, buckets * W / 1000, buckets, bound)
    period = limit.span * W
    laps = 4
    begin = -(T0 // -period) * period - T0
    rush = [Arrival(begin, 1, 9)] + [Arrival(W // 2, 1, 9)] * (2 * limit.span * laps - 1)
    admitted = admissions_of(execute, limit, rush)
    assert len(admitted) == laps * limit.amount
    rate = len(admitted) / (laps * period)
    whole = limit.amount / limit.interval_ms
    assert rate == pytest.approx(whole if bound == "leap" else whole * buckets / (buckets + 1))


def test_leap_can_admit_twice_the_limit_and_strict_cannot(execute: Execute) -> None:
    """The limit is admitted at the end of a bucket, and again one interval less one bucket later.
    This is the reason for `strict`.
    """
    end_of_bucket = W - 1 - T0 % W
    for bound, most in (("leap", 14), ("strict", 7)):
        # `bound` is a str of the loop, and one of the two literals there.
        limit = Limit(7, 10 * W / 1000, 10, bound)  # type: ignore[arg-type]
        rush = [Arrival(end_of_bucket, 7, 1), Arrival(9 * W + 1, 7, 1)]
        assert most_in_any(admissions_of(execute, limit, rush), limit.interval_ms) == most
