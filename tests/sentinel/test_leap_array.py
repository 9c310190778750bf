"""Laws of Sentinel's LeapArray: what is counted, what is expired, what is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.windows.bucket_leap_array import (
    BucketLeapArray,
    Event,
    MetricBucket,
    MetricNode,
)
from distwindow.sentinel.windows.leap_array import LeapArray, Window, bucket_length_ms

MAX_RT = 5000

counts = st.integers(1, 8)
lengths = st.sampled_from([1, 10, 100, 500])
shapes = st.tuples(counts, lengths).map(lambda shape: (shape[0], shape[0] * shape[1]))
origins = st.sampled_from([0, 1, 999, 1_700_000_000_123])
amounts = st.integers(0, 9)
adds = st.tuples(st.integers(0, 1500), st.sampled_from(Event), amounts)


def with_times(origin: int, steps: list[tuple[int, Event, int]]) -> list[tuple[int, Event, int]]:
    """Return the steps with times in place of gaps."""
    log = []
    for gap, event, n in steps:
        origin += gap
        log.append((origin, event, n))
    return log


class ArrayModel:
    """LeapArray as a dictionary: by slot, the start of its window and what was added to it."""

    def __init__(self, sample_count: int, interval_ms: int) -> None:
        self.count, self.interval = sample_count, interval_ms
        self.length = interval_ms // sample_count
        self.slots: dict[int, tuple[int, list[tuple[Event, int]]]] = {}

    def rotate(self, t: int) -> list[tuple[Event, int]]:
        """Return the list to add to at `t`; a new one if the slot has a later window already."""
        start, slot = t - t % self.length, t // self.length % self.count
        if slot not in self.slots or self.slots[slot][0] < start:
            self.slots[slot] = (start, [])
        return self.slots[slot][1] if self.slots[slot][0] == start else []

    def live(self, t: int) -> dict[int, list[tuple[Event, int]]]:
        return {start: log for start, log in self.slots.values() if t - start <= self.interval}


def totals(log: list[tuple[Event, int]]) -> list[int]:
    return [sum(n for e, n in log if e is event) for event in Event]


@given(shapes, origins, st.lists(adds, max_size=40))
def test_a_total_is_the_recount_of_the_buckets_that_reach_into_the_window(
    shape: tuple[int, int], origin: int, steps: list[tuple[int, Event, int]]
) -> None:
    sample_count, interval = shape
    array = BucketLeapArray(sample_count, interval)
    length = interval // sample_count
    log = with_times(origin, steps)
    for at, (now, event, n) in enumerate(log):
        array.add(now, event, n)
        first = now - now % length - interval + length
        counted = [(e, m) for t, e, m in log[: at + 1] if t >= first]
        for kind in Event:
            assert array.total(now, kind) == sum(m for e, m in counted if e is kind)
        least = min([m for e, m in counted if e is Event.RT], default=MAX_RT)
        assert array.min_rt(now) == max(1, least)


@given(shapes, origins, st.lists(adds, max_size=40))
def test_per_bucket_figures_are_the_recount_of_each_bucket(
    shape: tuple[int, int], origin: int, steps: list[tuple[int, Event, int]]
) -> None:
    sample_count, interval = shape
    array = BucketLeapArray(sample_count, interval)
    length = interval // sample_count
    log = with_times(origin, steps)
    for now, event, n in log:
        array.add(now, event, n)
    if not log:
        return
    now = log[-1][0]
    start = now - now % length

    def recount(event: Event, of: int) -> int:
        return sum(n for t, e, n in log if e is event and t - t % length == of)

    assert array.current_pass(now) == array.window_pass(now) == recount(Event.PASS, start)
    if sample_count > 1 and now >= length:
        assert array.previous_pass(now) == recount(Event.PASS, start - length)
        assert array.previous_block(now) == recount(Event.BLOCK, start - length)
    starts = [start - back * length for back in range(sample_count)]
    assert array.max_success(now) == max(1, *(recount(Event.SUCCESS, of) for of in starts))
    for node in array.details(now):
        success, rt = recount(Event.SUCCESS, node.timestamp), recount(Event.RT, node.timestamp)
        assert node == MetricNode(
            timestamp=node.timestamp,
            passed=recount(Event.PASS, node.timestamp),
            blocked=recount(Event.BLOCK, node.timestamp),
            success=success,
            exception=recount(Event.EXCEPTION, node.timestamp),
            rt=rt // success if success else rt,
            occupied_pass=recount(Event.OCCUPIED_PASS, node.timestamp),
        )
        assert node.timestamp in starts


def check_against_model(shape: tuple[int, int], steps: list[tuple[int, Event, int, bool]]) -> None:
    array, model = BucketLeapArray(*shape), ArrayModel(*shape)
    for t, event, n, rotate in steps:
        if rotate:
            array.add(t, event, n)
            model.rotate(t).append((event, n))
        live = model.live(t)
        assert {w.start: w.value.counts for w in array.windows(t)} == {
            start: totals(log) for start, log in live.items()
        }
        assert {w.start for w in array.all_windows()} == {s for s, _ in model.slots.values()}
        for window in array.all_windows():
            assert array.is_deprecated(t, window) == (window.start not in live)
            assert window.start % array.window_length_ms == 0
            value = array.window_value(window.start)
            assert value is window.value


anywhen = st.tuples(st.integers(0, 6000), st.sampled_from(Event), amounts, st.booleans())


@given(shapes, st.lists(anywhen, max_size=80))
def test_whatever_the_clock_does_the_array_is_a_table_of_slots(
    shape: tuple[int, int], steps: list[tuple[int, Event, int, bool]]
) -> None:
    check_against_model(shape, steps)


READS: dict[str, Callable[[BucketLeapArray, int], object]] = {
    "total": lambda array, now: array.total(now, Event.PASS),
    "average": lambda array, now: array.average(now, Event.PASS),
    "min_rt": BucketLeapArray.min_rt,
    "max_success": BucketLeapArray.max_success,
    "previous_pass": BucketLeapArray.previous_pass,
    "previous_block": BucketLeapArray.previous_block,
    "current_pass": BucketLeapArray.current_pass,
    "details": BucketLeapArray.details,
}


@pytest.mark.parametrize("name", READS)
def test_a_read_brings_the_current_bucket_up_to_date_and_no_other(name: str) -> None:
    array = BucketLeapArray(2, 1000)
    array.add(5000, Event.PASS)
    array.add(5500, Event.PASS)
    READS[name](array, 8000)
    assert [(w.start, w.value.get(Event.PASS)) for w in array.all_windows()] == [
        (8000, 0),
        (5500, 1),
    ]


@given(shapes, st.integers(0, 10**13), st.integers(-3000, 3000))
def test_the_previous_window_is_expired_by_the_clock_and_not_by_the_time_asked_for(
    shape: tuple[int, int], now: int, off: int
) -> None:
    array = BucketLeapArray(*shape)
    array.add(now, Event.PASS, 1)
    window = array.current_window(now)
    assert window is not None
    t = now + array.window_length_ms
    expired = now + off - window.start > array.interval_ms
    assert array.previous_window(t, now + off) is (None if expired else window)
    assert array.previous_window(t + 2 * array.interval_ms, now) is None


@given(st.integers(1, 8), lengths, st.integers(0, 10**13))
def test_the_head_is_the_window_that_drops_out_next(count: int, length: int, t: int) -> None:
    array = BucketLeapArray(count, count * length)
    for back in reversed(range(count)):
        array.current_window(t + (count - 1 - back) * length)
    now = t + (count - 1) * length
    head = array.valid_head(now, now)
    assert head is not None
    assert head.contains(t)
    assert array.valid_head(now, head.start + array.interval_ms + 1) is None


@given(shapes, st.integers(-(10**6), -1))
def test_before_time_zero_there_is_no_window(shape: tuple[int, int], t: int) -> None:
    array = BucketLeapArray(*shape)
    array.add(0, Event.PASS)
    assert array.current_window(t) is None
    assert array.window_value(t) is None
    assert array.previous_window(t, 0) is None
    assert array.values(t) == []
    assert array.window_pass(t) == array.previous_pass(t) == array.total(t, Event.PASS) == 0
    for refused in (lambda: array.add(t, Event.PASS), lambda: array.current_pass(t)):
        with pytest.raises(ConfigurationError, match="before time 0"):
            refused()


@given(st.integers(1, 8), st.integers(2, 500))
def test_near_time_zero_slots_are_found_by_division_toward_zero(count: int, length: int) -> None:
    array = BucketLeapArray(count, count * length)
    array.add(0, Event.PASS, 5)
    first = array.current_window(0)
    for t in (1, length - 1, length):
        assert array.previous_window(t, t) is first
    if count == 1:
        assert array.previous_window(0, 0) is first
    else:
        with pytest.raises(ConfigurationError, match="before time 0"):
            array.previous_window(0, 0)
        with pytest.raises(ConfigurationError, match="before time 0"):
            array.previous_pass(0)
    assert array.valid_head(-length, 0) is array.valid_head(-1 - length, 0) is first


@given(shapes, st.lists(st.integers(0, 20_000), max_size=20))
def test_response_times_sum_in_full_and_the_smallest_stays_below_its_ceiling(
    shape: tuple[int, int], times: list[int]
) -> None:
    array = BucketLeapArray(*shape, statistic_max_rt=1000)
    for rt in times:
        array.add(0, Event.RT, rt)
    assert array.total(0, Event.RT) == sum(times)
    assert array.min_rt(0) == max(1, min([1000, *times]))


def test_an_average_response_time_is_cut_toward_zero() -> None:
    array = BucketLeapArray(1, 1000)
    array.add(0, Event.SUCCESS, 2)
    array.add(0, Event.RT, -5)
    assert array.details(0)[0].rt == -2


def test_an_average_is_per_second() -> None:
    array = BucketLeapArray(2, 500)
    array.add(0, Event.PASS, 3)
    assert array.average(0, Event.PASS) == 6.0


def test_an_array_without_future_windows_has_no_waiting_permits() -> None:
    array = BucketLeapArray(2, 1000)
    assert array.waiting(0) == 0
    with pytest.raises(NotImplementedError):
        array.add_waiting(1000, 1)


@given(st.integers(-5, 20), st.integers(-1000, 1000))
def test_a_shape_is_refused_unless_positive_and_evenly_divided(count: int, interval: int) -> None:
    if count > 0 and interval > 0 and interval % count == 0:
        assert bucket_length_ms(count, interval) * count == interval
        assert BucketLeapArray(count, interval).interval_sec == interval / 1000
    else:
        for refused in (bucket_length_ms, BucketLeapArray):
            with pytest.raises(ConfigurationError):
                refused(count, interval)


@pytest.mark.parametrize(("count", "interval"), [(True, 10), (2.0, 10), (2, 10.0), ("2", 10)])
def test_a_shape_of_another_type_than_int_is_refused(count: object, interval: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive int"):
        # Wrong types, as is tested here.
        bucket_length_ms(count, interval)  # type: ignore[arg-type]


class FutureWindows(LeapArray[MetricBucket]):
    """An array of which only future windows count, and in which an earlier time gets the window
    that has taken its slot.
    """

    def new_bucket(self, t: int) -> MetricBucket:
        return MetricBucket(MAX_RT)

    def reset_bucket(self, bucket: MetricBucket, start: int) -> None:
        bucket.reset()

    def horizon(self, t: int) -> int:
        return t + 1

    def overtaken(self, t: int, later: Window[MetricBucket]) -> Window[MetricBucket] | None:
        return later


@given(shapes, st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(0, 5000))
def test_a_subclass_decides_what_is_expired_and_which_window_an_earlier_time_gets(
    shape: tuple[int, int], times: list[int], now: int
) -> None:
    array = FutureWindows(*shape)
    for t in times:
        window = array.current_window(t)
        assert window is not None
        assert window.start + window.length_ms > t
        assert any(window is each for each in array.all_windows())
    assert all(window.start > now for window in array.windows(now))
    for window in array.all_windows():
        assert array.is_deprecated(now, window) == (window.start <= now)
