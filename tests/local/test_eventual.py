"""Eventual consistency: calls are decided in the process, and their counts are sent periodically.
Each count reaches the store once and in its own bucket, no process passes more than its limit or
share, and the fleet exceeds the limit by no more than the calls that arrive until the counts have
reached all processes.

The file is long because the checks, and the tests that these checks can fail, stand together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import ConfigurationError, StoreTimeout
from distwindow.local import key_state, pending_counts
from distwindow.local.eventual import Eventual, FleetWindow
from distwindow.local.pending_counts import PendingCounts
from distwindow.ring.clock import NEVER
from distwindow.ring.commands import CURRENT_BUCKET
from distwindow.ring.limit import Limit
from distwindow.ring.replies import FleetCounts
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from tests.clock_and_stores import T0, ManualClock
from tests.simulation.admissions import Admission, most_in_buckets, permits_by_bucket
from tests.simulation.process import MakeStrategy
from tests.simulation.scripted import ScriptedFleet, Step
from tests.simulation.scripts import scripts
from tests.simulation.timed import Arrival, most_arrivals, simulate

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
KEYS = ("a", "b")
SYNC_S = 0.1
LIMITS: list[Any] = [
    Limit(12, per=1.0, buckets=1),
    Limit(12, per=1.0, buckets=5),
    Limit(12, per=0.9, buckets=3, bound="strict"),
    (Limit(9, per=0.5, buckets=5), Limit(20, per=3.0, buckets=2)),
]
monotonic_s = st.sampled_from([0.5, 77.7, 1_000_000.0])
skews_ms = st.sampled_from([0, -3, 40, -7000, 3_600_000])
process_numbers = st.integers(0, 5)
stats_reads = st.tuples(st.just("read_stats"), process_numbers, st.sampled_from(KEYS))
kills = st.tuples(st.just("kill"), process_numbers)
forks = st.tuples(st.just("fork"), process_numbers)


def eventual(share: float = 1.0, sync_s: float = SYNC_S, max_keys: int = 100_000) -> MakeStrategy:
    options = Options(
        consistency="eventual", sync_interval=sync_s, share=share, max_local_keys=max_keys
    )
    return lambda commands, clock: Eventual(commands, clock, options)


def after_first_reply(
    limits: Any, clocks: list[tuple[float, int]], make_strategy: MakeStrategy, **options: Any
) -> ScriptedFleet:
    """Return a fleet of which each process has had a reply, so that none uses its wall clock."""
    fleet = ScriptedFleet(limits, make_strategy, clocks, start_ms=T0 + 0.3, **options)
    for process in range(len(clocks)):
        fleet.do(("call", process, "elsewhere", 1, 1))
    fleet.flush_all(rounds=2)
    fleet.admitted.clear()
    fleet.refused.clear()
    return fleet


clocks = st.lists(st.tuples(monotonic_s, skews_ms), min_size=1, max_size=4)


# -- what one process passes ----------------------------------------------------------------------


def counted(fleet: ScriptedFleet, key: str) -> list[Admission]:
    """Return the admissions of `key`, each at the start of the bucket in which its process counted
    it. A process takes the store's time from its last reply, which is never ahead.
    """
    admitted = [one for one in fleet.admitted if one.key == key]
    assert all(one.bucket_start_ms <= one.at_ms for one in admitted)
    return [one._replace(at_ms=one.bucket_start_ms) for one in admitted]


def check_processes(fleet: ScriptedFleet, share: float) -> None:
    for limit in fleet.limits:
        cap = max(1, int(share * limit.amount))
        for key in KEYS:
            for process in {one.process for one in fleet.admitted}:
                own = [one for one in counted(fleet, key) if one.process == process]
                assert most_in_buckets(permits_by_bucket(own, limit.bucket_ms), limit.span) <= cap


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    clocks=clocks,
    share=st.sampled_from([1.0, 0.5, 0.26, 0.01]),
    script=scripts(KEYS, extra=(stats_reads, forks), max_cost=1),
)
def test_no_process_passes_more_than_its_share(
    limits: Any, clocks: list[tuple[float, int]], share: float, script: list[Step]
) -> None:
    """In any window of its own counts, whatever is lost. A fork counts as a process."""
    fleet = after_first_reply(limits, clocks, eventual(share))
    fleet.run(script)
    check_processes(fleet, share)


# -- what the store counts ------------------------------------------------------------------------


def check_store(fleet: ScriptedFleet) -> None:
    """Once all counts are sent, each bucket in the store holds what was admitted in it."""
    for limit in fleet.limits:
        for key in KEYS:
            held = fleet.counts_in_store(key, limit)
            passed = permits_by_bucket(counted(fleet, key), limit.bucket_ms)
            assert held == {number: passed[number] for number in held}


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    clocks=clocks,
    script=scripts(KEYS, extra=(stats_reads, forks)),
)
def test_every_pass_reaches_the_store_once_and_in_its_bucket(
    limits: Any, clocks: list[tuple[float, int]], script: list[Step]
) -> None:
    """Whatever was lost, executed or not. Counts that are sent late do not go to a new window."""
    fleet = after_first_reply(limits, clocks, eventual())
    fleet.run(script)
    fleet.flush_all()
    check_store(fleet)


# -- when there is room again ---------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    share=st.sampled_from([1.0, 0.5, 0.26]),
    script=scripts(("a",), max_cost=1),
    cost=st.integers(1, 2),
)
def test_one_process_alone_is_admitted_at_retry_after(
    limits: Any, share: float, script: list[Step], cost: int
) -> None:
    """And not one bucket before it."""
    fleet = after_first_reply(limits, [(5.0, 0)], eventual(share))
    fleet.run(script)
    fleet.refused.clear()
    while not fleet.refused:
        fleet.do(("call", 0, "a", cost, 1))
    refusal = fleet.refused[-1][2]
    assert 0 < refusal.retry_after <= refusal.reset_after
    admitted, retry_ms = len(fleet.admitted), refusal.retry_after * 1000
    early_ms = retry_ms - fleet.limits[0].bucket_ms
    if early_ms > 0:
        fleet.run([("wait", early_ms), ("call", 0, "a", cost, 1)])
        assert len(fleet.admitted) == admitted
        retry_ms -= early_ms
    fleet.run([("wait", retry_ms + 1), ("call", 0, "a", cost, 1)])
    assert len(fleet.admitted) == admitted + 1


# -- before the first reply of the store ----------------------------------------------------------

LONG: list[Any] = [
    Limit(9, per=2000.0, buckets=10),
    (Limit(9, per=1000.0, buckets=5), Limit(12, per=3000.0, buckets=2, bound="strict")),
]
wrong_clocks = st.lists(
    st.tuples(monotonic_s, st.sampled_from([0, 40, -190_000, 190_000, -5_000_000, 5_000_000])),
    min_size=1, max_size=3,
)  # fmt: skip


def check_all_sent(fleet: ScriptedFleet, share: float = 1.0) -> None:
    """In one long window, the store holds all counts, and no process has passed more than its
    share.
    """
    for key in KEYS:
        admitted = [one for one in fleet.admitted if one.key == key]
        for limit in fleet.limits:
            assert sum(fleet.counts_in_store(key, limit).values()) == len(admitted)
            cap = max(1, int(share * limit.amount))
            assert max(Counter(one.process for one in admitted).values(), default=0) <= cap


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LONG),
    clocks=wrong_clocks,
    share=st.sampled_from([1.0, 0.5]),
    script=scripts(KEYS, extra=(forks,), without=("next_bucket",), max_cost=1, max_steps=12),
)
def test_a_wrong_wall_clock_loses_no_counts(
    limits: Any, clocks: list[tuple[float, int]], share: float, script: list[Step]
) -> None:
    """Before its first reply of the store, a process counts by its own wall clock."""
    fleet = ScriptedFleet(limits, eventual(share), clocks, start_ms=T0 + 0.3)
    fleet.run(script)
    fleet.flush_all()
    check_all_sent(fleet, share)


@pytest.mark.parametrize("skew_ms", [0, 40, 190_000, -190_000, 5_000_000, -5_000_000])
@pytest.mark.parametrize("end", ["closed", "asked for statistics"])
def test_counts_that_are_sent_before_the_first_sync_are_not_lost(skew_ms: int, end: str) -> None:
    fleet = ScriptedFleet(LONG[0], eventual(), [(5.0, skew_ms)], start_ms=T0 + 0.3)
    fleet.run([("call", 0, "a", 1, 3), ("call", 0, "b", 1, 2)])
    if end == "closed":
        fleet.close()
    else:
        fleet.run([("read_stats", 0, "a"), ("deliver", 0), ("call", 0, "b", 1, 2)])
        fleet.flush_all()
    check_all_sent(fleet)


# -- what the fleet passes beyond the limit -------------------------------------------------------


class FleetCase(NamedTuple):
    """One simulated fleet. `sync_s` and `delay_ms` (of one way) determine how long counts are on
    their way.
    """

    processes: int
    sync_s: float
    limit: Limit
    demand: float
    """As a multiple of the limit, divided equally among the processes."""
    delay_ms: float
    share: float
    seed: int


class Outcome(NamedTuple):
    over: int
    """The most that a window held beyond the limit."""
    bound: int
    most_of_one: int
    """The most that one process passed in a window."""
    arrivals: list[Arrival]
    over_after: Callable[[float], int]
    """`over` in the windows that begin at least so many ms after the first admission."""


def outcome(case: FleetCase, seconds: float) -> Outcome:
    """Let all processes receive the store's time, and then start all calls at once."""
    limit = case.limit
    rate = case.demand * limit.amount / limit.per / case.processes
    found = simulate(
        eventual(case.share, case.sync_s),
        limit,
        [rate] * case.processes,
        seconds,
        seed=case.seed,
        delay_ms=lambda rng: rng.uniform(0, case.delay_ms),
        warm_up_s=4 * case.sync_s + case.delay_ms / 100,
    )
    passed = [one._replace(at_ms=one.bucket_start_ms) for one in found.admitted]

    def most(admitted: list[Admission]) -> int:
        return most_in_buckets(permits_by_bucket(admitted, limit.bucket_ms), limit.span)

    # Two syncs and two exchanges, and some ms: the store's time is in whole ms, and the worker
    # flushes a little later than it is due.
    propagation_ms = 2000 * case.sync_s + 4 * case.delay_ms + 3
    bound = min((case.processes - 1) * limit.amount, most_arrivals(found.arrivals, propagation_ms))
    most_of_one = max(
        most([one for one in passed if one.process == i]) for i in range(case.processes)
    )

    def over_after(ms: float) -> int:
        begin_ms = min(one.at_ms for one in passed) + ms
        return most([one for one in passed if one.at_ms >= begin_ms]) - limit.amount

    over = most(passed) - limit.amount
    return Outcome(over, bound, most_of_one, found.arrivals, over_after)


def frequent_calls(
    processes: int, sync_s: float, per: float, bound: Any, calls: int, demand: float, *rest: Any
) -> FleetCase:
    """Return a fleet in which each process makes so many calls between two syncs that its counts
    of the others are never older than one sync.
    """
    rate = processes * calls / sync_s * per
    limit = Limit(max(1, int(rate / demand)), per, 1 if demand > 4 else 5, bound)
    return FleetCase(processes, sync_s, limit, demand, *rest)


cases = st.builds(
    frequent_calls,
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


def check_case(case: FleetCase, found: Outcome) -> None:
    cap = max(1, int(case.share * case.limit.amount))
    assert found.over <= found.bound
    assert found.most_of_one <= cap
    assert found.over <= case.processes * cap - case.limit.amount or found.over <= 0


@settings(LENIENT, max_examples=100)
@given(case=cases)
def test_a_fleet_exceeds_the_limit_only_until_counts_have_reached_all_processes(
    case: FleetCase,
) -> None:
    check_case(case, outcome(case, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("sync_s", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("processes", [2, 4, 16])
def test_a_busy_fleet_keeps_the_bound(processes: int, sync_s: float) -> None:
    case = FleetCase(processes, sync_s, Limit("1000/second"), 3.0, 0.25, 1.0, 5)
    found = outcome(case, 2.0)
    check_case(case, found)
    assert found.over > 0  # otherwise the bound is not tested


@pytest.mark.slow
def test_a_process_that_calls_rarely_has_the_counts_of_the_others() -> None:
    """Each of 64 processes calls five times in a window, far more rarely than it syncs. A process
    does not poll a key until it has called it twice within a window, so the first two calls are
    allowed beyond the bound. After that its counts of the others are not older than an eighth of
    the time since its last call.
    """
    case = FleetCase(64, SYNC_S, Limit("100/minute"), 3.0, 0.25, 1.0, 1)
    window_ms = case.limit.interval_ms
    found = outcome(case, 180.0)
    called_at_ms: dict[int, float] = {}
    polling: set[int] = set()
    first_calls, oldest_ms = [], 0.0
    for at, process in found.arrivals:
        gap_ms = at - called_at_ms.get(process, -1e9)
        if gap_ms > window_ms - 2000 * SYNC_S:
            polling.discard(process)
            first_calls.append(at)
        elif process not in polling:
            polling.add(process)
            first_calls.append(at)
        else:
            oldest_ms = max(oldest_ms, gap_ms / 8)
        called_at_ms[process] = at
    later = [at for at in first_calls if at > window_ms]
    unpolled = max(sum(at <= one < at + window_ms for one in first_calls) for at in later)
    stale = most_arrivals(found.arrivals, 2000 * SYNC_S + 4 * case.delay_ms + 3 + oldest_ms)
    assert unpolled + stale < 80, "otherwise the bound is not tested"
    assert found.over_after(window_ms) <= unpolled + stale


# -- the tests above can fail ----------------------------------------------------------------------


def test_a_resent_flush_without_a_sender_would_be_counted_twice() -> None:
    script: list[Step] = [("call", 0, "a", 1, 3), ("flush", 0), ("execute", 0), ("lose_reply", 0)]

    def run_script(sender: str) -> None:
        fleet = after_first_reply(LONG[0], [(5.0, 0)], eventual())
        strategy: Any = fleet.processes[0].strategy
        strategy._counts._sender = sender
        fleet.run(script)
        fleet.flush_all()
        check_store(fleet)

    run_script("abc")
    with pytest.raises(AssertionError):
        run_script("")


def test_counts_sent_late_without_their_bucket_would_be_counted_in_a_new_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: list[Step] = [("call", 0, "a", 1, 5), ("flush", 0), ("lose_reply", 0), ("wait", 900.0)]

    def run_script() -> None:
        fleet = after_first_reply(LIMITS[1], [(5.0, 0)], eventual())
        fleet.run(script)
        fleet.flush_all()
        check_store(fleet)

    run_script()
    merge_buckets = key_state.merge_buckets
    monkeypatch.setattr(
        pending_counts,
        "merge_buckets",
        lambda buckets, width: [
            replace(bucket, start=CURRENT_BUCKET) for bucket in merge_buckets(buckets, width)
        ],
    )
    with pytest.raises(AssertionError):
        run_script()


def test_a_reply_that_a_newer_one_has_overtaken_would_let_more_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts are sent twice, by the worker and by a call of `stats`."""
    script: list[Step] = [
        ("call", 0, "a", 1, 3), ("flush", 0), ("read_stats", 0, "a"), ("execute", 0),
        ("deliver", 1), ("deliver", -1), ("call", 0, "a", 1, 5), ("read_stats", 0, "a"),
        ("deliver", -1), ("deliver", 0), ("call_until_refused", 0, "a"),
    ]  # fmt: skip

    def run_script() -> None:
        fleet = after_first_reply(LIMITS[0], [(5.0, 0)], eventual())
        fleet.run(script)
        check_processes(fleet, 1.0)

    run_script()
    monkeypatch.setattr(
        PendingCounts, "_on_flush_reply", accepting_every_reply(PendingCounts._on_flush_reply)
    )
    with pytest.raises(AssertionError):
        run_script()


def accepting_every_reply(on_flush_reply: Any) -> Any:
    """Return a method that takes every reply for the newest."""

    def accept(self: Any, state: Any, batch: Any, reply: Any, sent_at: float) -> None:
        in_flight = state.in_flight
        on_flush_reply(self, state, batch, reply, sent_at)
        if in_flight is not batch and not isinstance(reply, Exception):
            self.flush_hooks.on_reply(state, reply)
            self.flush_hooks.on_flush_ended(state, self._monotonic())

    return accept


# -- a store that refuses -------------------------------------------------------------------------


def test_where_one_node_refuses_its_keys_alone_raise() -> None:
    """If all refuse, every key raises, until one is answered. Nothing that only refuses, or only
    fails, ends that.
    """
    clock: Any = ManualClock(auto_advance=False)
    strategy = eventual()(CommandCache("unit", "100/minute"), clock)
    no_right, away = ConfigurationError("no right"), StoreTimeout("lost", charged=None)

    def flush(**outcomes: Exception | None) -> None:
        answer = FleetCounts(({},), clock.now_ms())
        now, sent = clock.monotonic(), strategy.clock_probe()
        strategy.collect_commands(now, sent)
        for command, on_reply in sent:
            on_reply(outcomes.get(str(command.charges[0].key)) or answer, now)
        strategy.reschedule(now)
        clock.move(100)

    def raising(*keys: str) -> str:
        found = ""
        for key in keys:
            try:
                strategy.decide_locally(key, 1)
            except ConfigurationError:
                found += key
        return found

    assert raising("a", "b") == ""
    flush()
    for outcomes, expected in (
        ({"b": no_right}, "b"), ({"b": away}, "b"), ({}, ""),
        (dict.fromkeys("abcd", no_right), "abcd"), (dict.fromkeys("abcd", away), "abcd"),
        ({"a": no_right}, ""), ({"a": no_right}, "a"), ({}, ""),
    ):  # fmt: skip
        raising("a", "b")
        flush(**outcomes)
        assert raising("a", "b", "c", "d") == expected, outcomes


# -- the clock offset, evicted keys, and an unreachable store --------------------------------------


@pytest.mark.parametrize("skew_ms", [0, -7000, 3_600_000])
def test_calls_while_the_clock_offset_is_corrected_are_counted(skew_ms: int) -> None:
    """Other threads call between the moment at which counts are moved to the buckets of the store's
    clock and the moment at which the permits left are recomputed.
    """
    limit = Limit(60, per=3600.0)
    fleet = ScriptedFleet(limit, eventual(), [(5.0, skew_ms)], start_ms=T0)
    strategy: Any = fleet.processes[0].strategy
    sync = strategy._sync
    fleet.run([("call", 0, "a", 1, 5)])
    recompute_permits_left, admitted = sync.recompute_permits_left, 0

    def call_before(state: Any, now: float) -> None:
        nonlocal admitted
        sync.recompute_permits_left = recompute_permits_left
        for _ in range(100):
            admitted += bool(strategy.decide_locally("a", 1))
        recompute_permits_left(state, now)

    sync.recompute_permits_left = call_before
    fleet.flush_all()
    sync.recompute_permits_left = recompute_permits_left
    assert admitted > 0
    assert sum(fleet.counts_in_store("a", limit).values()) == admitted + 5
    assert admitted + 5 == limit.amount


def test_a_lost_flush_loses_no_counts_of_evicted_keys() -> None:
    """Many more keys are in use than `max_local_keys`, and each flush whose reply is lost is sent
    again.
    """
    limit = Limit("100/hour")
    fleet = ScriptedFleet(limit, eventual(max_keys=2), [(5.0, 0)], start_ms=T0 + 5)
    keys = [f"k{number}" for number in range(40)]
    fleet.run([("call", 0, "k0", 1, 1)])
    fleet.flush_all()
    for end in ("lose_reply", "deliver", "lose_reply", "lose_reply", "deliver"):
        fleet.run([("call", 0, key, 1, 1) for key in keys])
        fleet.run([("wait", 150.0), ("flush", 0), (end, -1)])
    fleet.flush_all()
    counts = {key: sum(fleet.counts_in_store(key, limit).values()) for key in keys}
    assert counts == {key: 5 + (key == "k0") for key in keys}


def test_pending_counts_are_bounded_while_the_store_is_unreachable() -> None:
    """Very many keys are called once each, for much longer than an outage takes."""
    fleet = ScriptedFleet(Limit("100/day"), eventual(max_keys=10), [(5.0, 0)], start_ms=T0)
    strategy: Any = fleet.processes[0].strategy
    fleet.run([("call", 0, "k", 1, 1)])
    fleet.flush_all()
    for second in range(60):
        fleet.run([("call", 0, f"k{second}-{number}", 1, 1) for number in range(20)])
        fleet.run([("wait", 1000.0), ("flush", 0), ("lose_reply", -1)])
        assert strategy._key_states.count_evicted_unacknowledged() <= 20 * 8


# -- what is counted while the windows are computed anew ------------------------------------------


def test_a_corrected_clock_lets_no_permit_of_a_share_leave_its_window_early() -> None:
    limit = Limit(12, per=1.0, buckets=5)
    for at_ms, shift_ms, later_ms in product(
        (0, 99, 199), range(-210, 220, 30), range(0, 1300, 40)
    ):
        corrected, right = FleetWindow(limit, 0.5), FleetWindow(limit, 0.5)
        corrected.count_own(T0 + at_ms, 1)
        corrected.shift_own(shift_ms)
        right.count_own(T0 + at_ms + shift_ms, 1)
        now_ms = T0 + at_ms + shift_ms + later_ms
        assert corrected.permits_left(now_ms, ()) <= right.permits_left(now_ms, ())


def test_a_call_of_another_thread_while_the_permits_are_computed_takes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = after_first_reply(LIMITS[0], [(5.0, 0)], eventual())
    fleet.do(("call", 0, "a", 1, 1))
    process: Any = fleet.processes[0]
    state, permits_left = process.strategy._get("a"), FleetWindow.permits_left

    def permits_left_then_a_call(window: FleetWindow, *arguments: Any) -> int:
        left = permits_left(window, *arguments)
        state.passed += 1
        return left

    monkeypatch.setattr(FleetWindow, "permits_left", permits_left_then_a_call)
    process.strategy._sync.recompute_permits_left(state, process.clock.monotonic())
    assert state.permits_left == 12 - 2


def test_a_key_is_polled_once_it_was_called_at_two_flushes() -> None:
    """There may be very many keys that are called once."""
    fleet = after_first_reply(LIMITS[0], [(5.0, 0)], eventual())
    for is_polled in (False, True):
        fleet.do(("call", 0, "a", 1, 1))
        fleet.flush_all(rounds=1)
        assert (fleet.processes[0].strategy.next_due_at < NEVER) == is_polled
