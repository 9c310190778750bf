"""`retry_after` and `reset_after` are exact: at that moment it is so, and 1 ms before it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.core.charge import Charge
from distwindow.core.stats import window_at
from distwindow.protocol.commands import Acquire, Peek, Read, Refund, charges_of
from distwindow.protocol.keys import key_prefix
from distwindow.protocol.replies import AcquireReply
from tests.unit.stage import T0, Execute, blocking, fresh, memory

W = 60_000
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

SETS = (
    [Limit(6, per=60, buckets=1)],
    [Limit(9, per=300, buckets=5)],
    [Limit(9, per=300, buckets=5, bound="strict")],
    [Limit(7, per=780, buckets=13)],
    [Limit(6, per=120, buckets=2), Limit(9, per=600, buckets=10)],
    [Limit(6, per=60, buckets=1, bound="strict"), Limit(11, per=900, buckets=3, bound="strict")],
    [Limit(7, per=180, buckets=3), Limit(8, per=300, buckets=5, bound="strict"), Limit(9, per=900)],
)
later = st.one_of(
    st.integers(0, 3), st.sampled_from([W // 2, W - 1, W, W + 1, 3 * W]), st.integers(-3 * W, 8 * W)
)
story = st.lists(
    st.tuples(
        later, st.integers(1, 6), st.sampled_from(["acquire", "acquire", "acquire", "refund"])
    ),
    min_size=1,
    max_size=30,
)


@pytest.fixture(scope="module", params=["memory", "redis"])
def execute(request: pytest.FixtureRequest) -> Iterator[Execute]:
    if request.param == "memory":
        with memory() as store:
            yield store
    else:
        with blocking(request.getfixturevalue("redis_url")) as store:
            yield store


class Scene:
    """One key with a past."""

    def __init__(self, execute: Execute, limits: list[Limit]) -> None:
        self.execute = execute
        self.limits = limits
        self.key = fresh()
        self.now = T0

    def charges(self, cost: int) -> tuple[Charge, ...]:
        return charges_of(self.key, key_prefix("retry", self.key), self.limits, cost)

    def live(self, past: list[tuple[int, int, str]]) -> None:
        for wait, cost, verb in past:
            self.now += wait
            if verb == "refund":
                self.execute(Refund(self.charges(cost), self.now, self.now - W))
            else:
                self.execute(Acquire(self.charges(cost), self.now))

    def peek(self, cost: int, ms: int) -> AcquireReply:
        verdict: AcquireReply = self.execute(Peek(self.charges(cost), self.now + ms))
        return verdict

    def acquire(self, cost: int, ms: int = 0, times: int = 1) -> AcquireReply:
        verdict: AcquireReply = self.execute(
            Acquire(self.charges(cost), self.now + ms, calls=times)
        )
        return verdict

    def used(self, ring: int, ms: int) -> int:
        """What the window of this ring holds then."""
        at = self.now + ms
        state = self.execute(Read(self.charges(1), at)).states[ring]
        return window_at(state, self.limits[ring], at).passed


def refused_exactly(scene: Scene, cost: int, verdict: AcquireReply) -> None:
    retry = verdict.retry_ms
    width = scene.limits[verdict.binding_ring].bucket_ms
    assert retry > 0
    assert not scene.peek(cost, retry - 1).admitted
    if retry > width:
        assert not scene.peek(cost, retry - width).admitted
    assert scene.peek(cost, retry).admitted
    assert scene.acquire(cost, retry).admitted, "and the call itself, not just the look"


def empty_exactly(scene: Scene, verdict: AcquireReply) -> None:
    assert scene.used(verdict.binding_ring, verdict.reset_ms) == 0
    if verdict.reset_ms:
        assert scene.used(verdict.binding_ring, verdict.reset_ms - 1) > 0
    else:
        assert scene.used(verdict.binding_ring, 0) == 0


@settings(LENIENT, max_examples=80)
@given(limits=st.sampled_from(SETS), past=story, cost=st.integers(1, 6))
def test_a_call_at_retry_after_is_admitted_and_one_before_is_not(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int
) -> None:
    scene = Scene(execute, limits)
    scene.live(past)
    verdict = scene.acquire(cost)
    if verdict.admitted:
        assert verdict.retry_ms == 0
        verdict = scene.peek(6, 0)
        cost = 6
        assume(not verdict.admitted)
    refused_exactly(scene, cost, verdict)


@settings(LENIENT, max_examples=50)
@given(limits=st.sampled_from(SETS), past=story, cost=st.integers(1, 3), times=st.integers(2, 9))
def test_the_refused_of_a_shared_call_are_told_exactly_too(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int, times: int
) -> None:
    scene = Scene(execute, limits)
    scene.live(past)
    verdict = scene.acquire(cost, times=times)
    assume(verdict.admitted < times)
    empty_exactly(scene, verdict)
    refused_exactly(scene, cost, verdict)


@settings(LENIENT, max_examples=50)
@given(limits=st.sampled_from(SETS), past=story, cost=st.integers(1, 6), look=st.booleans())
def test_the_window_is_empty_at_reset_after_and_not_before(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int, look: bool
) -> None:
    scene = Scene(execute, limits)
    scene.live(past)
    empty_exactly(scene, scene.peek(cost, 0) if look else scene.acquire(cost))


@settings(LENIENT, max_examples=50)
@given(limits=st.sampled_from(SETS), past=story, cost=st.integers(1, 6))
def test_waiting_as_told_needs_one_wait_only(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int
) -> None:
    """A key that nobody else calls: after any refusal one wait is enough, again and again."""
    scene = Scene(execute, limits)
    scene.live(past)
    for _ in range(6):
        verdict = scene.acquire(cost)
        if not verdict.admitted:
            scene.now += verdict.retry_ms
            assert scene.acquire(cost).admitted
