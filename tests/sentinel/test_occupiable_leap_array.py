"""Laws of borrowing in Sentinel's arrays and nodes: when a lent pass counts, when it is lost."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.nodes import StatisticNode
from distwindow.sentinel.windows.bucket_leap_array import (
    Event,
    FutureBucketLeapArray,
    OccupiableLeapArray,
)

counts = st.integers(1, 6)
lengths = st.sampled_from([1, 10, 100, 500])
shapes = st.tuples(counts, lengths).map(lambda shape: (shape[0], shape[0] * shape[1]))
amounts = st.integers(0, 9)
gaps = st.integers(0, 700)
# What happens after a gap: a pass, a read, or passes lent from a window to come.
steps = st.lists(
    st.tuples(gaps, st.sampled_from(["pass", "read", "lend"]), st.integers(1, 6), amounts),
    max_size=40,
)
ORIGIN = 1_700_000_000_123


class Ledger:
    """The passes of each window that something rotated to, and what is lent, one per slot."""

    def __init__(self, sample_count: int, interval_ms: int) -> None:
        self.interval, self.length = interval_ms, interval_ms // sample_count
        self.passes: dict[int, int] = {}
        self.lent: dict[int, int] = {}

    def start(self, t: int) -> int:
        return t - t % self.length

    def rotate(self, now: int) -> int:
        start = self.start(now)
        self.passes.setdefault(start, self.lent.get(start, 0))
        return start

    def lend(self, t: int, n: int) -> None:
        start = self.start(t)
        self.lent.pop(start - self.interval, None)
        self.lent[start] = self.lent.get(start, 0) + n

    def total(self, now: int) -> int:
        first = self.rotate(now) - self.interval
        return sum(n for start, n in self.passes.items() if start > first)

    def waiting(self, now: int) -> int:
        return sum(n for start, n in self.lent.items() if start > now)


@given(shapes, steps)
def test_what_is_lent_counts_once_from_the_first_rotation_in_its_window(
    shape: tuple[int, int], history: list[tuple[int, str, int, int]]
) -> None:
    array, ledger = OccupiableLeapArray(*shape), Ledger(*shape)
    now = ORIGIN
    for gap, what, ahead, n in history:
        now += gap
        if what == "lend":
            # At most one interval ahead: further on it would take the slot of another window.
            later = now + min(ahead, array.sample_count) * array.window_length_ms
            array.add_waiting(later, n)
            ledger.lend(later, n)
        elif what == "pass":
            array.add(now, Event.PASS, n)
            ledger.passes[ledger.rotate(now)] += n
        else:
            assert array.total(now, Event.PASS) == ledger.total(now)
            assert array.window_pass(now) == ledger.passes[ledger.start(now)]
        assert array.waiting(now) == ledger.waiting(now)


@given(shapes, st.integers(1, 9))
def test_what_is_lent_from_a_window_that_nobody_opens_is_lost(
    shape: tuple[int, int], n: int
) -> None:
    array = OccupiableLeapArray(*shape)
    array.add(ORIGIN, Event.PASS)
    lent_at = ORIGIN + array.window_length_ms
    array.add_waiting(lent_at, n)
    assert array.total(lent_at + array.interval_ms, Event.PASS) == 0


@given(shapes, st.integers(0, 10**13))
def test_a_window_of_the_borrow_array_is_expired_as_soon_as_it_begins(
    shape: tuple[int, int], t: int
) -> None:
    array = FutureBucketLeapArray(*shape)
    array.add(t, Event.PASS)
    [window] = array.all_windows()
    assert array.is_deprecated(window.start, window)
    assert array.values(window.start) == []
    if window.start > 0:
        assert not array.is_deprecated(window.start - 1, window)
        assert array.values(window.start - 1) == [window.value]


@pytest.mark.parametrize("arguments", [(3, 1000), (0, 1000), (2, 0), (2, -1000), (2.0, 1000)])
def test_windows_that_do_not_divide_the_interval_are_refused(arguments: tuple[int, int]) -> None:
    for kind in (OccupiableLeapArray, FutureBucketLeapArray, StatisticNode):
        with pytest.raises(ConfigurationError, match=r"sample_count|interval_ms"):
            kind(*arguments)


def test_nothing_is_lent_from_a_window_before_time_0() -> None:
    array = OccupiableLeapArray(2, 1000)
    with pytest.raises(ConfigurationError, match="before time 0"):
        array.add_waiting(-1, 3)
    assert array.waiting(0) == 0


# -- StatisticNode.try_occupy_next ------------------------------------------------------------

node_shapes = st.sampled_from([(1, 500), (2, 1000), (4, 2000), (5, 1000), (10, 1000)])
passes = st.lists(st.tuples(st.integers(0, 300), amounts), max_size=25)
thresholds = st.sampled_from([0.0, 2.5, 5.0, 10.0, 40.0])


@given(
    node_shapes,
    passes,
    st.integers(0, 8),
    thresholds,
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_a_pass_is_borrowed_at_the_first_boundary_after_which_it_has_room(
    shape: tuple[int, int],
    log: list[tuple[int, int]],
    count: int,
    threshold: float,
    timeout_ms: int,
    lend: bool,
    on_boundary: bool,
) -> None:
    node = StatisticNode(*shape, occupy_timeout_ms=timeout_ms)
    length, interval = node.second.window_length_ms, shape[1]
    now = ORIGIN
    for gap, n in log:
        now += gap
        node.add_pass_request(now, n)
    if on_boundary:
        now += -now % length
    if lend:
        node.add_waiting_request(now + length, 1)
    wait = node.try_occupy_next(now, count, threshold)
    assert wait == node.try_occupy_next(now, count, threshold)

    passed = {w.start: w.value.get(Event.PASS) for w in node.second.all_windows()}
    borrowed, most = node.waiting(now), threshold * interval / 1000
    first = now - now % length + length
    possible = []
    # From one interval on, nothing is left of what has been counted so far.
    for boundary in range(first, now + min(timeout_ms, interval), length):
        counted = sum(n for start, n in passed.items() if boundary - interval < start <= now)
        if counted + borrowed + count <= most:
            possible.append(boundary - now)
    assert wait == (possible[0] if possible and borrowed < most else timeout_ms)

    if wait < timeout_ms:
        after = copy.deepcopy(node)
        after.add_waiting_request(now + wait, count)
        assert after.second.total(now + wait, Event.PASS) <= most
