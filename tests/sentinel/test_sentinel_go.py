"""Laws of sentinel-golang's array and views: a view sums what the array holds, and stores nothing.

Times are far above zero: time 0 is refused, and a view is empty until one interval after it.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.windows.bucket_leap_array import Event
from distwindow.sentinel.windows.sentinel_go import (
    EagerBucketLeapArray,
    NotReusableError,
    SecondMetric,
    SlidingWindowMetric,
)

MAX_RT = 60000
EVENTS = (Event.PASS, Event.BLOCK, Event.COMPLETE, Event.ERROR, Event.RT)

counts = st.integers(1, 6)
lengths = st.sampled_from([10, 100, 500, 1000])
shapes = st.tuples(counts, lengths).map(lambda shape: (shape[0], shape[0] * shape[1]))
origins = st.sampled_from([60_000, 1_700_000_000_123])
adds = st.tuples(st.integers(0, 1500), st.sampled_from(EVENTS), st.integers(0, 9))
Log = list[tuple[int, Event, int]]


def with_times(origin: int, steps: Log) -> Log:
    """Return the steps with times in place of gaps."""
    log = []
    for gap, event, n in steps:
        origin += gap
        log.append((origin, event, n))
    return log


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw the shape of an array, and that of a view that fits it."""
    count, interval = draw(shapes)
    length = interval // count
    buckets = draw(st.sampled_from(divisors(count)))
    return (count, interval), (draw(st.sampled_from(divisors(buckets))), buckets * length)


def check_view(shape: tuple[tuple[int, int], tuple[int, int]], origin: int, steps: Log) -> None:
    (count, interval), (view_count, view_interval) = shape
    length = interval // count
    array = EagerBucketLeapArray(count, interval, origin)
    view = SlidingWindowMetric(array, view_count, view_interval)
    log = with_times(origin, steps)
    for at, (now, event, n) in enumerate(log):
        assert array.add(now, event, n)
        first = now - now % length - view_interval + length
        assert view.start_range(now) == (first, now - now % length)
        seen = [(t - t % length, e, m) for t, e, m in log[: at + 1] if t >= first]
        for kind in EVENTS:
            per_start: dict[int, int] = {}
            for start, e, m in seen:
                per_start[start] = per_start.get(start, 0) + (m if e is kind else 0)
            assert view.total(now, kind) == sum(per_start.values())
            assert view.qps(now, kind) == sum(per_start.values()) / (view_interval / 1000)
            assert view.max_of_single_bucket(now, kind) == max(per_start.values())
        times = [m for _, e, m in seen if e is Event.RT]
        assert view.min_rt(now) == max(1, min(times, default=MAX_RT))
        assert array.min_rt(now) <= view.min_rt(now)


@given(views(), origins, st.lists(adds, max_size=60))
def test_a_view_is_a_recount_of_the_starts_in_its_range(
    shape: tuple[tuple[int, int], tuple[int, int]], origin: int, steps: Log
) -> None:
    check_view(shape, origin, steps)


@given(shapes, origins, st.lists(adds, min_size=1, max_size=25))
def test_the_array_counts_what_a_view_of_its_own_shape_sees(
    shape: tuple[int, int], origin: int, steps: Log
) -> None:
    array = EagerBucketLeapArray(*shape, origin)
    view = SlidingWindowMetric(array, *shape)
    for now, event, n in with_times(origin, steps):
        array.add(now, event, n)
        assert [array.total(now, kind) for kind in EVENTS] == [
            view.total(now, kind) for kind in EVENTS
        ]


@given(views(), origins, st.lists(adds, max_size=20), st.integers(0, 3000))
def test_reading_a_view_changes_nothing(
    shape: tuple[tuple[int, int], tuple[int, int]], origin: int, steps: Log, later: int
) -> None:
    array = EagerBucketLeapArray(*shape[0], origin)
    view = SlidingWindowMetric(array, *shape[1])
    now = origin
    for now, event, n in with_times(origin, steps):
        array.add(now, event, n)

    def content() -> list[tuple[int, list[int], int]]:
        return [(w.start, list(w.value.counts), w.value.min_rt) for w in array.all_windows()]

    before = content()
    now += later
    for event in EVENTS:
        view.total(now, event), view.qps(now, event), view.previous_qps(now, event)
        view.max_of_single_bucket(now, event)
    view.min_rt(now), view.avg_rt(now), view.max_concurrency(now)
    view.second_metrics(now, 0, now)
    assert content() == before


@given(shapes, st.integers(0, 10**13))
def test_a_new_array_holds_the_present_window_and_those_that_follow(
    shape: tuple[int, int], now: int
) -> None:
    array = EagerBucketLeapArray(*shape, now)
    length = array.window_length_ms
    first = now - now % length
    starts = [window.start for window in array.all_windows()]
    assert sorted(starts) == [first + i * length for i in range(array.sample_count)]
    assert all(start // length % array.sample_count == at for at, start in enumerate(starts))


@given(shapes, st.integers(10**6, 10**13), st.integers(1, 10**6))
def test_a_future_window_counts_as_expired(shape: tuple[int, int], now: int, ahead: int) -> None:
    array = EagerBucketLeapArray(*shape, now)
    later = now + ahead
    assume(later // array.window_length_ms > now // array.window_length_ms)
    array.add(later, Event.PASS, 7)
    window = array.current_window(later)
    assert window is not None
    assert array.is_deprecated(now, window)
    assert not array.is_deprecated(later, window)
    assert window not in array.windows(now)


@given(shapes, st.integers(10**6, 10**13), st.integers(1, 4))
def test_going_back_a_lap_is_refused_unless_there_is_only_one_bucket(
    shape: tuple[int, int], now: int, laps: int
) -> None:
    array = EagerBucketLeapArray(*shape, now)
    later = now + laps * array.interval_ms
    array.add(later, Event.PASS, 1)
    array.update_concurrency(later, 2)
    alone = array.sample_count == 1
    assert array.add(now, Event.PASS, 100) is alone
    assert array.update_concurrency(now, 50) is alone
    assert array.total(later, Event.PASS) == (101 if alone else 1)
    assert array.max_concurrency(later) == (50 if alone else 2)


@given(shapes)
def test_time_zero_is_refused(shape: tuple[int, int]) -> None:
    array = EagerBucketLeapArray(*shape, 0)
    view = SlidingWindowMetric(array, *shape)
    assert array.add(0, Event.PASS) is False
    assert array.update_concurrency(0, 1) is False
    assert array.windows(0) == view.windows(0) == []
    assert array.values(0) == []
    assert array.total(0, Event.PASS) == view.total(0, Event.PASS) == 0


def test_no_array_is_made_before_time_zero() -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        EagerBucketLeapArray(2, 1000, -1)


@given(views(), st.integers(1, 10**4))
def test_a_view_that_would_reach_before_time_zero_sees_nothing(
    shape: tuple[tuple[int, int], tuple[int, int]], now: int
) -> None:
    array = EagerBucketLeapArray(*shape[0], now)
    view = SlidingWindowMetric(array, *shape[1])
    array.add(now, Event.PASS)
    first, last = view.start_range(now)
    reaches = last - view.interval_ms + array.window_length_ms
    assert first == reaches % 2**64
    assert view.total(now, Event.PASS) == (1 if reaches >= 0 else 0)
    if now <= view.bucket_length_ms:
        assert view.previous_qps(now, Event.PASS) == 0


@given(views(), st.integers(1, 9))
def test_previous_qps_is_the_view_of_one_of_its_own_buckets_ago(
    shape: tuple[tuple[int, int], tuple[int, int]], n: int
) -> None:
    now = 1_700_000_000_000
    array = EagerBucketLeapArray(*shape[0], now)
    view = SlidingWindowMetric(array, *shape[1])
    array.add(now, Event.PASS, n)
    soon = now + view.bucket_length_ms
    assert view.previous_qps(soon, Event.PASS) == n / (view.interval_ms / 1000)
    assert view.previous_qps(now, Event.PASS) == 0


@given(st.integers(-3, 30), st.integers(-100, 3000), shapes)
def test_a_view_fits_if_it_divides_the_array_and_is_made_of_its_buckets(
    count: int, interval: int, shape: tuple[int, int]
) -> None:
    array = EagerBucketLeapArray(*shape, 1)
    if count <= 0 or interval <= 0 or interval % count:
        with pytest.raises(ConfigurationError) as refusal:
            SlidingWindowMetric(array, count, interval)
        assert not isinstance(refusal.value, NotReusableError)
    elif array.interval_ms % interval or interval // count % array.window_length_ms:
        with pytest.raises(NotReusableError):
            SlidingWindowMetric(array, count, interval)
    else:
        assert SlidingWindowMetric(array, count, interval).bucket_length_ms == interval // count


@given(shapes, origins, st.lists(adds, min_size=1, max_size=25), st.integers(0, 5000))
def test_second_metrics_are_a_recount_by_second_of_the_whole_array(
    shape: tuple[int, int], origin: int, steps: Log, back: int
) -> None:
    array = EagerBucketLeapArray(*shape, origin)
    length = array.window_length_ms
    view = SlidingWindowMetric(array, 1, length)
    log = with_times(origin, steps)
    for now, event, n in log:
        array.add(now, event, n)
        array.update_concurrency(now, n)
    now = log[-1][0]
    since = now - back
    oldest = now - array.interval_ms
    inside = [
        (start - start % 1000, e, n)
        for start, e, n in ((t - t % length, e, n) for t, e, n in log)
        if since <= start < now
        and start >= oldest
        # The window one interval later has the same slot, and has replaced this one.
        and not any(t - t % length == start + array.interval_ms for t, _, _ in log)
    ]
    expected = {}
    for second in sorted({second for second, _, _ in inside}):

        def total(event: Event, second: int = second) -> int:
            return sum(n for s, e, n in inside if s == second and e is event)

        completed = total(Event.COMPLETE)
        expected[second] = SecondMetric(
            timestamp=second,
            passed=total(Event.PASS),
            blocked=total(Event.BLOCK),
            completed=completed,
            errors=total(Event.ERROR),
            avg_rt=total(Event.RT) // max(1, completed),
            concurrency=max(n for s, _, n in inside if s == second),
        )
    got = view.second_metrics(now, since, now)
    assert [m.timestamp for m in got] == sorted({m.timestamp for m in got})
    idle = [m for m in got if m.timestamp not in expected]
    assert all(not any(m[1:]) for m in idle)
    assert [m for m in got if m.timestamp in expected] == list(expected.values())


@pytest.mark.parametrize(
    ("rt", "completed", "average"),
    [(30, 4, 7.5), (0, 3, 0.0), (5, 0, math.inf), (-5, 0, -math.inf), (0, 0, math.nan)],
)
def test_an_average_response_time_is_divided_as_doubles_are(
    rt: int, completed: int, average: float
) -> None:
    array = EagerBucketLeapArray(2, 1000, 5000)
    view = SlidingWindowMetric(array, 2, 1000)
    array.add(5000, Event.RT, rt)
    array.add(5000, Event.COMPLETE, completed)
    assert repr(view.avg_rt(5000)) == repr(average)


def test_the_counts_of_a_second_are_unsigned() -> None:
    array = EagerBucketLeapArray(2, 1000, 5000)
    array.add(5000, Event.RT, -5)
    (second,) = SlidingWindowMetric(array, 2, 1000).second_metrics(5000, 5000, 6000)
    assert second.avg_rt == 2**64 - 5


@given(shapes, st.lists(st.integers(0, 100), max_size=10))
def test_concurrency_is_the_most_seen_until_its_bucket_is_used_again(
    shape: tuple[int, int], seen: list[int]
) -> None:
    now = 1_700_000_000_000
    array = EagerBucketLeapArray(*shape, now)
    view = SlidingWindowMetric(array, *shape)
    for n in seen:
        array.update_concurrency(now, n)
    most = max(seen, default=0)
    assert array.max_concurrency(now) == view.max_concurrency(now) == most
    assert array.max_concurrency(now + array.interval_ms) == 0
