"""Cached refusals: each is what the store would decide; none is repeated beyond the moment that the
store named, or for longer than a bucket; and each is counted once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.local import base
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Lease, Peek
from distwindow.ring.decision import Decision
from distwindow.ring.limit import Limit
from distwindow.ring.replies import LeaseReply
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from tests.clock_and_stores import T0
from tests.simulation.process import LocalClock, MakeStrategy, SimulatedStore
from tests.simulation.scripted import ScriptedFleet, Step
from tests.simulation.scripts import scripts

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
KEYS = ("a", "b")
LIMITS: list[Any] = [
    Limit(12, per=1.0, buckets=1),
    Limit(12, per=1.0, buckets=5),
    Limit(12, per=0.9, buckets=3, bound="strict"),
    (Limit(9, per=0.5, buckets=5), Limit(20, per=3.0, buckets=2)),
]
clocks = st.lists(
    st.tuples(
        st.sampled_from([0.5, 77.7, 1_000_000.0]), st.sampled_from([0, -3, -7000, 3_600_000])
    ),
    min_size=1,
    max_size=3,
)
process_numbers = st.integers(0, 5)
forks = st.tuples(st.just("fork"), process_numbers)
stats_reads = st.tuples(st.just("read_stats"), process_numbers, st.sampled_from(KEYS))


def direct(max_keys: int = 1000) -> MakeStrategy:
    return lambda commands, clock: Direct(commands, clock, Options(max_local_keys=max_keys))


def leased(max_keys: int = 1000) -> MakeStrategy:
    return lambda commands, clock: Leased(commands, clock, Options(max_local_keys=max_keys))


def eventual(max_keys: int = 1000) -> MakeStrategy:
    return lambda commands, clock: Eventual(commands, clock, Options(max_local_keys=max_keys))


# -- compared with the store ----------------------------------------------------------------------


def would_admit(fleet: ScriptedFleet, key: str, cost: int) -> bool:
    """Return the decision that the store would make now."""
    command = Peek(CommandCache("fleet", fleet.limits).acquire_command(key, cost).charges)
    return bool(fleet.store.memory.execute(command).admitted)


def check_against_the_store(fleet: ScriptedFleet) -> None:
    """From now on compare each cached refusal with the decision of the store."""

    def compare(number: int, key: str, decision: Decision) -> None:
        assert decision.source == "deny_cache"
        assert not would_admit(fleet, key, decision.cost)
        assert decision.remaining < decision.cost
        assert 0 < decision.retry_after <= decision.reset_after
        assert decision.charged is None

    fleet.on_local_decision = compare


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    clocks=clocks,
    max_keys=st.sampled_from([1, 1000]),
    script=scripts(KEYS, extra=(forks,)),
)
def test_a_cached_refusal_is_what_the_store_would_decide(
    limits: Any, clocks: list[tuple[float, int]], max_keys: int, script: list[Step]
) -> None:
    fleet = ScriptedFleet(limits, direct(max_keys), clocks, start_ms=T0 + 0.3)
    check_against_the_store(fleet)
    fleet.run(script)


def test_a_refusal_cached_beyond_the_moment_it_named_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: list[Step] = [
        ("next_bucket", 1.0),
        ("call_until_refused", 0, "a"),
        ("next_bucket", 2.0),
        ("call", 0, "a", 1, 1),
    ]

    def run_script() -> None:
        fleet = ScriptedFleet(Limit(12, per=1.0, buckets=1), direct(), [(5.0, 0)], start_ms=T0)
        check_against_the_store(fleet)
        fleet.run(script)

    run_script()
    monkeypatch.setattr(base, "CLOCK_MARGIN_S", -0.5)
    with pytest.raises(AssertionError):
        run_script()


def test_a_refusal_whose_reply_is_late_is_cached_no_longer_for_that() -> None:
    fleet = ScriptedFleet(Limit(12, per=1.0, buckets=1), direct(), [(5.0, 0)], start_ms=T0)
    check_against_the_store(fleet)
    fleet.run([("next_bucket", 1.0), ("call", 0, "a", 12, 1), ("begin_call", 0, "a", 1)])
    fleet.run([("execute", 0), ("wait", 400.0), ("deliver", 0)])
    fleet.run([("wait", 500.0), ("call", 0, "a", 1, 1)])
    assert fleet.refused[-1][2].source == "deny_cache"
    fleet.run([("next_bucket", 1.0), ("call", 0, "a", 1, 1)])
    assert len(fleet.admitted) == 2


def test_a_refusal_of_a_higher_cost_is_no_answer_to_peek() -> None:
    fleet = ScriptedFleet(LIMITS[0], direct(), [(5.0, 0)], start_ms=T0 + 0.3)
    fleet.run([("call", 0, "a", 11, 1), ("call", 0, "a", 2, 1)])
    assert fleet.processes[0].strategy.peek("a") is None
    fleet.run([("call", 0, "a", 1, 2)])
    assert fleet.processes[0].strategy.peek("a") is not None


def test_a_refusal_of_a_higher_cost_that_arrives_late_replaces_none_of_a_lower_one() -> None:
    fleet = ScriptedFleet(LIMITS[0], direct(), [(5.0, 0)], start_ms=T0)
    fleet.run([("next_bucket", 1.0), ("call", 0, "a", 12, 1), ("begin_call", 0, "a", 5)])
    fleet.run([("execute", 0), ("call", 0, "a", 1, 1), ("deliver", 0), ("call", 0, "a", 2, 1)])
    assert [(one.cost, one.source) for _, _, one in fleet.refused] == [
        (1, "store"), (5, "store"), (2, "deny_cache"),
    ]  # fmt: skip
    impossible = fleet.processes[0].strategy.decide_locally("a", 13)
    assert impossible is None, "no refusal says when it would be admitted"


@pytest.mark.parametrize("make_strategy", [direct(), leased()])
def test_a_refund_ends_the_refusals_of_its_own_process_at_once(make_strategy: MakeStrategy) -> None:
    fleet = ScriptedFleet(LIMITS[0], make_strategy, [(5.0, 0)], start_ms=T0)
    fleet.run([("next_bucket", 1.0), ("call", 0, "a", 12, 1), ("call", 0, "a", 1, 1)])
    assert fleet.processes[0].strategy.peek("a") is not None
    fleet.run([("refund", 0), ("call", 0, "a", 1, 1)])
    assert (len(fleet.admitted), len(fleet.refused)) == (2, 1)


def test_a_refusal_of_a_limit_that_warms_up_is_not_cached() -> None:
    """What others are admitted warms it up, so there may be room earlier."""
    limit = Limit(12, per=10.0, warmup=10.0)
    strategy = direct()(CommandCache("unit", limit), LocalClock(SimulatedStore(T0)))
    refused = Decision(False, "a", 1, limit, 0, 5.0, 10.0, 0.0, "over_limit", "store", T0)
    assert strategy.cache_refusal("a", refused, T0 / 1000) is refused
    assert strategy.peek("a") is None


# -- for how long ---------------------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    limit=st.sampled_from([limit for limit in LIMITS if isinstance(limit, Limit)]),
    make_strategy=st.sampled_from([direct(), leased()]),
    fills=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0.0, 30.0, 400.0])), min_size=1, max_size=8
    ),
    costs=st.tuples(st.integers(1, 9), st.integers(0, 9)),
    part=st.floats(0, 1.2),
)
def test_a_refusal_is_cached_until_the_moment_it_named(
    limit: Limit,
    make_strategy: MakeStrategy,
    fills: list[tuple[int, float]],
    costs: tuple[int, int],
    part: float,
) -> None:
    """Or for one bucket, if that ends sooner. Until then no call of that cost or more goes to the
    store, and after that each does.
    """
    fleet = ScriptedFleet(limit, make_strategy, [(5.0, 0), (9.0, 0)], start_ms=T0 + 0.3)
    for cost, ms in fills:
        fleet.run([("call", 0, "a", cost, 1), ("wait", ms)])
    refused = len(fleet.refused)
    while len(fleet.refused) == refused:
        fleet.do(("call", 1, "a", costs[0], 1))
    refusal = fleet.refused[-1][2]
    assert refusal.source == "store"
    cached_ms = min(refusal.retry_after * 1000, limit.bucket_ms) - 1
    wait_ms = part * cached_ms
    executed = fleet.store.executed
    fleet.run([("wait", wait_ms), ("call", 1, "a", min(12, costs[0] + costs[1]), 1)])
    if wait_ms < cached_ms - 0.1:
        assert fleet.store.executed == executed
        assert fleet.refused[-1][2].source == "deny_cache"
    elif wait_ms > cached_ms + 0.1:
        assert fleet.store.executed > executed


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    make_strategy=st.sampled_from([direct, leased]),
    clocks=clocks,
    max_keys=st.sampled_from([1, 1000]),
    script=scripts(
        KEYS,
        extra=(
            forks,
            st.tuples(st.just("refund"), process_numbers),
            st.tuples(st.just("refund"), process_numbers),
        ),
    ),
)
def test_a_refund_takes_effect_within_a_bucket(
    limits: Any,
    make_strategy: Any,
    clocks: list[tuple[float, int]],
    max_keys: int,
    script: list[Step],
) -> None:
    """A process repeats only refusals of the last `bucket_ms`, and of that cost or less."""
    fleet = ScriptedFleet(limits, make_strategy(max_keys), clocks, start_ms=T0 + 0.3)

    def compare(number: int, key: str, decision: Decision) -> None:
        if decision.allowed:
            return
        since = fleet.store.ms - decision.limit.bucket_ms
        assert any(
            is_refusal(command, reply) and command.charges[0].key == key
            and command.charges[0].cost <= decision.cost and time_of(reply) > since
            for process, command, reply in fleet.delivered if process == number
        )  # fmt: skip

    fleet.on_local_decision = compare
    fleet.run(script)


def is_refusal(command: Command[Any], reply: Any) -> bool:
    if isinstance(command, Acquire):  # in a pipeline its reply is not a `Decision`
        return not (reply.allowed if isinstance(reply, Decision) else reply.admitted)
    return isinstance(command, Lease) and not reply.acquire_reply.admitted


def time_of(reply: Any) -> int:
    return int(reply.acquire_reply.now_ms if isinstance(reply, LeaseReply) else reply.now_ms)


# -- what the store counts ------------------------------------------------------------------------

LONG: list[Any] = [
    Limit(9, per=2000.0, buckets=10),
    (Limit(9, per=1000.0, buckets=5), Limit(12, per=3000.0, buckets=2, bound="strict")),
]


def check_blocks(fleet: ScriptedFleet) -> None:
    """Once all counts are sent, the store has counted each refusal once."""
    blocked = Counter[str]()
    for _, key, decision in fleet.refused:
        if decision.source != "store":
            blocked[key] += decision.cost
    for command, reply in fleet.store.log:
        if is_refusal(command, reply) and not (isinstance(command, Lease) and command.prefetch):
            blocked[str(command.charges[0].key)] += command.charges[0].cost
    for limit in fleet.limits:
        for key in KEYS:
            assert sum(fleet.counts_in_store(key, limit, blocked=True).values()) == blocked[key]


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LONG),
    make_strategy=st.sampled_from([direct, leased, eventual]),
    clocks=clocks,
    max_keys=st.sampled_from([1, 1000]),
    script=scripts(KEYS, extra=(forks, stats_reads), without=("next_bucket",)),  # no bucket expires
)
def test_each_refusal_is_counted_once(
    limits: Any,
    make_strategy: Any,
    clocks: list[tuple[float, int]],
    max_keys: int,
    script: list[Step],
) -> None:
    """Whatever is lost, because a flush is sent again until its reply arrives."""
    fleet = ScriptedFleet(limits, make_strategy(max_keys), clocks, start_ms=T0 + 0.3)
    fleet.run(script)
    fleet.flush_all()
    check_blocks(fleet)


def test_a_resent_flush_without_a_sender_would_be_counted_twice() -> None:
    script: list[Step] = [
        ("call_until_refused", 0, "a"), ("call", 0, "a", 1, 3), ("flush", 0), ("execute", 0),
        ("lose_reply", 0),
    ]  # fmt: skip

    def run_script(sender: str) -> None:
        fleet = ScriptedFleet(LONG[0], direct(), [(5.0, 0)], start_ms=T0)
        strategy: Any = fleet.processes[0].strategy
        strategy._counts._sender = sender
        fleet.run(script)
        fleet.flush_all()
        check_blocks(fleet)

    run_script("abc")
    with pytest.raises(AssertionError):
        run_script("")
