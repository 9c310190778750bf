"""Leases: whatever happens to processes and replies, no window holds more than its limit, and every
permit that was charged is accounted for.

    charged = spent + held + in the refund queue + refunded + lost with a reply or a process

The file is long because the checks, and the tests that these checks can fail, stand together.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.errors import StoreTimeout
from distwindow.local import leases as leased_key_state
from distwindow.local.direct import Direct
from distwindow.local.leased import Leased
from distwindow.ring.commands import Lease, Refund
from distwindow.ring.limit import Limit
from distwindow.ring.replies import LeaseReply
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.runtime.strategy import Strategy
from tests.clock_and_stores import T0
from tests.simulation import process as simulated_process
from tests.simulation.admissions import most_in_buckets, most_in_interval, permits_by_bucket
from tests.simulation.process import LocalClock, MakeStrategy
from tests.simulation.scripted import ScriptedFleet, Step
from tests.simulation.scripts import scripts
from tests.simulation.timed import simulate

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
KEYS = ("a", "b")

LIMITS: list[Any] = [
    Limit(40, per=1.0, buckets=1),
    Limit(30, per=1.0, buckets=4),
    Limit(30, per=1.0, buckets=4, bound="strict"),
    Limit(60, per=0.3, buckets=3, bound="strict"),
    (Limit(20, per=0.5, buckets=5), Limit(50, per=3.0, buckets=2)),
    (Limit(20, per=0.2, buckets=2), Limit(25, per=0.6, buckets=4, bound="strict")),
]
clocks = st.lists(
    st.tuples(
        st.sampled_from([0.5, 77.7, 1_000_000.0]), st.sampled_from([0, -3, 40, -7000, 3_600_000])
    ),
    min_size=1, max_size=4,
)  # fmt: skip
process_numbers = st.integers(0, 5)
extra_steps = (
    st.tuples(st.just("kill"), process_numbers),
    st.tuples(st.just("fork"), process_numbers),
    st.tuples(st.just("read_stats"), process_numbers, st.sampled_from(KEYS)),
)


def leased(max_keys: int = 1000) -> MakeStrategy:
    return lambda commands, clock: Leased(commands, clock, Options(max_local_keys=max_keys))


class Example:
    """The limits, the clocks of the processes, the keys that one keeps at most, and the script."""

    def __init__(
        self, limits: Any, clocks: list[tuple[float, int]], max_keys: int, script: list[Step]
    ) -> None:
        self.limits, self.clocks, self.max_keys, self.script = limits, clocks, max_keys, script

    def __repr__(self) -> str:
        return f"Example({self.limits!r}, {self.clocks!r}, {self.max_keys}, {self.script!r})"

    def open(self, **options: Any) -> ScriptedFleet:
        return ScriptedFleet(
            self.limits, leased(self.max_keys), self.clocks, start_ms=T0 + 0.3, **options
        )


examples = st.builds(
    Example,
    st.sampled_from(LIMITS),
    clocks,
    st.sampled_from([1, 2, 1000]),
    scripts(KEYS, extra=extra_steps),
)


# -- no window holds more than its limit ----------------------------------------------------------


def check_windows(fleet: ScriptedFleet) -> None:
    for limit in fleet.limits:
        for key in KEYS:
            admitted = [one for one in fleet.admitted if one.key == key]
            permits = permits_by_bucket(admitted, limit.bucket_ms)
            assert most_in_buckets(permits, limit.span) <= limit.amount
            if limit.bound == "strict":
                assert most_in_interval(admitted, limit.interval_ms) <= limit.amount


@settings(LENIENT, max_examples=200)
@given(example=examples)
def test_nothing_is_admitted_beyond_the_limit(example: Example) -> None:
    fleet = example.open()
    fleet.run(example.script)
    check_windows(fleet)


clock_rates = st.lists(st.sampled_from([1 / 1.083, 0.95, 1.0, 1.083]), min_size=1, max_size=3)


@settings(LENIENT, max_examples=150)
@given(example=examples, rates=clock_rates)
def test_nothing_is_admitted_beyond_the_limit_while_clocks_are_slewed(
    example: Example, rates: list[float]
) -> None:
    """chrony changes the rate of a clock by up to 8.3 %, so the seconds of a process are not those
    of the store.
    """
    fleet = example.open(rates=rates)
    fleet.run(example.script)
    check_windows(fleet)


# -- every permit is accounted for ----------------------------------------------------------------


def check_permits(fleet: ScriptedFleet) -> None:
    """The permits that a process was granted beyond its calls are those that it has spent, holds,
    and has refunded; and a refund takes what was charged out of its bucket, all of it or nothing.
    """
    granted, refunded = Counter[int](), Counter[int]()
    for number, command, reply in fleet.delivered:
        if (
            isinstance(command, Lease)
            and isinstance(reply, LeaseReply)
            and reply.acquire_reply.admitted
        ):
            granted[number] += reply.extra + command.prefetch
    for number, command in fleet.sent:
        if isinstance(command, Refund):
            refunded[number] += command.charges[0].cost
    spent = Counter[int]()
    for one in fleet.admitted:
        if one.source == "lease":
            spent[one.process] += one.cost
    for number, process in fleet.processes.items():
        strategy: Any = process.strategy
        held = sum(state.permits_left for state in strategy._key_states.all())
        queued = sum(refund.permits for refund in strategy._refunds._queue)
        assert granted[number] == spent[number] + held + queued + refunded[number]
    for command, reply in fleet.store.log:
        if isinstance(command, Refund):
            assert reply.affected in (0, command.charges[0].cost)


def check_charges(fleet: ScriptedFleet) -> None:
    """Once all counts are sent, and if no reply was lost, the store holds what was spent."""
    for limit in fleet.limits:
        for key in KEYS:
            held = fleet.counts_in_store(key, limit)
            spent = permits_by_bucket(
                [one for one in fleet.admitted if one.key == key], limit.bucket_ms
            )
            assert held == {number: spent[number] for number in held}


@settings(LENIENT, max_examples=60)
@given(example=examples)
def test_every_permit_is_accounted_for(example: Example) -> None:
    fleet = example.open()
    fleet.run(example.script)
    check_permits(fleet)
    fleet.store.ms += 1000
    fleet.flush_all()
    check_permits(fleet)


examples_without_losses = st.builds(
    Example,
    st.sampled_from(LIMITS),
    clocks,
    st.sampled_from([1, 2, 1000]),
    scripts(KEYS, without=("lose_reply",), max_steps=40),
)


@settings(LENIENT, max_examples=100)
@given(example=examples_without_losses)
def test_unspent_permits_are_refunded(example: Example) -> None:
    """When their bucket ends, or after two flush intervals without calls."""
    fleet = example.open()
    fleet.run(example.script)
    for _ in range(3):
        fleet.flush_all()
        fleet.store.ms += 255
    fleet.flush_all()
    check_charges(fleet)


@settings(LENIENT, max_examples=50)
@given(example=examples_without_losses)
def test_closing_refunds_all_leases_at_once(example: Example) -> None:
    fleet = example.open()
    fleet.run(example.script)
    fleet.close()
    check_charges(fleet)


def test_leases_work_again_after_the_store_clock_was_set_back() -> None:
    """Once the lease that was granted before has ended, as few commands are needed as then."""
    fleet = ScriptedFleet(Limit("1000/second"), leased(), [(5.0, 0)], start_ms=T0)

    def one_second() -> Counter[str]:
        logged = len(fleet.store.log)
        for _ in range(100):
            fleet.run([("call", 0, "a", 1, 5), ("wait_and_flush", 10.0)])
        return Counter(type(command).__name__ for command, _ in fleet.store.log[logged:])

    before = one_second()
    set_back = LocalClock(fleet.store, skew_ms=-60_000)
    fleet.store.memory.clock, fleet.store.memory._now_ms = set_back, set_back.now_ms
    one_second()
    after = one_second()
    check_windows(fleet)
    assert after.total() <= before.total() * 1.5


# -- the tests above can fail ----------------------------------------------------------------------


ONE_BUCKET: Any = Limit(40, per=3.0, buckets=1)
THREE = [(0.5, 0), (77.7, 0), (4.0, 0)]
NEXT_BUCKET: Step = ("next_bucket", 1.0)


def windows_hold(*script: Step, **options: Any) -> bool:
    fleet = ScriptedFleet(ONE_BUCKET, leased(), THREE, start_ms=T0, **options)
    fleet.run([NEXT_BUCKET, *script])
    try:
        check_windows(fleet)
    except AssertionError:
        return False
    assert len(fleet.admitted) >= ONE_BUCKET.amount  # so the script reaches the limit
    return True


def test_a_lease_spent_after_its_bucket_would_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: list[Step] = [
        ("call", 0, "a", 1, 5),
        NEXT_BUCKET,
        ("call_until_refused", 1, "a"),
        ("call_until_refused", 0, "a"),
    ]
    assert windows_hold(*script)
    monkeypatch.setattr(leased_key_state, "CLOCK_MARGIN_S", -0.5)
    assert not windows_hold(*script)


def test_a_lease_without_a_margin_for_slewed_clocks_would_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock of the process a twelfth of the bucket is still left."""
    script: list[Step] = [
        ("call", 0, "a", 1, 5), ("wait", 2990.0), ("call_until_refused", 1, "a"), ("wait", 20.0),
        ("call_until_refused", 1, "a"), ("call_until_refused", 0, "a"),
    ]  # fmt: skip
    assert windows_hold(*script, rates=[1 / 1.083, 1.0, 1.0])
    monkeypatch.setattr(leased_key_state, "MAX_CLOCK_DRIFT", 0.0)
    assert not windows_hold(*script, rates=[1 / 1.083, 1.0, 1.0])


def test_a_suspended_machine_exceeds_the_limit_by_its_lease_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock does not show the time for which it was suspended, so it spends a lease that has
    ended.
    """
    fleet = ScriptedFleet(ONE_BUCKET, leased(), THREE, start_ms=T0)
    fleet.run([NEXT_BUCKET, ("call", 0, "a", 1, 10)])
    strategy: Any = fleet.processes[0].strategy
    held = strategy._key_states.all()[0].permits_left
    assert held > 0
    fleet.processes[0].clock.suspend(3000)
    fleet.run([("call_until_refused", 1, "a"), ("call_until_refused", 0, "a")])
    in_bucket = permits_by_bucket(fleet.admitted, ONE_BUCKET.bucket_ms)
    assert ONE_BUCKET.amount < max(in_bucket.values()) <= ONE_BUCKET.amount + held


def test_a_child_that_spends_the_lease_of_its_parent_would_exceed_the_limit() -> None:
    script: list[Step] = [
        ("call", 0, "a", 1, 3), ("fork", 0), ("call_until_refused", 3, "a"),
        ("call_until_refused", 0, "a"), ("call_until_refused", 1, "a"),
    ]  # fmt: skip
    assert windows_hold(*script)
    assert not windows_hold(*script, after_fork=lambda strategy: None)


def test_a_refund_that_is_executed_twice_would_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of unknown outcome is taken for one after which nothing was executed."""
    script: list[Step] = [
        ("call", 0, "a", 1, 3), ("call_until_refused", 1, "a"), ("wait_and_flush", 253.0),
        ("wait_and_flush", 253.0), ("wait", 253.0), ("flush", 0), ("execute", 0), ("lose_reply", 0),
        ("wait_and_flush", 253.0), ("call_until_refused", 2, "a"),
    ]  # fmt: skip
    assert windows_hold(*script)

    class NotExecuted(StoreTimeout):
        def __init__(self, message: str, *, charged: bool | None) -> None:
            super().__init__(message, charged=False)

    monkeypatch.setattr(simulated_process, "StoreTimeout", NotExecuted)
    assert not windows_hold(*script)


# -- how large leases are -------------------------------------------------------------------------


class Result(NamedTuple):
    """What a simulation came to."""

    admitted: int
    executed: int
    commands: Counter[str]
    """By their names."""


def run(
    make_strategy: MakeStrategy, limit: Limit, loads: list[float], seconds: float, seed: int
) -> Result:
    """`loads` is the demand of each process, as a share of the limit."""
    rates = [load * limit.amount / limit.per for load in loads]
    found = simulate(make_strategy, limit, rates, seconds, seed=seed)
    commands = Counter(type(command).__name__ for command, _ in found.store.log)
    return Result(len(found.admitted), found.store.executed, commands)


def direct(commands: CommandCache, clock: LocalClock) -> Strategy:
    return Direct(commands, clock, Options(max_local_keys=1000))


@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("processes", [1, 4, 16])
def test_under_a_small_limit_each_call_is_decided_by_the_store(processes: int, load: float) -> None:
    """A lease of one permit would need two commands where one is enough."""
    for seed in range(5):
        arguments = Limit("5/second"), [load / processes] * processes, 10, seed
        lease_run, direct_run = run(leased(), *arguments), run(direct, *arguments)
        assert lease_run.admitted == direct_run.admitted
        assert abs(lease_run.executed - direct_run.executed) <= 2
        assert lease_run.commands["Lease"] <= 2
        assert lease_run.commands["Refund"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "loads", "max_unused"),
    [
        ("1000/second", [0.25] * 4, 0.02),
        ("1000/second", [0.3] * 4, 0.02),
        ("1000/second strict", [0.25] * 4, 0.02),
        ("100/second", [0.25] * 4, 0.02),
        ("1000/second", [1.0, 0, 0, 0], 0.05),
        ("1000/second", [1.5, 0, 0, 0], 0.05),
        ("1000/second", [1.2, 0.01, 0.01, 0.01], 0.05),
    ],
)
def test_near_the_limit_hardly_any_permit_is_left_unused(
    limit: str, loads: list[float], max_unused: float
) -> None:
    arguments = Limit(limit), loads, 4, 7
    lease_run, direct_run = run(leased(), *arguments), run(direct, *arguments)
    assert lease_run.admitted >= direct_run.admitted * (1 - max_unused)
    assert lease_run.executed < direct_run.executed


# -- leases whose outcome is unknown ---------------------------------------------------------------


@given(lost=st.lists(st.booleans(), min_size=2, max_size=12))
@settings(LENIENT, max_examples=40)
def test_at_most_one_lease_is_lost_in_a_bucket(lost: list[bool]) -> None:
    """After a lease whose reply is lost, the store decides each call until the bucket ends."""
    fleet = ScriptedFleet(Limit(1000, per=1.0, buckets=2), leased(), [(5.0, 0)], start_ms=T0 + 5)
    fleet.run([("call", 0, "a", 1, 20), ("wait", 1000.0)])
    for reply_lost in lost:
        end = "lose_reply" if reply_lost else "deliver"
        fleet.run([("begin_call", 0, "a", 1), ("execute", -1), (end, -1), ("wait", 7.0)])
    lost_leases = Counter[int]()
    delivered = [id(reply) for _, _, reply in fleet.delivered]
    for command, reply in fleet.store.log:
        if (
            isinstance(command, Lease)
            and reply.acquire_reply.admitted
            and id(reply) not in delivered
        ):
            lost_leases[reply.acquire_reply.now_ms // 500] += 1
    assert all(count <= 1 for count in lost_leases.values())
