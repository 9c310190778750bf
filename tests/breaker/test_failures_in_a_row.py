"""`ConsecutiveFailures` is pybreaker's rule. One process decides as pybreaker does; a fleet as one
process would that made the calls of all flushes, in the order in which the store took them.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import ConsecutiveFailures
from distwindow.breaker.rules import BreakerRule
from tests.breaker.driven import IN_BOTH_WORLDS, ON_ALL_STORES, Driven, driven
from tests.breaker.test_breaker_fleet import TICK_MS, fleet
from tests.clock_and_stores import ManualClock, fresh_key

RULE = ConsecutiveFailures(3, open_for=5.0)


class PyBreaker:
    """The rule of pybreaker 1.4.1, as its source and its documentation have it."""

    def __init__(self, fail_max: int, reset_timeout: float) -> None:
        self.fail_max, self.reset_timeout = fail_max, reset_timeout
        self.state, self.fail_counter, self.opened_at = "closed", 0, 0.0
        self.changes = 0

    def call(self, failed: bool, now: float) -> bool:
        """Make a call that lasts no time. Return False if it is refused."""
        if self.state == "open":
            if now < self.opened_at + self.reset_timeout:
                return False
            self.state = "half_open"
        self.count(failed, now)
        return True

    def count(self, failed: bool, now: float) -> None:
        self.fail_counter = self.fail_counter + 1 if failed else 0
        if failed and (self.state == "half_open" or self.fail_counter >= self.fail_max):
            self.change("open")
            self.opened_at = now
        elif not failed and self.state == "half_open":
            self.change("closed")

    def change(self, state: str) -> None:
        self.state, self.fail_counter = state, 0
        self.changes += 1


@IN_BOTH_WORLDS
@ON_ALL_STORES
@settings(deadline=None, max_examples=30)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from([True, True, False]), st.sampled_from([0, 0, 1, 4, 5, 599])),
        max_size=60,
    )
)
def test_one_process_lets_through_what_pybreaker_does(
    is_async: bool, store: str, redis_url: str, calls: list[tuple[bool, int]]
) -> None:
    theirs = PyBreaker(RULE.count, RULE.open_for)
    with driven(1, is_async, store, RULE, redis_url, fresh_key()) as (clock, (ours,)):
        for failed, pause in calls:
            clock.advance(pause)
            assert ours.call(failed) == theirs.call(failed, clock.monotonic())
            ours.flush()
            assert ours.state() == theirs.state


class Fleet:
    """The processes, as the documentation has them: what each knows, and has not flushed yet."""

    def __init__(self, clock: ManualClock, processes: list[Driven], store: str) -> None:
        self.clock, self.processes = clock, processes
        self.in_process = store == "memory"
        self.store = PyBreaker(RULE.count, RULE.open_for)
        self.known = [("closed", 0, 0.0)] * len(processes)
        self.pending: list[list[tuple[int, bool]]] = [[] for _ in processes]

    def flush(self, which: int) -> None:
        for epoch, failed in self.pending[which]:
            if (epoch, self.store.state) == (self.store.changes, "closed"):
                self.store.count(failed, self.clock.monotonic())
        self.pending[which] = []
        self.known[which] = (self.store.state, self.store.changes, self.store.opened_at)

    def call(self, which: int, failed: bool) -> bool:
        now, store = self.clock.monotonic(), self.store
        if self.in_process:
            self.flush(which)
        state, _, opened_at = self.known[which]
        if state == "open":
            if now < opened_at + RULE.open_for:
                return False
            self.known[which] = (store.state, store.changes, store.opened_at)
            if store.state == "open":  # a probe, if there is one to be had
                passes = store.call(failed, now)
                self.flush(which)
                return passes
        self.pending[which].append((self.known[which][1], failed))
        if self.in_process:
            self.flush(which)
        return True


@IN_BOTH_WORLDS
@ON_ALL_STORES
@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0, 1]),
            st.sampled_from(["failure", "failure", "failure", "success", "flush", "wait"]),
        ),
        max_size=80,
    )
)
def test_two_processes_decide_by_the_order_of_their_flushes(
    is_async: bool, store: str, redis_url: str, steps: list[tuple[int, str]]
) -> None:
    with driven(2, is_async, store, RULE, redis_url, fresh_key()) as (clock, processes):
        model = Fleet(clock, processes, store)
        assert [process.state() for process in processes] == ["closed"] * 2
        for which, step in steps:
            if step == "wait":
                clock.advance(RULE.open_for)
            for each in [0, 1] if step == "wait" else [which] if step == "flush" else []:
                model.flush(each)
                assert processes[each].state() == model.store.state
            if step in ("failure", "success"):
                failed = step == "failure"
                assert processes[which].call(failed) == model.call(which, failed)


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["failure", "success", "tick", "wait"])),
        max_size=80,
    ),
    faults=st.lists(st.sampled_from(["", "request lost", "reply lost"]), max_size=20),
)
def test_each_flush_counts_once_in_its_place_though_requests_and_replies_are_lost(
    steps: list[tuple[int, str]], faults: list[str]
) -> None:
    rule = ConsecutiveFailures(10**6, open_for=10_000)
    clock, store, processes = fleet(rule, 3, sync_interval=5000)  # so that only ticks send
    taken: list[bool] = []
    pending: list[list[bool]] = [[] for _ in processes]
    in_flight: list[list[bool]] = [[] for _ in processes]
    is_taken = [False] * len(processes)

    def tick(which: int) -> None:
        if not in_flight[which]:
            in_flight[which], pending[which], is_taken[which] = pending[which], [], False
        if not in_flight[which]:
            return
        fault = store.faults[-1] if store.faults else ""
        processes[which].tick()
        if fault != "request lost" and not is_taken[which]:
            taken.extend(in_flight[which])
            is_taken[which] = True
        if not fault:
            in_flight[which] = []

    for process in processes:
        process.breaker.state("k")
    store.faults = list(faults)
    for which, step in steps:
        if step == "wait":
            clock.move(TICK_MS)
        elif step == "tick":
            tick(which)
        else:
            processes[which].run(step == "failure")
            pending[which].append(step == "failure")
    store.faults = []
    for which in [0, 1, 2, 0, 1, 2]:
        tick(which)
    row = 0
    for failed in taken:
        row = row + 1 if failed else 0
    stored = [record.in_a_row for record in store.breakers]
    assert stored == ([row] if taken else [])


# -- what the rule is for -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4])
def test_one_failure_in_a_hundred_never_opens_it(number: int) -> None:
    clock, _, processes = fleet(ConsecutiveFailures(5, open_for=60.0), number)
    random = Random(34)
    for count in range(3000):
        clock.move(100)
        assert processes[count % number].run(failed=random.random() < 0.01)
        processes[count % number].tick()


@IN_BOTH_WORLDS
@ON_ALL_STORES
def test_a_failing_call_every_few_seconds_opens_it(
    is_async: bool, store: str, redis_url: str, prefix: str
) -> None:
    rule = ConsecutiveFailures(5, open_for=60.0)
    with driven(2, is_async, store, rule, redis_url, prefix) as (clock, processes):
        states = []
        for number in range(5):
            clock.advance(4)
            assert processes[number % 2].call(failed=True)
            processes[number % 2].flush()
            states.append(processes[0].state())
        assert states == ["closed"] * 4 + ["open"]
        clock.advance(59)
        assert not processes[1].call()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("stored", [0, 1, 2])
def test_the_calls_of_one_flush_count_in_their_order(
    stored: int, before: int, between: int, after: int
) -> None:
    """Those before its first success belong to the row in the store, those after its last one
    begin another.
    """
    clock, store, (first, second) = fleet(RULE, 2)
    assert second.breaker.state("k") == "closed"  # so that its calls do not ask, and so flush
    for _ in range(stored):
        assert first.run(failed=True)
    first.tick()
    calls = [True] * before + [False] * between + [True] * after
    for failed in calls:
        assert second.run(failed)
    clock.move(TICK_MS)
    second.tick()
    rows = [stored + before, after] if between else [stored + before + after]
    assert store.state_now() == ("open" if max(rows) >= RULE.count else "closed")


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_successes_of_others_end_a_row_between_flushes_and_not_within_one(failures: int) -> None:
    clock, store, (failing, other) = fleet(RULE, 2)
    for _ in range(20):
        for _ in range(failures):
            failing.run(failed=True)
            other.run(failed=False)
        clock.move(TICK_MS)
        failing.tick()
        other.tick()
        assert store.state_now() == ("open" if failures >= RULE.count else "closed")


@pytest.mark.parametrize("in_the_way", [[False], [False, True, False], [True, True, False]])
def test_as_many_as_the_rule_says_open_it_whatever_follows_in_the_flush(
    in_the_way: list[bool],
) -> None:
    _, store, (process,) = fleet(RULE, 1)
    for failed in [False, True, True, True, *in_the_way]:
        assert process.run(failed)
    process.tick()
    assert store.state_now() == "open"


@ON_ALL_STORES
@pytest.mark.parametrize(("pause_s", "is_kept"), [(600, True), (612, True), (616, False)])
def test_a_row_is_kept_while_an_open_breaker_could_refuse_a_call(
    store: str, pause_s: int, is_kept: bool, redis_url: str, prefix: str
) -> None:
    rule: BreakerRule = ConsecutiveFailures(2, open_for=5.0)
    with driven(1, False, store, rule, redis_url, prefix) as (clock, (process,)):
        for _ in range(2):
            assert process.call(failed=True)
            process.flush()
            clock.advance(pause_s)
        assert process.heard == (["open"] if is_kept else [])


@pytest.mark.parametrize("pause_s", [0, 9, 599, 605, 612])
def test_a_success_begins_anew_however_late_the_next_call_is(pause_s: int) -> None:
    """Also where no store is told of a success at once, as the breaker has made its own."""
    clock = ManualClock()
    process = Driven(False, "memory://", RULE, clock)
    for failed in (True, True, False):
        assert process.call(failed)
    clock.advance(pause_s)
    assert process.call(failed=True)
    assert process.state() == "closed"


@pytest.mark.parametrize("setting", ["window", "buckets", "min_calls"])
def test_it_has_no_window(setting: str) -> None:
    with pytest.raises(TypeError, match=setting):
        ConsecutiveFailures(3, **{setting: 10})
