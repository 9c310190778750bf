"""Laws of go-zero's rolling window: its buckets begin when it is made, and only adds move them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.windows.rolling_window import RollingWindow, SumBucket

sizes = st.integers(1, 8)
widths = st.sampled_from([1, 10, 250])
origins = st.sampled_from([0, 7, 1_700_000_000_123])
gaps = st.one_of(st.integers(0, 30), st.integers(0, 3000))
values = st.integers(-9, 9).map(float)
moves = st.lists(st.tuples(gaps, values), max_size=30)


def content(buckets: list[SumBucket]) -> list[tuple[float, int]]:
    return [(bucket.sum, bucket.count) for bucket in buckets]


def check_buckets(
    size: int, width: int, origin: int, ignore_current: bool, steps: list[tuple[int, float]]
) -> None:
    window = RollingWindow(size, width, origin, ignore_current=ignore_current)
    log: list[tuple[int, float]] = []
    now = origin
    for gap, value in steps:
        window.add(now, value)
        log.append(((now - origin) // width, value))
        now += gap
        current, newest = (now - origin) // width, log[-1][0]
        # From the oldest in the window to that of the last add, which may be the current one.
        numbers = list(range(current - size + 1, newest + 1))
        if ignore_current and newest == current:
            numbers.pop()
        assert content(window.buckets(now)) == [
            (sum(v for n, v in log if n == number), sum(n == number for n, _ in log))
            for number in numbers
        ]
        assert window.last_time == origin + newest * width


@given(sizes, widths, origins, st.booleans(), moves)
def test_buckets_are_a_recount_of_the_adds_by_age(
    size: int, width: int, origin: int, ignore_current: bool, steps: list[tuple[int, float]]
) -> None:
    check_buckets(size, width, origin, ignore_current, steps)


@given(sizes, widths, origins, st.booleans())
def test_a_new_window_shows_empty_buckets_and_without_adds_they_run_out(
    size: int, width: int, origin: int, ignore_current: bool
) -> None:
    window = RollingWindow(size, width, origin, ignore_current=ignore_current)
    assert content(window.buckets(origin)) == [(0.0, 0)] * (size - ignore_current)
    for passed in range(1, size):
        assert len(window.buckets(origin + passed * width)) == size - passed
    assert window.buckets(origin + size * width) == []


@given(sizes, widths, origins, moves)
def test_reading_changes_nothing(
    size: int, width: int, origin: int, steps: list[tuple[int, float]]
) -> None:
    read, unread = RollingWindow(size, width, origin), RollingWindow(size, width, origin)
    now = origin
    for gap, value in steps:
        now += gap
        read.buckets(now)
        read.buckets(now + 5 * width)
        read.add(now, value)
        unread.add(now, value)
        assert content(read.buckets(now)) == content(unread.buckets(now))
        assert (read.offset, read.last_time) == (unread.offset, unread.last_time)


@given(sizes, widths, origins, st.data())
def test_a_time_less_than_a_bucket_back_counts_in_the_newest_bucket(
    size: int, width: int, origin: int, data: st.DataObject
) -> None:
    window = RollingWindow(size, width, origin)
    window.add(origin, 1.0)
    back = origin - data.draw(st.integers(0, width - 1))
    window.add(back, 2.0)
    assert content(window.buckets(back))[-1] == (3.0, 2)
    assert window.last_time == origin


@given(sizes, widths, origins, st.data())
def test_a_time_a_bucket_or_more_back_expires_everything(
    size: int, width: int, origin: int, data: st.DataObject
) -> None:
    window = RollingWindow(size, width, origin)
    for n in range(size):
        window.add(origin + n * width, 1.0)
    last = window.last_time
    back = last - data.draw(st.integers(width, 20 * width))
    assert window.buckets(back) == []
    window.add(back, 5.0)
    assert content(window.buckets(back)) == [(0.0, 0)] * (size - 1) + [(5.0, 1)]
    # Aligned as before, to the first boundary that is not earlier than the clock.
    assert 0 <= window.last_time - back < width
    assert (last - window.last_time) % width == 0


class Largest:
    """A bucket that holds the largest value that was added."""

    def __init__(self) -> None:
        self.largest = 0.0

    def add(self, v: float) -> None:
        self.largest = max(self.largest, v)

    def reset(self) -> None:
        self.largest = 0.0


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9)), min_size=1, max_size=20))
def test_a_window_of_other_buckets_moves_in_the_same_way(steps: list[tuple[int, int]]) -> None:
    window = RollingWindow(4, 50, 0, new_bucket=Largest)
    log: list[tuple[int, int]] = []
    now = 0
    for gap, value in steps:
        now += gap
        window.add(now, value)
        log.append((now // 50, value))
    newest = now // 50
    assert [bucket.largest for bucket in window.buckets(now)] == [
        max((v for n, v in log if n == number), default=0)
        for number in range(newest - 3, newest + 1)
    ]


@pytest.mark.parametrize(
    ("size", "width"), [(0, 10), (-1, 10), (1, 0), (1, -5), (True, 10), (2.0, 10), (2, 10.0)]
)
def test_a_shape_is_made_of_positive_ints(size: object, width: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive int"):
        # Wrong types, as is tested here.
        RollingWindow(size, width, 0)  # type: ignore[call-overload]
