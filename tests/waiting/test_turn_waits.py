"""Waiting by turns, in many processes at a time that is only counted."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from tests.clock_and_stores import T0
from tests.simulation.waiting_fleet import TRIP_MS, Fleet, crowd, order

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.parametrize("limit", ["20/second", "20/second strict", "5/second"])
def test_a_crowd_costs_at_most_two_calls_for_each_admission(limit: str) -> None:
    """Where the window was filled evenly, as by a crowd that waits for long."""
    turns = crowd(Limit(limit), by_turns=True, full=True)
    plain = crowd(Limit(limit), by_turns=False, full=True)
    assert turns.calls <= 2 * len(turns.admitted)
    assert plain.calls >= 3 * len(plain.admitted)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("limit", ["20/second", "20/second strict", "5/second", "100/second"])
def test_a_crowd_is_admitted_in_about_its_order_and_at_the_limits_rate(
    limit: str, full: bool
) -> None:
    turns = crowd(Limit(limit), by_turns=True, full=full)
    plain = crowd(Limit(limit), by_turns=False, full=full)
    assert order(turns) > 0.9
    last, plain_last = turns.admitted[-1].at_ms, plain.admitted[-1].at_ms
    window_ms = Limit(limit).span * Limit(limit).bucket_ms
    assert last <= plain_last + window_ms, "one window later at most, however long the line"


@pytest.mark.parametrize("costs", [(1, 2), (1, 10), (1, 50), (1, 100), (1, 1, 1, 200)])
def test_a_crowd_of_different_costs_is_done_a_window_later_at_most(costs: tuple[int, ...]) -> None:
    ends = []
    for by_turns in (True, False):
        random, fleet = Random(1), Fleet(Limit("200/second"), 8, by_turns=by_turns)
        for number in sorted(random.randrange(50) for _ in range(60 + 1500 // sum(costs))):
            fleet.arrive(number, random.randrange(8), random.choice(costs))
        fleet.run()
        assert len(fleet.admitted) == len(fleet.waiters)
        ends.append(fleet.admitted[-1].at_ms)
    assert ends[0] <= ends[1] + 1000


def test_one_process_alone_waits_no_longer_than_without_turns() -> None:
    """All permits of a burst become free at once, and nobody else is in the line."""
    ends = []
    for by_turns in (True, False):
        fleet = Fleet(Limit("100/minute"), 1, by_turns=by_turns)
        fleet.fill()
        for _ in range(30):
            fleet.arrive(0, 0)
        fleet.run()
        ends.append(fleet.admitted[-1].at_ms)
    assert ends[0] <= ends[1] + 2 * TRIP_MS


limits = st.builds(
    lambda amount, buckets, bound: Limit(amount, 0.6, buckets, bound),
    st.one_of(st.integers(1, 12), st.just(60)),  # under the last all costs wait by turns
    st.sampled_from([1, 2, 3, 6, 10]),
    st.sampled_from(["leap", "strict"]),
)
arrival = st.tuples(
    st.integers(0, 1500),
    st.integers(0, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.none(), st.integers(0, 3000).map(lambda ms: ms / 1000)),
    st.sampled_from([None, None, None, None, 0, 100, 700]),
)


@settings(LENIENT, max_examples=60)
@given(limit=limits, arrivals=st.lists(arrival, min_size=1, max_size=20), full=st.booleans())
def test_every_waiter_is_admitted_once_or_its_timeout_ends(
    limit: Limit, arrivals: list[Any], full: bool
) -> None:
    """Waiters vanish, too, and leave their places to those behind them."""
    fleet = Fleet(limit, 4)
    if full:
        fleet.fill()
    vanish = set()
    for number, (after_ms, process, cost, timeout, vanishes) in enumerate(
        sorted(arrivals, key=str)
    ):
        fleet.arrive(after_ms, process, min(cost, limit.amount), timeout)
        if vanishes is not None:
            vanish.add(number)
            fleet.at(T0 + after_ms + vanishes, fleet.waiters[-1], "vanishes")
    fleet.run()
    admitted = Counter(admission.waiter for admission in fleet.admitted)
    assert set(admitted.values()) <= {1}
    refused = {number for number, _ in fleet.refused}
    assert not refused & set(admitted)
    for waiter in fleet.waiters:
        number = waiter.number
        assert number in admitted or number in refused or number in vanish
        if waiter.timeout is None:
            assert number not in refused
    for number, at_ms in fleet.admitted:
        waiter = fleet.waiters[number]
        if waiter.timeout is not None:
            # The last call is sent when the timeout ends, and that is a ms late at most.
            assert at_ms <= waiter.arrived_ms + waiter.timeout * 1000 + 2 * TRIP_MS
    for _, refusal in fleet.refused:
        assert refusal.retry_after >= 0  # 0 where the head is asking


@settings(LENIENT, max_examples=40)
@given(
    limit=limits,
    arrivals=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=40),
)
def test_waiters_of_one_process_are_admitted_in_the_order_they_came(
    limit: Limit, arrivals: list[tuple[int, int]]
) -> None:
    fleet = Fleet(limit, 4)
    for after_ms, process in sorted(arrivals):
        fleet.arrive(after_ms, process)
    fleet.run()
    for process in range(4):
        own = [
            a.waiter
            for a in fleet.admitted
            if fleet.waiters[a.waiter].process is fleet.processes[process]
        ]
        assert own == sorted(own)


def test_a_turn_after_the_timeout_is_no_refusal() -> None:
    """Its caller asks once more when its timeout ends: those before it may have vanished."""
    fleet = Fleet(Limit("1/second 1 buckets"), 4)
    fleet.fill()
    for process in range(3):
        fleet.arrive(process, process)
        fleet.at(T0 + 500, fleet.waiters[-1], "vanishes")
    fleet.arrive(10, 3, timeout=1.5)
    fleet.run()
    (admission,) = fleet.admitted
    assert admission.waiter == 3
    assert T0 + 1500 <= admission.at_ms <= T0 + 1500 + 10 + TRIP_MS


def test_a_timeout_that_ends_before_there_is_room_is_refused_at_once() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 2)
    fleet.fill()
    fleet.arrive(0, 0, timeout=0.9)
    fleet.run()
    ((_, refusal),) = fleet.refused
    assert refusal.retry_after == 1.0
    assert fleet.clock.now_ms() <= T0 + 900
    assert fleet.calls == 1


def test_who_is_refused_in_the_end_is_told_its_turn() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 4)
    fleet.fill()
    for process in range(3):
        fleet.arrive(process, process)
    fleet.arrive(10, 3, timeout=2.5)
    fleet.run()
    ((_, refusal),) = fleet.refused
    assert refusal.retry_after == pytest.approx(1.5, abs=0.02)


def test_places_of_vanished_callers_hold_nobody_up_for_more_than_ten_windows() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 2)
    fleet.fill()
    turns = fleet.processes[0].turns
    for _ in range(500):  # they never come
        operation = turns.attempt("key", 1, True, False)
        command = next(operation)
        with pytest.raises(StopIteration):
            operation.send(fleet.execute(command))  # type: ignore[arg-type]  # it is one
    fleet.arrive(0, 1)
    fleet.run()
    assert fleet.admitted[0].at_ms <= T0 + 11_000 + 2 * TRIP_MS
