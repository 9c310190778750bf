"""Remembered refusals: no error against an oracle, which is the store itself; gone at the moment
the store named, within a bucket; and counted, each once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.consistency import refusals
from distwindow.consistency.direct import Direct
from distwindow.consistency.eventual import Eventual
from distwindow.consistency.leased import Leased
from distwindow.core.decision import Decision
from distwindow.core.limit import Limit
from distwindow.operations.command_cache import CommandCache
from distwindow.protocol.commands import Acquire, Command, Lease, Peek
from distwindow.protocol.replies import LeaseReply
from tests.crowd import Crowd, Mode, Step, steps
from tests.unit.stage import T0

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
who = st.integers(0, 5)
forks = st.tuples(st.just("forks"), who)
asks = st.tuples(st.just("asks"), who, st.sampled_from(KEYS))


def direct(most: int = 1000) -> Mode:
    return lambda commands, clock: Direct(commands, clock, most, 0.25)


def leasing(most: int = 1000) -> Mode:
    return lambda commands, clock: Leased(commands, clock, most, 0.25)


def syncing(most: int = 1000) -> Mode:
    return lambda commands, clock: Eventual(commands, clock, most, 0.1)


# -- right, against the store ---------------------------------------------------------------------


def would_admit(crowd: Crowd, key: str, cost: int) -> bool:
    """The decision that the store would make now."""
    command = Peek(CommandCache("fleet", crowd.limits).acquire(key, cost).charges)
    return bool(crowd.world.store.execute(command).admitted)


def check_against_the_store(crowd: Crowd) -> None:
    """From now on compare each refusal made here with the decision of the store."""

    def compare(name: int, key: str, decision: Decision) -> None:
        assert decision.source == "deny_cache"
        assert not would_admit(crowd, key, decision.cost)
        assert decision.remaining < decision.cost
        assert 0 < decision.retry_after <= decision.reset_after
        assert decision.charged is None

    crowd.on_local_decision = compare


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    starts=clocks,
    most=st.sampled_from([1, 1000]),
    script=steps(KEYS, also=(forks,)),
)
def test_what_is_refused_here_the_store_would_refuse(
    limits: Any, starts: list[tuple[float, int]], most: int, script: list[Step]
) -> None:
    crowd = Crowd(limits, direct(most), starts, start_ms=T0 + 0.3)
    check_against_the_store(crowd)
    crowd.play(script)


def test_a_refusal_remembered_beyond_its_moment_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[Step] = [
        ("turns", 1.0),
        ("rushes", 0, "a"),
        ("turns", 2.0),
        ("calls", 0, "a", 1, 1),
    ]

    def play() -> None:
        crowd = Crowd(Limit(12, per=1.0, buckets=1), direct(), [(5.0, 0)], start_ms=T0)
        check_against_the_store(crowd)
        crowd.play(story)

    play()
    monkeypatch.setattr(refusals, "CLOCK_MARGIN_S", -0.5)
    with pytest.raises(AssertionError):
        play()


# -- for how long ---------------------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    limit=st.sampled_from([limit for limit in LIMITS if isinstance(limit, Limit)]),
    mode=st.sampled_from([direct(), leasing()]),
    fills=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0.0, 30.0, 400.0])), min_size=1, max_size=8
    ),
    costs=st.tuples(st.integers(1, 9), st.integers(0, 9)),
    part=st.floats(0, 1.2),
)
def test_it_is_remembered_until_the_moment_it_named(
    limit: Limit,
    mode: Mode,
    fills: list[tuple[int, float]],
    costs: tuple[int, int],
    part: float,
) -> None:
    """Or for a bucket. Until then no call of that cost or more goes to the store, then each."""
    crowd = Crowd(limit, mode, [(5.0, 0), (9.0, 0)], start_ms=T0 + 0.3)
    for cost, ms in fills:
        crowd.play([("calls", 0, "a", cost, 1), ("passes", ms)])
    known = len(crowd.refused)
    while len(crowd.refused) == known:
        crowd.do(("calls", 1, "a", costs[0], 1))
    refusal = crowd.refused[-1][2]
    assert refusal.source == "store"
    kept_ms = min(refusal.retry_after * 1000, limit.bucket_ms) - 1
    passes = part * kept_ms
    asked = crowd.world.asked
    crowd.play([("passes", passes), ("calls", 1, "a", min(12, costs[0] + costs[1]), 1)])
    if passes < kept_ms - 0.1:
        assert crowd.world.asked == asked
        assert crowd.refused[-1][2].source == "deny_cache"
    elif passes > kept_ms + 0.1:
        assert crowd.world.asked > asked


@settings(LENIENT, max_examples=50)
@given(cost=st.integers(2, 9), less=st.integers(1, 8))
def test_a_smaller_cost_is_decided_by_the_store(cost: int, less: int) -> None:
    crowd = Crowd(LIMITS[0], direct(), [(5.0, 0)], start_ms=T0 + 0.3)
    known = len(crowd.refused)
    while len(crowd.refused) == known:
        crowd.do(("calls", 0, "a", cost, 1))
    asked = crowd.world.asked
    crowd.do(("calls", 0, "a", min(less, cost - 1), 1))
    assert crowd.world.asked > asked


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LIMITS),
    mode=st.sampled_from([direct, leasing]),
    starts=clocks,
    most=st.sampled_from([1, 1000]),
    script=steps(
        KEYS, also=(forks, st.tuples(st.just("refunds"), who), st.tuples(st.just("refunds"), who))
    ),
)
def test_a_refund_takes_effect_within_a_bucket(
    limits: Any, mode: Any, starts: list[tuple[float, int]], most: int, script: list[Step]
) -> None:
    """A process repeats only refusals of the store within the last bucket, of that cost or less."""
    crowd = Crowd(limits, mode(most), starts, start_ms=T0 + 0.3)

    def compare(name: int, key: str, decision: Decision) -> None:
        if decision.allowed:
            return
        since = crowd.world.ms - decision.limit.bucket_ms
        assert any(
            refused_by(command, reply) and command.charges[0].key == key
            and command.charges[0].cost <= decision.cost and moment_of(reply) > since
            for who, command, reply in crowd.delivered if who == name
        )  # fmt: skip

    crowd.on_local_decision = compare
    crowd.play(script)


def refused_by(command: Command[Any], reply: Any) -> bool:
    if isinstance(command, Acquire):  # in a pipeline its reply is not a `Decision`
        return not (reply.allowed if isinstance(reply, Decision) else reply.admitted)
    return isinstance(command, Lease) and not reply.acquire_reply.admitted


def moment_of(reply: Any) -> int:
    return int(reply.acquire_reply.now_ms if isinstance(reply, LeaseReply) else reply.now_ms)


# -- counted --------------------------------------------------------------------------------------

LONG: list[Any] = [
    Limit(9, per=2000.0, buckets=10),
    (Limit(9, per=1000.0, buckets=5), Limit(12, per=3000.0, buckets=2, bound="strict")),
]


def check_blocks(crowd: Crowd) -> None:
    """Once all counts are sent, the store has counted each refusal once."""
    blocked = Counter[str]()
    for _, key, decision in crowd.refused:
        if decision.source != "store":
            blocked[key] += decision.cost
    for command, reply in crowd.world.log:
        if refused_by(command, reply) and not (isinstance(command, Lease) and command.prefetch):
            blocked[str(command.charges[0].key)] += command.charges[0].cost
    for limit in crowd.limits:
        for key in KEYS:
            assert sum(crowd.held(key, limit, blocked=True).values()) == blocked[key]


@settings(LENIENT, max_examples=60)
@given(
    limits=st.sampled_from(LONG),
    mode=st.sampled_from([direct, leasing, syncing]),
    starts=clocks,
    most=st.sampled_from([1, 1000]),
    script=steps(KEYS, also=(forks, asks), without=("turns",)),  # nothing leaves the window
)
def test_each_is_counted_once(
    limits: Any, mode: Any, starts: list[tuple[float, int]], most: int, script: list[Step]
) -> None:
    """Whatever is lost: a flush is sent again until it is known to have arrived."""
    crowd = Crowd(limits, mode(most), starts, start_ms=T0 + 0.3)
    crowd.play(script)
    crowd.settle()
    check_blocks(crowd)


def test_a_flush_that_is_not_recognised_would_count_twice() -> None:
    story: list[Step] = [
        ("rushes", 0, "a"), ("calls", 0, "a", 1, 3), ("works", 0), ("reach", 0), ("lose", 0),
    ]  # fmt: skip

    def play(sender: str) -> None:
        crowd = Crowd(LONG[0], direct(), [(5.0, 0)], start_ms=T0)
        process: Any = crowd.alive[0].strategy
        process._counts._sender = sender
        crowd.play(story)
        crowd.settle()
        check_blocks(crowd)

    play("abc")
    with pytest.raises(AssertionError):
        play("")
