"""Decided here, settled periodically: what every process has passed reaches the store once and in
its own bucket, no process passes more than its limit or share, and the fleet no more beyond the
limit than it can pass until the news has come round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.consistency import key_state, pending_counts
from distwindow.consistency.eventual import Eventual
from distwindow.consistency.pending_counts import PendingCounts
from distwindow.core.limit import Limit
from distwindow.protocol.commands import CURRENT_BUCKET
from tests.crowd import (
    Admission,
    Arrival,
    Crowd,
    Mode,
    Step,
    buckets_of,
    busiest,
    most_in_run,
    simulated,
    steps,
)
from tests.unit.stage import T0

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
KEYS = ("a", "b")
S = 0.1
LIMITS: list[Any] = [
    Limit(12, per=1.0, buckets=1),
    Limit(12, per=1.0, buckets=5),
    Limit(12, per=0.9, buckets=3, bound="strict"),
    (Limit(9, per=0.5, buckets=5), Limit(20, per=3.0, buckets=2)),
]
shows = st.sampled_from([0.5, 77.7, 1_000_000.0])
skews = st.sampled_from([0, -3, 40, -7000, 3_600_000])
who = st.integers(0, 5)
asks = st.tuples(st.just("asks"), who, st.sampled_from(KEYS))
dies = st.tuples(st.just("dies"), who)
forks = st.tuples(st.just("forks"), who)


def syncing(share: float = 1.0, sync: float = S) -> Mode:
    return lambda commands, clock: Eventual(commands, clock, 1000, sync, share)


def acquainted(limits: Any, starts: list[tuple[float, int]], mode: Mode, **how: Any) -> Crowd:
    """Have every process receive a reply first, so that none uses its wall clock."""
    crowd = Crowd(limits, mode, starts, start_ms=T0 + 0.3, **how)
    for name in range(len(starts)):
        crowd.do(("calls", name, "elsewhere", 1, 1))
    crowd.settle(rounds=2)
    crowd.admitted.clear()
    crowd.refused.clear()
    return crowd


starts = st.lists(st.tuples(shows, skews), min_size=1, max_size=4)


# -- what one process passes ----------------------------------------------------------------------


def counted(crowd: Crowd, key: str) -> list[Admission]:
    """What was passed, at the moments at which it was counted: a process has the store's time
    by its last reply, which is never ahead.
    """
    mine = [one for one in crowd.admitted if one.key == key]
    assert all(one.counted_in <= one.at for one in mine)
    return [one._replace(at=one.counted_in) for one in mine]


def check_each(crowd: Crowd, share: float) -> None:
    for limit in crowd.limits:
        cap = max(1, int(share * limit.amount))
        for key in KEYS:
            for name in {one.who for one in crowd.admitted}:
                mine = [one for one in counted(crowd, key) if one.who == name]
                assert most_in_run(buckets_of(mine, limit.bucket_ms), limit.span) <= cap


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    starts=starts,
    share=st.sampled_from([1.0, 0.5, 0.26, 0.01]),
    script=steps(KEYS, also=(asks, forks), dearest=1),
)
def test_no_process_passes_more_than_its_share(
    limits: Any, starts: list[tuple[float, int]], share: float, script: list[Step]
) -> None:
    """In any window by its own reckoning, whatever is lost; and a fork is a process."""
    crowd = acquainted(limits, starts, syncing(share))
    crowd.play(script)
    check_each(crowd, share)


# -- what the store counts ------------------------------------------------------------------------


def check_store(crowd: Crowd) -> None:
    """Each bucket in the store has what was admitted in it, once all counts are sent."""
    for limit in crowd.limits:
        for key in KEYS:
            held = crowd.held(key, limit)
            passed = buckets_of(counted(crowd, key), limit.bucket_ms)
            assert held == {number: passed[number] for number in held}


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS), starts=starts, script=steps(KEYS, also=(asks, forks))
)  # fmt: skip
def test_every_pass_reaches_the_store_once_and_in_its_bucket(
    limits: Any, starts: list[tuple[float, int]], script: list[Step]
) -> None:
    """Whatever was lost, executed or not, however late: old hits do not land in a new window."""
    crowd = acquainted(limits, starts, syncing())
    crowd.play(script)
    crowd.settle()
    check_store(crowd)


# -- when there is room again ---------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    share=st.sampled_from([1.0, 0.5, 0.26]),
    script=steps(("a",), dearest=1),
    cost=st.integers(1, 2),
)
def test_one_process_alone_is_admitted_at_retry_after(
    limits: Any, share: float, script: list[Step], cost: int
) -> None:
    """Not a bucket earlier, either."""
    crowd = acquainted(limits, [(5.0, 0)], syncing(share))
    crowd.play(script)
    crowd.refused.clear()
    while not crowd.refused:
        crowd.do(("calls", 0, "a", cost, 1))
    refusal = crowd.refused[-1][2]
    assert 0 < refusal.retry_after <= refusal.reset_after
    known, retry_ms = len(crowd.admitted), refusal.retry_after * 1000
    early = retry_ms - crowd.limits[0].bucket_ms
    if early > 0:
        crowd.play([("passes", early), ("calls", 0, "a", cost, 1)])
        assert len(crowd.admitted) == known
        retry_ms -= early
    crowd.play([("passes", retry_ms + 1), ("calls", 0, "a", cost, 1)])
    assert len(crowd.admitted) == known + 1


# -- before the first reply of the store ----------------------------------------------------------

LONG: list[Any] = [
    Limit(9, per=2000.0, buckets=10),
    (Limit(9, per=1000.0, buckets=5), Limit(12, per=3000.0, buckets=2, bound="strict")),
]
wrong = st.lists(
    st.tuples(shows, st.sampled_from([0, 40, -190_000, 190_000, -5_000_000, 5_000_000])),
    min_size=1, max_size=3,
)  # fmt: skip


def check_all_sent(crowd: Crowd, share: float = 1.0) -> None:
    """The store has everything, and nobody has passed more than its share, in one long window."""
    for key in KEYS:
        mine = [one for one in crowd.admitted if one.key == key]
        for limit in crowd.limits:
            assert sum(crowd.held(key, limit).values()) == len(mine)
            cap = max(1, int(share * limit.amount))
            assert max(Counter(one.who for one in mine).values(), default=0) <= cap


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LONG),
    starts=wrong,
    share=st.sampled_from([1.0, 0.5]),
    script=steps(KEYS, also=(forks,), without=("turns",), dearest=1, most=12),
)
def test_a_wall_clock_that_is_wrong_costs_nothing(
    limits: Any, starts: list[tuple[float, int]], share: float, script: list[Step]
) -> None:
    """A process that has had no reply of the store yet counts by its own wall clock."""
    crowd = Crowd(limits, syncing(share), starts, start_ms=T0 + 0.3)
    crowd.play(script)
    crowd.settle()
    check_all_sent(crowd, share)


@pytest.mark.parametrize("skew_ms", [0, 40, 190_000, -190_000, 5_000_000, -5_000_000])
@pytest.mark.parametrize("end", ["closed", "asked for statistics"])
def test_nothing_is_lost_that_is_sent_before_the_first_sync(skew_ms: int, end: str) -> None:
    crowd = Crowd(LONG[0], syncing(), [(5.0, skew_ms)], start_ms=T0 + 0.3)
    crowd.play([("calls", 0, "a", 1, 3), ("calls", 0, "b", 1, 2)])
    if end == "closed":
        crowd.close()
    else:
        crowd.play([("asks", 0, "a"), ("answer", 0), ("calls", 0, "b", 1, 2)])
        crowd.settle()
    check_all_sent(crowd)


# -- what the fleet passes beyond the limit -------------------------------------------------------


class Fleet(NamedTuple):
    """A simulated fleet. `sync` and `delay_ms` (of one way) are how long counts take."""

    processes: int
    sync: float
    limit: Limit
    load: float
    """Demand, in parts of the limit, which all processes get alike."""
    delay_ms: float
    share: float
    seed: int


class Outcome(NamedTuple):
    over: int
    """The most that a window held beyond the limit."""
    bound: int
    each: int
    """The most that one process passed in a window."""
    arrivals: list[Arrival]
    over_after: Callable[[float], int]
    """The same, in windows that begin so many ms after the first call."""


def outcome(fleet: Fleet, seconds: float) -> Outcome:
    """Have all processes receive the store's time, and then start the load at once."""
    limit = fleet.limit
    rate = fleet.load * limit.amount / limit.per / fleet.processes
    found = simulated(
        syncing(fleet.share, fleet.sync),
        limit,
        [rate] * fleet.processes,
        seconds,
        seed=fleet.seed,
        delay_ms=lambda chance: chance.uniform(0, fleet.delay_ms),
        warm=4 * fleet.sync + fleet.delay_ms / 100,
    )
    passed = [one._replace(at=one.counted_in) for one in found.admitted]

    def most(admitted: list[Admission]) -> int:
        return most_in_run(buckets_of(admitted, limit.bucket_ms), limit.span)

    # Two syncs and two ways; the store's whole ms and the worker's punctuality come on top.
    news_ms = 2000 * fleet.sync + 4 * fleet.delay_ms + 3
    bound = min((fleet.processes - 1) * limit.amount, busiest(found.arrivals, news_ms))
    each = max(most([one for one in passed if one.who == i]) for i in range(fleet.processes))

    def over_after(ms: float) -> int:
        begins = min(one.at for one in passed) + ms
        return most([one for one in passed if one.at >= begins]) - limit.amount

    over = most(passed) - limit.amount
    return Outcome(over, bound, each, found.arrivals, over_after)


def frequent(
    processes: int, sync: float, per: float, bound: Any, calls: int, load: float, *rest: Any
) -> Fleet:
    """A fleet in which each process calls so many times within a sync: what it knows of the others
    is never older than that.
    """
    demand = processes * calls / sync * per
    limit = Limit(max(1, int(demand / load)), per, 1 if load > 4 else 5, bound)
    return Fleet(processes, sync, limit, load, *rest)


fleets = st.builds(
    frequent,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from(["leap", "strict"]),
    st.integers(6, 15),
    st.sampled_from([0.9, 1.5, 5.0, 20.0]),
    st.sampled_from([0.25, 5.0, 20.0]),
    st.sampled_from([1.0, 1.0, 0.5, 0.2]),
    st.integers(0, 10**6),
)


def check_fleet(fleet: Fleet, found: Outcome) -> None:
    cap = max(1, int(fleet.share * fleet.limit.amount))
    assert found.over <= found.bound
    assert found.each <= cap
    assert found.over <= fleet.processes * cap - fleet.limit.amount or found.over <= 0


@settings(LENIENT, max_examples=40)
@given(fleet=fleets)
def test_a_fleet_passes_no_more_than_until_counts_have_reached_all(
    fleet: Fleet,
) -> None:
    check_fleet(fleet, outcome(fleet, 1.0))


@pytest.mark.slow
@settings(LENIENT, max_examples=150)
@given(fleet=fleets)
def test_nor_does_any_of_many_fleets(fleet: Fleet) -> None:
    check_fleet(fleet, outcome(fleet, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("processes", [2, 4, 16])
def test_nor_does_a_busy_one(processes: int, sync: float) -> None:
    fleet = Fleet(processes, sync, Limit("1000/second"), 3.0, 0.25, 1.0, 5)
    found = outcome(fleet, 2.0)
    check_fleet(fleet, found)
    assert found.over > 0  # the bound is about something


@pytest.mark.slow
def test_a_process_that_calls_now_and_then_has_the_counts_of_the_others() -> None:
    """Each of 64 calls five times in a window, far more rarely than it syncs. A process is a
    stranger to a key until it has called twice within a window: its calls come on top. And what
    the others know is not older than an eighth of the time since their last call.
    """
    fleet = Fleet(64, S, Limit("100/minute"), 3.0, 0.25, 1.0, 1)
    window_ms = fleet.limit.interval_ms
    found = outcome(fleet, 180.0)
    before: dict[int, float] = {}
    acquainted_with: set[int] = set()
    strangers, oldest = [], 0.0
    for at, who in found.arrivals:
        gap = at - before.get(who, -1e9)
        if gap > window_ms - 2000 * S:
            acquainted_with.discard(who)
            strangers.append(at)
        elif who not in acquainted_with:
            acquainted_with.add(who)
            strangers.append(at)
        else:
            oldest = max(oldest, gap / 8)
        before[who] = at
    later = [at for at in strangers if at > window_ms]
    come = max(sum(at <= one < at + window_ms for one in strangers) for at in later)
    stale = busiest(found.arrivals, 2000 * S + 4 * fleet.delay_ms + 3 + oldest)
    assert come + stale < 80, "or this law says nothing"
    assert found.over_after(window_ms) <= come + stale


# -- the tests above can fail ----------------------------------------------------------------------


def test_counts_that_are_sent_again_unrecognised_would_count_twice() -> None:
    story: list[Step] = [("calls", 0, "a", 1, 3), ("works", 0), ("reach", 0), ("lose", 0)]

    def play(sender: str) -> None:
        crowd = acquainted(LONG[0], [(5.0, 0)], syncing())
        process: Any = crowd.alive[0].strategy
        process._counts._sender = sender
        crowd.play(story)
        crowd.settle()
        check_store(crowd)

    play("abc")
    with pytest.raises(AssertionError):
        play("")


def test_hits_sent_late_without_their_bucket_would_be_counted_in_a_new_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[Step] = [("calls", 0, "a", 1, 5), ("works", 0), ("lose", 0), ("passes", 900.0)]

    def play() -> None:
        crowd = acquainted(LIMITS[1], [(5.0, 0)], syncing())
        crowd.play(story)
        crowd.settle()
        check_store(crowd)

    play()
    whole = key_state.merge_buckets
    monkeypatch.setattr(
        pending_counts,
        "merge_buckets",
        lambda seen, width: [replace(b, start=CURRENT_BUCKET) for b in whole(seen, width)],
    )
    with pytest.raises(AssertionError):
        play()


def test_a_reply_that_is_overtaken_by_a_newer_one_would_let_more_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts that were sent twice, by the worker and by a call of `stats`."""
    story: list[Step] = [
        ("calls", 0, "a", 1, 3), ("works", 0), ("asks", 0, "a"), ("reach", 0), ("answer", 1),
        ("answer", -1), ("calls", 0, "a", 1, 5), ("asks", 0, "a"), ("answer", -1), ("answer", 0),
        ("rushes", 0, "a"),
    ]  # fmt: skip

    def play() -> None:
        crowd = acquainted(LIMITS[0], [(5.0, 0)], syncing())
        crowd.play(story)
        check_each(crowd, 1.0)

    play()
    monkeypatch.setattr(PendingCounts, "_on_flush_reply", believing(PendingCounts._on_flush_reply))
    with pytest.raises(AssertionError):
        play()


def believing(flushed: Any) -> Any:
    """Every reply is taken for the newest."""

    def hears(self: Any, state: Any, batch: Any, reply: Any, sent_at: float) -> None:
        known = state.in_flight
        flushed(self, state, batch, reply, sent_at)
        if known is not batch and not isinstance(reply, Exception):
            self.observer.on_fleet_counts(state, reply)
            self.observer.on_flush_ended(state, self._monotonic())

    return hears


# -- the first moments, and more keys than are kept -----------------------------------------------


@pytest.mark.parametrize("skew_ms", [0, -7000, 3_600_000])
def test_hits_while_the_clock_offset_is_corrected_are_counted(skew_ms: int) -> None:
    """Other threads go on between the moment in which counts are moved to the buckets of the
    store's clock and that in which the permits left are recomputed.
    """
    limit = Limit(60, per=3600.0)
    crowd = Crowd(limit, syncing(), [(5.0, skew_ms)], start_ms=T0)
    strategy: Any = crowd.alive[0].strategy
    sync = strategy._sync
    crowd.play([("calls", 0, "a", 1, 5)])
    estimate, hits = sync.recompute_left, 0

    def hit_before(state: Any, now: float) -> None:
        nonlocal hits
        sync.recompute_left = estimate
        for _ in range(100):
            hits += bool(strategy.decide_locally("a", 1))
        estimate(state, now)

    sync.recompute_left = hit_before
    crowd.settle()
    sync.recompute_left = estimate
    assert hits > 0
    assert sum(crowd.held("a", limit).values()) == hits + 5
    assert hits + 5 == limit.amount


def test_a_reset_connection_loses_no_counts_of_keys_that_are_not_kept_any_more() -> None:
    """Many more keys are in use than `max_local_keys`, and each flush that is lost is repeated."""
    limit = Limit("100/hour")
    crowd = Crowd(
        limit, lambda commands, clock: Eventual(commands, clock, 2, S), [(5.0, 0)], start_ms=T0 + 5
    )
    keys = [f"k{number}" for number in range(40)]
    crowd.play([("calls", 0, "k0", 1, 1)])
    crowd.settle()
    for fate in ("lose", "answer", "lose", "lose", "answer"):
        crowd.play([("calls", 0, key, 1, 1) for key in keys])
        crowd.play([("passes", 150.0), ("works", 0), (fate, -1)])
    crowd.settle()
    counts = {key: sum(crowd.held(key, limit).values()) for key in keys}
    assert counts == {key: 5 + (key == "k0") for key in keys}


def test_what_waits_for_a_store_that_stays_away_is_bounded() -> None:
    """A flood of keys that are called once, for much longer than an accident takes."""
    crowd = Crowd(
        Limit("100/day"),
        lambda commands, clock: Eventual(commands, clock, 10, S),
        [(5.0, 0)],
        start_ms=T0,
    )
    strategy: Any = crowd.alive[0].strategy
    crowd.play([("calls", 0, "k", 1, 1)])
    crowd.settle()
    for second in range(60):
        crowd.play([("calls", 0, f"k{second}-{number}", 1, 1) for number in range(20)])
        crowd.play([("passes", 1000.0), ("works", 0), ("lose", -1)])
        assert strategy._key_states.count_evicted_unsent() <= 20 * 8
