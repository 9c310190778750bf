"""A circuit breaker does what a naive model does, which is written from the documentation and knows
every call: when it was let through, when and how it ended.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import (
    BreakerOpen,
    CircuitBreaker,
    ConsecutiveFailures,
    ErrorCount,
    ErrorRatio,
    SlowRatio,
)
from distwindow.breaker.call import BreakerCall
from distwindow.breaker.record import CLOSED, BreakerRecord, CallCounts
from distwindow.breaker.rules import BreakerRule
from distwindow.breaker.states import BreakerAdmission
from tests.clock_and_stores import T0, ManualClock

RULES: tuple[BreakerRule, ...] = (
    ErrorRatio(0.5, window=10, min_calls=3, open_for=5, probe_timeout=4),
    ErrorRatio(1.0, window=2, min_calls=1, open_for=1, buckets=1, probes=2),
    SlowRatio(0.2, 0.3, window=6, min_calls=4, open_for=3, buckets=3, probes=3, probe_timeout=2),
    ErrorCount(3, window=4, open_for=2, buckets=2),
    ConsecutiveFailures(3, open_for=2, probes=2),
)


@dataclass(eq=False)
class ModelCall:
    """One call of the model."""

    generation: int
    began_ms: int
    is_probe: bool
    ended_ms: int | None = None
    bad: bool = False


@dataclass
class Model:
    """Every call there was, and the state."""

    rule: BreakerRule
    state: str = "closed"
    generation: int = 0
    """How many changes of state there were."""
    opened_ms: int = 0
    calls: list[ModelCall] = field(default_factory=list)
    last_ended: list[ModelCall] = field(default_factory=list)
    """Those that ended, in this order."""
    changes: list[str] = field(default_factory=list)

    def begin(self, now: int) -> ModelCall | None:
        if self.state == "open" and now >= self.opened_ms + self.rule.open_ms:
            self.change("half_open")
        probes = [c for c in self.calls if c.is_probe and c.generation == self.generation]
        # However long they take: their process lives.
        room = self.rule.probes - len(probes)
        if self.state == "open" or (self.state == "half_open" and room <= 0):
            return None
        call = ModelCall(self.generation, now, self.state == "half_open")
        self.calls.append(call)
        return call

    def end(self, call: ModelCall, now: int, failed: bool | None) -> None:
        if failed is None:
            self.calls.remove(call)
            return
        late = call.generation != self.generation
        slow = now - call.began_ms > getattr(self.rule, "max_rt", 0) * 1000
        call.ended_ms, call.bad = now, slow if isinstance(self.rule, SlowRatio) else failed
        if late:
            return
        self.last_ended.append(call)
        if not call.is_probe:
            if self.is_reached(now):
                self.opened_ms = now
                self.change("open")
        elif call.bad:
            self.opened_ms = now
            self.change("open")
        else:
            ended = [c for c in self.calls if c.is_probe and c.generation == self.generation]
            if sum(c.ended_ms is not None for c in ended) >= self.rule.probes:
                self.change("closed")

    def is_reached(self, now: int) -> bool:
        if isinstance(self.rule, ConsecutiveFailures):
            last = [c for c in self.last_ended if c.generation == self.generation]
            last = last[-self.rule.count :]
            return len(last) == self.rule.count and all(c.bad for c in last)
        width = self.rule.window_ms // self.rule.buckets
        ended = [
            c
            for c in self.calls
            if c.generation == self.generation
            and c.ended_ms is not None
            and now // width - c.ended_ms // width < self.rule.buckets
        ]
        bad = sum(c.bad for c in ended)
        if len(ended) < self.rule.min_calls:
            return False
        if isinstance(self.rule, ErrorCount):
            return bad >= self.rule.count
        return bad >= self.rule.threshold * len(ended)

    def change(self, state: str) -> None:
        if state != self.state:
            self.changes.append(f"{self.state} -> {state}")
        self.state, self.generation = state, self.generation + 1

    def change_by_hand(self, state: str, now: int) -> None:
        self.opened_ms = now
        self.change(state)


class Failure(Exception):
    """How calls fail."""


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin"] * 8 + ["end"] * 8 + ["wait", "wait", "open", "close"]),
        st.integers(0, 7),
        st.sampled_from([True, True, False, False, None]),
        st.sampled_from([0, 0, 0, 0, 1, 150, 250, 999, 1000, 2000, 4000, 5000, 11_000]),
    ),
    min_size=30,
    max_size=80,
)


def run(rule: BreakerRule, history: list[tuple[str, int, bool | None, int]]) -> list[str]:
    """Run a history on both, compare each step, and return the changes that there were."""
    clock, heard = ManualClock(T0), list[str]()
    breaker = CircuitBreaker("memory://", rule, ignore=KeyError, time=clock)
    breaker.on_change(lambda change: heard.append(f"{change.previous} -> {change.state}"))
    assert breaker.state("k") == "closed"  # the first look tells a listener nothing
    model = Model(rule)
    open_calls: list[tuple[BreakerCall[BreakerAdmission], ModelCall]] = []
    for action, which, failed, elapsed_ms in history:
        clock.move(elapsed_ms)
        if action == "begin":
            expected, call = model.begin(clock.now_ms()), breaker.call("k")
            refused: BreakerOpen | None = None
            try:
                Context().run(call.__enter__)  # no call is inside a probe
            except BreakerOpen as exc:
                refused = exc
            assert (refused is None) == (expected is not None)
            if refused is not None:
                assert (refused.state, refused.retry_after > 0) == (model.state, True)
            if expected is not None:
                open_calls.append((call, expected))
        elif action == "end" and open_calls:
            call, of_model = open_calls.pop(which % len(open_calls))
            raised = {True: Failure(), False: None, None: KeyError()}[failed]
            model.end(of_model, clock.now_ms(), failed)
            call.__exit__(None if raised is None else type(raised), raised, None)
        elif action == "open":
            breaker.open("k")
            model.change_by_hand("open", clock.now_ms())
        elif action == "close":
            breaker.close("k")
            model.change_by_hand("closed", clock.now_ms())
        assert breaker.state("k") == model.state
        assert heard == model.changes
    return heard


@settings(deadline=None, max_examples=150)
@given(rule=st.sampled_from(RULES), history=steps)
def test_a_breaker_does_what_the_model_does(
    rule: BreakerRule, history: list[tuple[str, int, bool | None, int]]
) -> None:
    run(rule, history)


record_steps = st.lists(
    st.tuples(
        st.sampled_from(["bad", "take", "take", "renew", "succeed", "succeed", "fail", "free"]),
        st.sampled_from("abc"),
        st.sampled_from([0, 0, 1, 999, 1000, 2000, 4000, 5000, -1, -5000]),
    ),
    min_size=10,
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(rule=st.sampled_from(RULES), history=record_steps)
def test_a_call_is_told_to_wait_exactly_where_it_would_get_no_probe(
    rule: BreakerRule, history: list[tuple[str, str, int]]
) -> None:
    record, now = BreakerRecord(), T0
    for action, probe_id, elapsed_ms in history:
        now += elapsed_ms
        if action == "bad":
            counts = [CallCounts(record.epoch, now, 5, 5)]
            record.add(rule, record.live_counts(rule, counts, now), now)
        elif action == "take":
            record.take_probe(rule, probe_id, now)
        elif action == "renew":
            record.renew_probe(rule, probe_id, now)
        else:
            record.end_probe(rule, probe_id, action, now)
        waits = record.retry_in_ms(rule, now) > 0
        gets_one = copy.deepcopy(record).take_probe(rule, "new", now)
        assert waits == (record.state != CLOSED and not gets_one)


@pytest.mark.slow
def test_the_histories_reach_every_change() -> None:
    """Otherwise the property would say little."""
    seen = Counter[str]()

    @settings(deadline=None, max_examples=100, database=None, derandomize=True)
    @given(rule=st.sampled_from(RULES), history=steps)
    def collect(rule: BreakerRule, history: list[tuple[str, int, bool | None, int]]) -> None:
        seen.update(run(rule, history))

    collect()
    assert set(seen) == {
        "closed -> open", "open -> half_open", "half_open -> open", "half_open -> closed",
        "open -> closed",
    }  # fmt: skip
