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
gaps = st.lists(st.one_of(st.integers(-5, 12), st.integers(-2000, 3000)), max_size=40)
"""Between calls, ms; the clock may go back."""


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


@pytest.mark.parametrize(
    ("threshold", "interval"),
    [(-1, 10), (True, 10), (1.0, 10), (1, 0), (1, -1), (1, True), (1, 10.0)],
)
def test_the_arguments_are_ints_in_range(threshold: object, interval: object) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        # Wrong types, as is tested here.
        FixedWindow(threshold, interval, 0)  # type: ignore[arg-type]
