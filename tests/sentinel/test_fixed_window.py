"""Laws of the fixed-window counter, of which twice the threshold can pass within an instant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.windows.rolling_window import FixedWindow

thresholds = st.integers(0, 5)
intervals = st.sampled_from([1, 10, 1000])
origins = st.sampled_from([0, 1_700_000_000_123])
gaps = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 3000)), max_size=40)


@given(thresholds, intervals, origins, gaps)
def test_the_first_calls_of_each_window_are_admitted_and_all_are_counted(
    threshold: int, interval: int, origin: int, waits: list[int]
) -> None:
    window = FixedWindow(threshold, interval, origin)
    start, calls, now = origin, 0, origin
    for wait in waits:
        now += wait
        if now > start + interval:
            start, calls = now, 0
        calls += 1
        assert window.try_acquire(now) == (calls <= threshold)
        assert (window.start_time, window.counter) == (start, calls)


@given(thresholds, intervals, origins)
def test_a_window_is_over_only_after_more_than_its_interval(
    threshold: int, interval: int, origin: int
) -> None:
    window = FixedWindow(threshold, interval, origin)
    for _ in range(threshold):
        assert window.try_acquire(origin)
    assert not window.try_acquire(origin + interval)
    assert window.try_acquire(origin + interval + 1) == (threshold > 0)


@given(thresholds, intervals, origins)
def test_twice_the_threshold_passes_within_an_instant_between_two_windows(
    threshold: int, interval: int, origin: int
) -> None:
    window = FixedWindow(threshold, interval, origin)
    end = origin + interval
    passed = sum(window.try_acquire(t) for t in [end] * threshold + [end + 1] * threshold)
    assert passed == 2 * threshold


@given(thresholds, intervals, st.integers(0, 10**6))
def test_time_that_goes_back_stays_in_the_window(threshold: int, interval: int, back: int) -> None:
    window = FixedWindow(threshold, interval, 10**6)
    window.try_acquire(10**6)
    window.try_acquire(10**6 - back)
    assert (window.start_time, window.counter) == (10**6, 2)


@pytest.mark.parametrize(
    ("threshold", "interval"),
    [(-1, 10), (True, 10), (1.0, 10), (1, 0), (1, -1), (1, True), (1, 10.0)],
)
def test_the_arguments_are_ints_in_range(threshold: object, interval: object) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        # Wrong types, as is tested here.
        FixedWindow(threshold, interval, 0)  # type: ignore[arg-type]
