"""`retry_after` and `reset_after` are exact: true at that moment, and not yet 1 ms before."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.ring.commands import Acquire, Peek, Read, Refund, charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import AcquireReply
from distwindow.ring.stats import window_at
from tests.clock_and_stores import T0, Execute, fresh_key

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
past_calls = st.lists(
    st.tuples(
        later, st.integers(1, 6), st.sampled_from(["acquire", "acquire", "acquire", "refund"])
    ),
    min_size=1,
    max_size=30,
)


class CalledKey:
    """One key at a time that the test moves, with the calls that were made of it."""

    def __init__(self, execute: Execute, limits: list[Limit]) -> None:
        self.execute = execute
        self.limits = limits
        self.key = fresh_key()
        self.now = T0

    def charges(self, cost: int) -> tuple[Charge, ...]:
        return charges_of(self.key, ring_name_prefix("retry", self.key), self.limits, cost)

    def make_calls(self, past: list[tuple[int, int, str]]) -> None:
        for wait, cost, verb in past:
            self.now += wait
            if verb == "refund":
                self.execute(Refund(self.charges(cost), self.now, self.now - W))
            else:
                self.execute(Acquire(self.charges(cost), self.now))

    def peek(self, cost: int, ms: int) -> AcquireReply:
        reply: AcquireReply = self.execute(Peek(self.charges(cost), self.now + ms))
        return reply

    def acquire(self, cost: int, ms: int = 0, calls: int = 1) -> AcquireReply:
        reply: AcquireReply = self.execute(Acquire(self.charges(cost), self.now + ms, calls=calls))
        return reply

    def used(self, ring: int, ms: int) -> int:
        """Return the permits in the window of this ring `ms` from now."""
        at = self.now + ms
        state = self.execute(Read(self.charges(1), at)).states[ring]
        return window_at(state, self.limits[ring], at).passed


def check_retry(key: CalledKey, cost: int, reply: AcquireReply) -> None:
    retry = reply.retry_ms
    width = key.limits[reply.binding_index].bucket_ms
    assert retry > 0
    assert not key.peek(cost, retry - 1).admitted
    if retry > width:
        assert not key.peek(cost, retry - width).admitted
    assert key.peek(cost, retry).admitted
    assert key.acquire(cost, retry).admitted, "acquire must agree with peek"


def check_reset(key: CalledKey, reply: AcquireReply) -> None:
    assert key.used(reply.binding_index, reply.reset_ms) == 0
    if reply.reset_ms:
        assert key.used(reply.binding_index, reply.reset_ms - 1) > 0
    else:
        assert key.used(reply.binding_index, 0) == 0


@settings(LENIENT, max_examples=80)
@given(limits=st.sampled_from(SETS), past=past_calls, cost=st.integers(1, 6))
def test_a_call_at_retry_after_is_admitted_and_one_before_is_not(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int
) -> None:
    key = CalledKey(execute, limits)
    key.make_calls(past)
    reply = key.acquire(cost)
    if reply.admitted:
        assert reply.retry_ms == 0
        reply = key.peek(6, 0)
        cost = 6
        assume(not reply.admitted)
    check_retry(key, cost, reply)


@settings(LENIENT, max_examples=50)
@given(
    limits=st.sampled_from(SETS), past=past_calls, cost=st.integers(1, 3), calls=st.integers(2, 9)
)
def test_retry_of_a_partly_refused_shared_call_is_exact_too(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int, calls: int
) -> None:
    key = CalledKey(execute, limits)
    key.make_calls(past)
    reply = key.acquire(cost, calls=calls)
    assume(reply.admitted < calls)
    check_reset(key, reply)
    check_retry(key, cost, reply)


@settings(LENIENT, max_examples=50)
@given(limits=st.sampled_from(SETS), past=past_calls, cost=st.integers(1, 6), peek=st.booleans())
def test_the_window_is_empty_at_reset_after_and_not_before(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int, peek: bool
) -> None:
    key = CalledKey(execute, limits)
    key.make_calls(past)
    check_reset(key, key.peek(cost, 0) if peek else key.acquire(cost))


@settings(LENIENT, max_examples=50)
@given(limits=st.sampled_from(SETS), past=past_calls, cost=st.integers(1, 6))
def test_one_wait_of_retry_after_is_enough(
    execute: Execute, limits: list[Limit], past: list[tuple[int, int, str]], cost: int
) -> None:
    """If no others call the key, one wait is enough after every refusal."""
    key = CalledKey(execute, limits)
    key.make_calls(past)
    for _ in range(6):
        reply = key.acquire(cost)
        if not reply.admitted:
            key.now += reply.retry_ms
            assert key.acquire(cost).admitted
