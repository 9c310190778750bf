"""Leases: whatever becomes of processes and replies, no window holds more than its limit, and every
permit that was charged is somewhere.

    charged = spent + at hand + on its way back + returned + lost with a reply or a process
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.consistency import leased
from distwindow.consistency.base import Direct
from distwindow.consistency.leased import Leased
from distwindow.core.errors import StoreTimeout
from distwindow.core.limit import Limit
from distwindow.operations.command_cache import CommandCache
from distwindow.operations.strategy import Strategy
from distwindow.protocol.commands import Lease, Refund
from distwindow.protocol.replies import LeaseReply
from tests import fleet
from tests.crowd import (
    Crowd,
    Mode,
    Step,
    buckets_of,
    most_in_any,
    most_in_run,
    simulated,
    steps,
)
from tests.fleet import Local
from tests.unit.stage import T0

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
who = st.integers(0, 5)
ends = (
    st.tuples(st.just("dies"), who),
    st.tuples(st.just("forks"), who),
    st.tuples(st.just("asks"), who, st.sampled_from(KEYS)),
)


def leasing(most: int = 1000) -> Mode:
    return lambda book, clock: Leased(book, clock, most, 0.25)


class Scene:
    """What an example draws."""

    def __init__(
        self, limits: Any, starts: list[tuple[float, int]], most: int, script: list[Step]
    ) -> None:
        self.limits, self.starts, self.most, self.script = limits, starts, most, script

    def __repr__(self) -> str:
        return f"Scene({self.limits!r}, {self.starts!r}, {self.most}, {self.script!r})"

    def open(self, **how: Any) -> Crowd:
        return Crowd(self.limits, leasing(self.most), self.starts, start_ms=T0 + 0.3, **how)


scenes = st.builds(
    Scene, st.sampled_from(LIMITS), clocks, st.sampled_from([1, 2, 1000]), steps(KEYS, also=ends)
)


# -- no window holds more than its limit ----------------------------------------------------------


def check_windows(crowd: Crowd) -> None:
    for limit in crowd.limits:
        for key in KEYS:
            admitted = [one for one in crowd.admitted if one.key == key]
            assert most_in_run(buckets_of(admitted, limit.bucket_ms), limit.span) <= limit.amount
            if limit.bound == "strict":
                assert most_in_any(admitted, limit.interval_ms) <= limit.amount


@settings(LENIENT, max_examples=60)
@given(scene=scenes)
def test_nothing_is_admitted_beyond_the_limit(scene: Scene) -> None:
    crowd = scene.open()
    crowd.play(scene.script)
    check_windows(crowd)


@pytest.mark.slow
@settings(LENIENT, max_examples=1000)
@given(scene=scenes)
def test_nothing_is_admitted_beyond_the_limit_in_any_of_many_stories(scene: Scene) -> None:
    crowd = scene.open()
    crowd.play(scene.script)
    check_windows(crowd)


slow_clocks = st.lists(st.sampled_from([1 / 1.083, 0.95, 1.0, 1.083]), min_size=1, max_size=3)


@settings(LENIENT, max_examples=150)
@given(scene=scenes, rates=slow_clocks)
def test_nothing_is_admitted_beyond_the_limit_while_clocks_are_slewed(
    scene: Scene, rates: list[float]
) -> None:
    """chrony changes a clock's rate by up to 8.3 %: the store's seconds are not the processes'."""
    crowd = scene.open(rates=rates)
    crowd.play(scene.script)
    check_windows(crowd)


# -- every permit is somewhere --------------------------------------------------------------------


def check_permits(crowd: Crowd) -> None:
    """What each process was granted beyond its calls is what it has spent, holds, and gave back;
    and a return takes out of a bucket what was charged there, all of it or nothing.
    """
    granted, returned = Counter[int](), Counter[int]()
    for who, command, reply in crowd.delivered:
        if (
            isinstance(command, Lease)
            and isinstance(reply, LeaseReply)
            and reply.acquire_reply.admitted
        ):
            granted[who] += reply.extra + command.prefetch
    for who, command in crowd.sent:
        if isinstance(command, Refund):
            returned[who] += command.charges[0].cost
    spent = Counter[int]()
    for one in crowd.admitted:
        if one.source == "lease":
            spent[one.who] += one.cost
    for name, process in crowd.alive.items():
        near: Any = process.near
        held = sum(cell.permits_left for cell in near._key_states.all())
        queued = sum(back.permits for back in near._refund_queue)
        assert granted[name] == spent[name] + held + queued + returned[name]
    for command, reply in crowd.world.log:
        if isinstance(command, Refund):
            assert reply.affected in (0, command.charges[0].cost)


def check_charges(crowd: Crowd) -> None:
    """Once everything is told and nothing was lost on the way, the store holds what was spent."""
    for limit in crowd.limits:
        for key in KEYS:
            held = crowd.held(key, limit)
            spent = buckets_of([one for one in crowd.admitted if one.key == key], limit.bucket_ms)
            assert held == {number: spent[number] for number in held}


@settings(LENIENT, max_examples=60)
@given(scene=scenes)
def test_every_permit_is_somewhere(scene: Scene) -> None:
    crowd = scene.open()
    crowd.play(scene.script)
    check_permits(crowd)
    crowd.world.ms += 1000
    crowd.settle()
    check_permits(crowd)


quiet_scenes = st.builds(
    Scene,
    st.sampled_from(LIMITS),
    clocks,
    st.sampled_from([1, 2, 1000]),
    steps(KEYS, without=("lose",), most=40),
)


@settings(LENIENT, max_examples=100)
@given(scene=quiet_scenes)
def test_what_is_left_is_given_back(scene: Scene) -> None:
    """As its bucket ends, or once nobody has called for two rounds of the worker."""
    crowd = scene.open()
    crowd.play(scene.script)
    for _ in range(3):
        crowd.settle()
        crowd.world.ms += 255
    crowd.settle()
    check_charges(crowd)


@settings(LENIENT, max_examples=50)
@given(scene=quiet_scenes)
def test_who_closes_gives_everything_back_at_once(scene: Scene) -> None:
    crowd = scene.open()
    crowd.play(scene.script)
    crowd.close()
    check_charges(crowd)


def test_a_store_whose_clock_was_set_back_is_followed() -> None:
    """Once the lease of the future has ended, leases are what they were."""
    crowd = Crowd(Limit("1000/second"), leasing(), [(5.0, 0)], start_ms=T0)

    def second() -> Counter[str]:
        known = len(crowd.world.log)
        for _ in range(100):
            crowd.play([("calls", 0, "a", 1, 5), ("rests", 10.0)])
        return Counter(type(command).__name__ for command, _ in crowd.world.log[known:])

    before = second()
    behind = Local(crowd.world, skew_ms=-60_000)
    crowd.world.store.clock, crowd.world.store._now_ms = behind, behind.now_ms
    second()
    after = second()
    check_windows(crowd)
    assert after.total() <= before.total() * 1.5


# -- the laws above can fail ----------------------------------------------------------------------


ONE_BUCKET: Any = Limit(40, per=3.0, buckets=1)
THREE = [(0.5, 0), (77.7, 0), (4.0, 0)]
TURN: Step = ("turns", 1.0)


def windows_hold(*script: Step, **how: Any) -> bool:
    crowd = Crowd(ONE_BUCKET, leasing(), THREE, start_ms=T0, **how)
    crowd.play([TURN, *script])
    try:
        check_windows(crowd)
    except AssertionError:
        return False
    assert len(crowd.admitted) >= ONE_BUCKET.amount  # the story puts the limit to the test
    return True


def test_a_lease_that_outlived_its_bucket_would_break_them(monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[Step] = [("calls", 0, "a", 1, 5), TURN, ("rushes", 1, "a"), ("rushes", 0, "a")]
    assert windows_hold(*story)
    monkeypatch.setattr(leased, "CLOCK_MARGIN_S", -0.5)
    assert not windows_hold(*story)


def test_a_lease_without_a_margin_for_slewed_clocks_would_break_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process believes that a twelfth of the bucket is still to come."""
    story: list[Step] = [
        ("calls", 0, "a", 1, 5), ("passes", 2990.0), ("rushes", 1, "a"), ("passes", 20.0),
        ("rushes", 1, "a"), ("rushes", 0, "a"),
    ]  # fmt: skip
    assert windows_hold(*story, rates=[1 / 1.083, 1.0, 1.0])
    monkeypatch.setattr(leased, "MAX_CLOCK_DRIFT", 0.0)
    assert not windows_hold(*story, rates=[1 / 1.083, 1.0, 1.0])


def test_a_machine_that_stood_still_spends_no_more_than_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspended, its clock shows nothing of it: what it held may come on top, and only that."""
    crowd = Crowd(ONE_BUCKET, leasing(), THREE, start_ms=T0)
    crowd.play([TURN, ("calls", 0, "a", 1, 10)])
    near: Any = crowd.alive[0].near
    held = near._key_states.all()[0].permits_left
    assert held > 0
    crowd.alive[0].clock.stands_still(3000)
    crowd.play([("rushes", 1, "a"), ("rushes", 0, "a")])
    in_bucket = buckets_of(crowd.admitted, ONE_BUCKET.bucket_ms)
    assert ONE_BUCKET.amount < max(in_bucket.values()) <= ONE_BUCKET.amount + held


def test_a_child_that_spent_its_parents_lease_would_break_them() -> None:
    story: list[Step] = [
        ("calls", 0, "a", 1, 3), ("forks", 0), ("rushes", 3, "a"), ("rushes", 0, "a"),
        ("rushes", 1, "a"),
    ]  # fmt: skip
    assert windows_hold(*story)
    assert not windows_hold(*story, at_fork=lambda near: None)


def test_a_return_that_was_executed_and_is_sent_again_would_break_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outcome that is unknown, taken for one that surely did nothing."""
    story: list[Step] = [
        ("calls", 0, "a", 1, 3), ("rushes", 1, "a"), ("rests", 253.0), ("rests", 253.0),
        ("passes", 253.0), ("works", 0), ("reach", 0), ("lose", 0), ("rests", 253.0),
        ("rushes", 2, "a"),
    ]  # fmt: skip
    assert windows_hold(*story)

    class Hopeful(StoreTimeout):
        def __init__(self, message: str, *, charged: bool | None) -> None:
            super().__init__(message, charged=False)

    monkeypatch.setattr(fleet, "StoreTimeout", Hopeful)
    assert not windows_hold(*story)


# -- how large leases are -------------------------------------------------------------------------


class Day(NamedTuple):
    """What came of a timetable."""

    admitted: int
    asked: int
    kinds: Counter[str]


def day(mode: Mode, limit: Limit, loads: list[float], seconds: float, seed: int) -> Day:
    """`loads` is what each process gets, in parts of the limit."""
    rates = [load * limit.amount / limit.per for load in loads]
    found = simulated(mode, limit, rates, seconds, seed=seed)
    kinds = Counter(type(command).__name__ for command, _ in found.world.log)
    return Day(len(found.admitted), found.world.asked, kinds)


def direct(book: CommandCache, clock: Local) -> Strategy:
    return Direct(book, clock, 1000, 0.25)


@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("processes", [1, 4, 16])
def test_a_small_limit_is_asked_about_call_by_call(processes: int, load: float) -> None:
    """A lease of one would be two commands in the place of one."""
    for seed in range(5):
        how = Limit("5/second"), [load / processes] * processes, 10, seed
        mine, other = day(leasing(), *how), day(direct, *how)
        assert mine.admitted == other.admitted
        assert abs(mine.asked - other.asked) <= 2
        assert mine.kinds["Lease"] <= 2
        assert mine.kinds["Refund"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "loads", "most"),
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
def test_near_the_limit_hardly_anything_is_stranded(
    limit: str, loads: list[float], most: float
) -> None:
    how = Limit(limit), loads, 4, 7
    mine, other = day(leasing(), *how), day(direct, *how)
    assert mine.admitted >= other.admitted * (1 - most)
    assert mine.asked < other.asked


# -- leases whose fate is unknown -----------------------------------------------------------------


@given(lost=st.lists(st.booleans(), min_size=2, max_size=12))
@settings(LENIENT, max_examples=40)
def test_at_most_one_lease_is_lost_in_a_bucket(lost: list[bool]) -> None:
    """After one whose reply did not come, calls go one by one until the bucket ends."""
    crowd = Crowd(Limit(1000, per=1.0, buckets=2), leasing(), [(5.0, 0)], start_ms=T0 + 5)
    crowd.play([("calls", 0, "a", 1, 20), ("passes", 1000.0)])
    for fate in lost:
        crowd.play([("sets_out", 0, "a", 1), ("reach", -1), ("lose" if fate else "answer", -1)])
        crowd.play([("passes", 7.0)])
    stranded = Counter[int]()
    delivered = [id(reply) for _, _, reply in crowd.delivered]
    for command, reply in crowd.world.log:
        if (
            isinstance(command, Lease)
            and reply.acquire_reply.admitted
            and id(reply) not in delivered
        ):
            stranded[reply.acquire_reply.now_ms // 500] += 1
    assert all(count <= 1 for count in stranded.values())
