"""The gate of Celery workers over random histories: what starts where, when, and in which order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distwindow import ConfigurationError, Health, Limit, Limiter, StoreUnavailable
from distwindow.contrib.celery.admission import TaskAdmission
from distwindow.contrib.tasks import WhileStoreIsAway
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.celery.simulated import (
    OneWorker,
    SimulatedRequest,
    SimulatedTask,
    SimulatedWorker,
    Timeline,
)

LIMIT = Limit("5/second")
SLOW = Limit("3/2 seconds")
ITEMS = [("key", (LIMIT,), 1)]


def make_tasks() -> list[SimulatedTask]:
    """A task with a limit for each key, one with two limits, one without."""
    return [
        SimulatedTask("keyed", limits=[LIMIT], limit_key="keyed:{key}"),
        SimulatedTask("two", limits=[LIMIT, Limit("20/minute")]),
        SimulatedTask("costly", limits=[SLOW], limit_cost=2),
        SimulatedTask("free"),
    ]


events = st.lists(
    st.tuples(
        st.integers(0, 400),  # ms since the event before
        st.integers(0, 1),  # worker
        st.integers(0, 3),  # task
        st.sampled_from("ab"),  # key
        st.sampled_from([0, 30, 300, 1500]),  # duration, ms
        st.integers(0, 9),  # revoked while it waits, if 0
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events)
def test_every_task_starts_once_in_order_and_no_limit_is_exceeded(
    history: list[tuple[int, int, int, str, int, int]],
) -> None:
    timeline = Timeline()
    store = MemoryStore(timeline.clock)
    tasks = make_tasks()
    workers = [SimulatedWorker(timeline, store, tasks) for _ in range(2)]
    received: list[list[SimulatedRequest]] = [[], []]
    for number, (gap_ms, at, task, key, duration_ms, fate) in enumerate(history):
        timeline.run_for(gap_ms / 1000)
        request = SimulatedRequest(number, tasks[task], key, duration_ms / 1000)
        received[at].append(request)
        workers[at].receive(request)
        if fate == 0 and request not in workers[at].running:
            request.is_revoked = True
        assert all(len(one.running) <= 2 for one in workers)
    timeline.run_for(900.0)

    started_at: dict[str, list[float]] = defaultdict(list)
    costs = {"costly": 2}
    for worker, got in zip(workers, received, strict=True):
        started = [request for request, _ in worker.started]
        assert len(started) == len(set(started))
        alive = [request for request in got if not request.is_revoked]
        # A task that waits for a slot only may be revoked without effect in this simulation, as
        # the pool asks Celery for that.
        assert Counter(request for request in started if not request.is_revoked) == Counter(alive)
        for line in {(request.task.name, request.args) for request in alive}:
            name, args = line
            in_line = [
                request.number
                for request in started
                if request.task.name == name and (name != "keyed" or request.args == args)
            ]
            if name != "free":
                assert in_line == sorted(in_line)
        assert worker.gate.parked == worker.extra_prefetch == worker.gate.lines.size == 0
        assert len(worker.gate.lines) == 0
        assert worker.semaphore.value == 2
        for request, at_s in worker.started:
            if request.task.name != "free":
                key = f"{request.task.name}{request.args if request.task.name == 'keyed' else ''}"
                started_at[key] += [at_s] * costs.get(request.task.name, 1)
    for key, moments in started_at.items():
        check_bound(moments, SLOW if key == "costly" else LIMIT)


def check_bound(moments: list[float], limit: Limit) -> None:
    """No window of whole buckets holds more than the limit."""
    in_bucket = Counter(round(at_s * 1000) // limit.bucket_ms for at_s in moments)
    for first in in_bucket:
        assert sum(in_bucket[first + n] for n in range(limit.buckets)) <= limit.amount


@settings(max_examples=40, deadline=None)
@example([100] * 7 + [0] * 20, 1, "7/second")  # a permit comes back with the end of each bucket
@example([20] * 3 + [0] * 20, 2, "3/200ms")
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from(["7/second", "3/200ms", "10/s strict"]),
)
def test_one_line_starts_when_one_caller_would_be_admitted(
    gaps_ms: list[int], workers: int, limit: str
) -> None:
    """The oracle: one caller that asks for one permit after the other, again at `retry_after`."""
    timeline = Timeline()
    store = MemoryStore(timeline.clock)
    task = SimulatedTask("fetch", limits=limit)
    fleet = [SimulatedWorker(timeline, store, [task], slots=100) for _ in range(workers)]
    began_s = timeline.clock.monotonic()
    arrivals = []
    for number, gap_ms in enumerate(gaps_ms):
        timeline.run_for(gap_ms / 1000)
        arrivals.append(timeline.clock.monotonic() - began_s)
        fleet[number % workers].receive(SimulatedRequest(number, task, "", 0.0))
    timeline.run_for(100.0)
    found = sorted(at_s - began_s for worker in fleet for _, at_s in worker.started)

    alone = Timeline()
    limiter = Limiter(MemoryStore(alone.clock), limit, time=alone.clock)
    began_s = alone.clock.monotonic()
    expected = []
    for arrival_s in arrivals:
        alone.run_for(max(0.0, arrival_s - (alone.clock.monotonic() - began_s)))
        while not (decision := limiter.try_acquire("fetch")):
            alone.run_for(decision.retry_after)
        expected.append(alone.clock.monotonic() - began_s)
    assert len(found) == len(expected)
    # A timer of the gate fires a millisecond late at most.
    assert all(abs(a - b) < 0.003 for a, b in zip(found, expected, strict=True))
    # One call for each admission, and in each bucket at most one refusal for each worker.
    spent_s = max([0.0, *found])
    buckets = 1 + spent_s * 1000 / Limit(limit).bucket_ms
    assert sum(worker.admission.asks for worker in fleet) <= len(found) + workers * buckets


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.integers(0, 20), st.booleans())
def test_no_more_than_max_parked_stay(count: int, max_parked: int, with_eta: bool) -> None:
    worker = OneWorker("1/minute", max_parked=max_parked)
    worker.receive_all(range(count), eta=object() if with_eta else None)
    assert worker.most_extra_prefetch == min(max_parked, count - 1)
    assert worker.gate.parked == min(max_parked, count - 1)
    assert len(worker.sent_back) == max(0, count - 1 - max_parked)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 20))
def test_the_worker_fetches_on_while_its_lines_get_shorter(count: int, max_parked: int) -> None:
    worker = OneWorker("4/second", "{key}", max_parked=max_parked)
    worker.receive_all(range(count), "01")
    while worker.gate.lines.size:
        assert worker.extra_prefetch == min(worker.gate.parked, max_parked)
        worker.run_for(0.1)
    assert worker.extra_prefetch == 0
    assert len(worker.started) + len(worker.sent_back) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(2, 20))
def test_a_message_is_kept_no_longer_than_max_hold_and_comes_back_in_turn(
    count: int, max_hold_s: int
) -> None:
    worker = OneWorker("1/second", max_hold_s=float(max_hold_s))
    worker.receive_all(range(count))
    worker.run_for(max_hold_s + 1.0)
    assert worker.gate.lines.size == 0
    numbers = [request.number for request, _ in worker.started + worker.sent_back]
    assert numbers == list(range(count))  # the first start, the others go back in their order
    delays = [delay_s for _, delay_s in worker.sent_back]
    assert delays == sorted(delays)
    assert all(1.0 <= delay_s <= max_hold_s / 2 for delay_s in delays)
    assert worker.extra_prefetch == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(100, 400))
def test_a_task_that_expires_leaves_at_that_moment(expire_s: list[int], max_hold_s: int) -> None:
    worker = OneWorker("1/hour", max_hold_s=float(max_hold_s))
    worker.receive_all([0])
    requests = []
    for number, after_s in enumerate(expire_s, 1):
        request = SimulatedRequest(number, worker.task, "", 0.0)
        request.expires_after_s = float(after_s)
        worker.timeline.call_after(float(after_s), partial(setattr, request, "is_revoked", True))
        worker.receive(request)
        requests.append(request)
    worker.run_for(0.5)
    for second in range(max(expire_s) + 1):  # it is half past this second
        for request, after_s in zip(requests, expire_s, strict=True):
            if after_s < max_hold_s:
                assert request.announced == (after_s <= second)
        if second < max_hold_s:
            assert worker.gate.lines.size == sum(after_s > second for after_s in expire_s)
        worker.run_for(1.0)
    expired = {request for request in requests if request.announced}
    assert not expired & {request for request, _ in worker.sent_back}


def test_with_a_bound_from_above_the_prefetch_count_ends_where_it_began() -> None:
    """`worker_eta_task_limit`: what could not be raised is not lowered."""
    worker = OneWorker("10/second")
    worker.prefetch_bound = 3
    worker.receive_all(range(50))
    worker.run_for(30.0)
    assert len(worker.started) == 50
    assert (worker.most_extra_prefetch, worker.extra_prefetch) == (3, 0)


def test_one_that_comes_overdue_asks_before_it_is_sent_back() -> None:
    worker = OneWorker("1/minute", max_hold_s=2.0)
    requests = [SimulatedRequest(number, worker.task, "", 0.0, eta=object()) for number in range(2)]
    for request in requests:
        request.received_s = worker.clock.monotonic() - 100.0
        worker.gate.process(request)
    assert [request for request, _ in worker.started] == requests[:1]
    assert [request for request, _ in worker.sent_back] == requests[1:]


def test_what_the_broker_does_not_take_back_is_kept() -> None:
    worker = OneWorker("1/minute", max_hold_s=2.0)
    requests = worker.receive_all(range(3))
    worker.broker_is_up = False
    worker.run_for(4.0)
    assert worker.gate.lines.size == 2
    assert worker.sent_back == []
    worker.broker_is_up = True
    worker.run_for(6.0)
    assert [request for request, _ in worker.sent_back] == requests[1:]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 2000), st.integers(0, 40))
def test_after_a_lost_connection_the_gate_begins_anew(before: int, ms: int, after: int) -> None:
    """What waits is given back."""
    worker = OneWorker(LIMIT)
    requests = worker.receive_all(range(before), duration_s=0.1)
    worker.run_for(ms / 1000)
    worker.semaphore.clear()  # as Celery does, before it stops the steps of the consumer
    lost_with = len(worker.started)
    worker.gate.close()
    worker.run_for(5.0)
    assert len(worker.started) == lost_with
    assert worker.gate.lines.size == worker.gate.parked == 0
    assert worker.given_back == requests[lost_with:]

    worker.extra_prefetch = 0  # a new connection has a new prefetch count
    worker.gate.open()
    worker.receive_all(range(before, before + after), duration_s=0.1)
    worker.run_for(60.0)
    assert worker.numbers[lost_with:] == list(range(before, before + after))
    assert worker.extra_prefetch == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 20), st.booleans())
@example(before=5, ends_in_ask=2, after=5, comes_back=True)
def test_a_connection_ends_while_the_store_is_asked(
    before: int, ends_in_ask: int, after: int, comes_back: bool
) -> None:
    """Under gevent, and there may be the next connection before the store has answered."""
    asks = 0
    connection = 1  # 0: there is none
    received: dict[int, int] = {}  # over which connection, by number
    started_before = 0

    def receive(numbers: range) -> None:
        received.update(dict.fromkeys(numbers, connection))
        worker.receive_all(numbers)

    def reconnect() -> None:
        nonlocal connection
        connection, worker.extra_prefetch = 2, 0  # a new connection has a new prefetch count
        worker.gate.open()
        receive(range(before, before + after))

    def before_ask(items: Any) -> None:
        nonlocal asks, connection, started_before
        asks += 1
        if asks == ends_in_ask:
            started_before, connection = len(worker.started), 0
            worker.gate.close()
            if comes_back:
                reconnect()

    worker = OneWorker("5/second", slots=50, before_ask=before_ask, pool="threads")
    for number in range(before):
        receive(range(number, number + 1))
    worker.run_for(30.0)
    if connection == 0:
        assert worker.gate.lines.size == worker.gate.parked == 0
        reconnect()
    worker.run_for(30.0)
    if connection == 1:
        assert worker.numbers == list(range(before))
    else:
        second = [number for number, over in received.items() if over == 2]
        assert worker.numbers[started_before:] == second
    assert worker.gate.lines.size == worker.gate.parked == worker.extra_prefetch == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 3000), st.sampled_from(["hold", "run"]))
def test_while_the_store_is_away_tasks_wait_or_run(
    count: int, away_ms: int, policy: WhileStoreIsAway
) -> None:
    failed_at: list[float] = []

    def fail_at_first(items: Any) -> None:
        if worker.monotonic() < back_at_s:
            failed_at.append(worker.monotonic())
            raise StoreUnavailable("away")

    worker = OneWorker(
        "5/second", "{key}", slots=50, on_store_error=policy, before_ask=fail_at_first
    )
    back_at_s = worker.monotonic() + away_ms / 1000
    worker.receive_all(range(count), "0123456")
    worker.run_for(max(0.0, away_ms / 1000 - 0.001))
    if away_ms > 1:
        assert len(worker.started) == (count if policy == "run" else 0)
    worker.run_for(30.0)
    assert sorted(worker.numbers) == list(range(count))
    # However many lines there are, one call fails per pause, and the pauses grow.
    pauses = [later - earlier for earlier, later in pairwise(failed_at)]
    assert all(pause >= 0.25 for pause in pauses)
    assert len(failed_at) <= 5
    assert worker.admission.store_is_up or policy == "run"


def health(*, up: bool) -> Health:
    return Health(up, None, None, 0, 0, () if up else ("the server",))


@settings(max_examples=60, deadline=None)
@example(away_ms=8600, late_ms=0, policy="hold")
@given(st.integers(1, 20_000), st.integers(0, 400), st.sampled_from(["hold", "run"]))
def test_the_store_is_asked_again_when_the_limiter_has_heard_of_its_return(
    away_ms: int, late_ms: int, policy: WhileStoreIsAway
) -> None:
    failed_at: list[float] = []
    answered_at: list[float] = []

    def fail_at_first(items: Any) -> None:
        now_s = worker.monotonic()
        if now_s < back_at_s:
            failed_at.append(now_s)
            worker.admission.on_health_change(health(up=False))
            raise StoreUnavailable("away")
        answered_at.append(now_s)

    worker = OneWorker("5/second", "{key}", on_store_error=policy, before_ask=fail_at_first)
    timeline = worker.timeline
    back_at_s = worker.monotonic() + away_ms / 1000
    heard_after_s = (away_ms + late_ms) / 1000
    timeline.call_after(heard_after_s, lambda: worker.admission.on_health_change(health(up=True)))
    for ms in range(0, away_ms + late_ms + 1000, 50):  # with "run", nothing waits
        timeline.call_after(ms / 1000, partial(worker.receive_all, [ms], "012"))
    worker.run_for(60.0)
    assert all(later - earlier >= 0.25 for earlier, later in pairwise(failed_at))
    kept_until_s = max(back_at_s + late_ms / 1000, failed_at[-1] + 0.25)
    assert answered_at[0] <= kept_until_s + 0.1 + 0.01
    assert len(worker.started) == len(range(0, away_ms + late_ms + 1000, 50))
    if policy == "hold":
        # What waits for permits is not asked for earlier: one refusal for each key and bucket.
        spent_s = max(answered_at) - min(answered_at)
        assert len(answered_at) <= len(worker.started) + 3 * (1 + spent_s / 0.1)


def test_a_return_that_was_heard_before_an_ask_has_failed_ends_no_pause() -> None:
    clock = ManualClock()
    fails = True

    def ask(items, enqueue=False):
        if not fails:
            return limiter.try_acquire_all(items, enqueue)
        raise StoreUnavailable("away")

    limiter = Limiter(MemoryStore(clock), "1/second", time=clock)
    admission = TaskAdmission(ask, clock.monotonic, "hold")
    admission.on_health_change(health(up=True))
    for pause_s in (0.25, 0.5, 1.0):
        assert admission.may_run(ITEMS).wait_s == pause_s
        clock.advance(pause_s - 0.001)
        assert not admission.end_pause()
        assert admission.is_paused
        clock.advance(0.001)
    assert admission.may_run(ITEMS).wait_s == 2.0
    admission.on_health_change(health(up=True))
    admission.on_health_change(health(up=False))
    clock.advance(0.3)
    assert not admission.end_pause()
    admission.on_health_change(health(up=True))
    assert admission.end_pause()
    assert admission.may_run(ITEMS).wait_s == 4.0  # it had not come back after all
    fails = False
    admission.on_health_change(health(up=True))
    clock.advance(0.24)
    assert not admission.end_pause()
    clock.advance(0.01)
    assert admission.end_pause()
    assert not admission.end_pause()
    assert admission.may_run(ITEMS).admitted
    assert admission.store_is_up


@pytest.mark.parametrize("error", [ConfigurationError("NOPERM"), RuntimeError("a bug")])
def test_what_is_no_outage_opens_no_limit(error: Exception) -> None:
    failing = True
    failed_at: list[float] = []

    def fail_for_one_key(items: Any) -> None:
        if failing and items[0][0] == "bad":
            failed_at.append(worker.monotonic())
            raise error

    worker = OneWorker("5/second", "{key}", on_store_error="run", before_ask=fail_for_one_key)
    worker.receive_all(range(10), ("bad", "good"))
    worker.run_for(1.0)  # the tasks of other keys are not held up
    assert sorted(worker.numbers) == [1, 3, 5, 7, 9]
    worker.run_for(20.0)
    assert len(worker.started) == 5
    pauses = [later - earlier for earlier, later in pairwise(failed_at)]
    assert pauses[:6] == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 5.0], abs=0.01)
    failing = False
    worker.run_for(10.0)
    assert len(worker.started) == 10


def failing_with(*errors: Exception) -> Callable[..., Any]:
    """Return a limiter's answers: each raises the next error, and the last one ever after."""
    left = list(errors)

    def ask(items, enqueue=False):
        raise left.pop(0) if len(left) > 1 else left[0]

    return ask


def test_the_pause_of_a_key_that_fails_for_days_is_bounded() -> None:
    admission = TaskAdmission(failing_with(ConfigurationError("NOPERM")), lambda: 0.0, "hold")
    assert admission.may_run(ITEMS, 10_000).wait_s == 5.0


def test_the_pause_of_a_store_that_is_away_for_days_is_bounded() -> None:
    clock = ManualClock()
    admission = TaskAdmission(failing_with(StoreUnavailable("away")), clock.monotonic, "hold")
    pauses = []
    for _ in range(8):
        pauses.append(admission.may_run(ITEMS).wait_s)
        clock.advance(pauses[-1])
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_where_every_key_fails_few_are_asked_for() -> None:
    """Each ask may open a connection, as with a wrong password."""
    failing, asks = True, 0

    def fail(items: Any) -> None:
        nonlocal asks
        asks += 1
        if failing:
            raise ConfigurationError("WRONGPASS")

    worker = OneWorker("5/second", "{key}", slots=50, before_ask=fail)
    worker.receive_all(range(200), [str(number) for number in range(200)])
    worker.run_for(10.0)
    assert asks <= 3 + 10 / 0.25
    failing = False
    worker.run_for(5.3)  # the longest pause, and the last one of all
    assert len(worker.started) == 200


def test_a_key_that_fails_after_an_outage_ends_the_outage() -> None:
    clock = ManualClock()
    ask = failing_with(StoreUnavailable("away"), ConfigurationError("NOPERM"))
    admission = TaskAdmission(ask, clock.monotonic, "hold")
    for is_up in (False, True):
        clock.advance(10.0)
        admission.may_run(ITEMS)
        assert admission.store_is_up == is_up


def test_an_interrupt_while_the_store_is_asked_keeps_no_slot() -> None:
    interrupts = iter([KeyboardInterrupt()])

    def interrupt_first(items: Any) -> None:
        if (interrupt := next(interrupts, None)) is not None:
            raise interrupt

    worker = OneWorker("5/second", slots=1, before_ask=interrupt_first)
    with pytest.raises(KeyboardInterrupt):
        worker.receive_all([0])
    worker.receive_all([1, 2])
    worker.run_for(5.0)
    assert worker.numbers == [0, 1, 2]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_timer_that_fires_while_the_gate_works_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, pool: Any
) -> None:
    """Without an event loop each timer has a thread, which may run before the call that has set it
    goes on. Each question takes longer than the gate works at once.
    """

    def call_after(seconds: float, callback: Callable[[], object]) -> int:
        if seconds <= 0.001:
            worker.clock.advance(seconds)
            callback()
        return worker.timeline.call_after(seconds, lambda: None if seconds <= 0.001 else callback())

    worker = OneWorker(
        "3/second", slots=4, before_ask=lambda items: worker.clock.advance(0.06), pool=pool
    )
    monkeypatch.setattr(worker, "call_after", call_after)
    worker.receive_all(range(9))
    worker.run_for(20.0)
    assert worker.numbers == [*range(9)]


def test_a_connection_that_ends_while_the_store_is_asked_keeps_no_slot() -> None:
    asked: list[object] = []

    def end_connection_at_first(items: Any) -> None:
        asked.append(items)
        if len(asked) == 1:
            worker.gate.close()
            worker.gate.open()

    worker = OneWorker("5/second", slots=1, before_ask=end_connection_at_first, pool="threads")
    worker.receive_all(range(3))
    worker.run_for(5.0)
    assert worker.numbers == [1, 2]


def test_nothing_is_done_for_a_connection_that_has_ended() -> None:
    """Under gevent it ends while one line asks, or while one message is published."""
    asked: list[object] = []

    def end_connection(items: Any) -> None:
        asked.append(items)
        worker.gate.close()
        raise StoreUnavailable("away")

    worker = OneWorker("5/second", "{key}", slots=50, before_ask=end_connection, pool="threads")
    requests = [SimulatedRequest(number, worker.task, str(number), 0.0) for number in range(8)]
    worker.gate._arrivals.extend(requests)  # they come at once
    worker.gate.run_pending()
    assert len(asked) == 1

    worker = OneWorker("1/day", max_hold_s=5.0)
    publish = worker.send_back

    def end_and_publish(request, delay_s):
        worker.gate.close()
        return publish(request, delay_s)

    setattr(worker, "send_back", end_and_publish)  # noqa: B010  # a method
    worker.receive_all(range(8))
    worker.run_for(10.0)
    assert len(worker.sent_back) == 1


def test_what_waits_for_its_limit_needs_no_process() -> None:
    worker = OneWorker("100/minute", slots=2)
    worker.receive_all(range(300), duration_s=1.0)
    assert worker.gate.waiting_for_limits == 0  # their permits are there, and processes are not
    worker.run_for(55.0)
    assert worker.gate.waiting_for_limits == 300 - len(worker.started) > 150


def test_those_that_were_sent_back_are_neither_counted_nor_kept() -> None:
    worker = OneWorker("1/day", max_parked=10)
    worker.receive_all(range(500), eta=object())
    worker.run_for(0.9)
    assert len(worker.sent_back) == 489
    assert worker.gate.waiting_for_limits == 10
    (line,) = worker.gate.lines
    assert len(line.entries) <= 2 * 10 + 8


def test_while_the_result_backend_is_away_an_expired_task_is_looked_at_now_and_then() -> None:
    """Whether it is revoked is unknown then, and Celery writes what it cannot store to the log."""
    worker = OneWorker("1/day")
    worker.receive_all([0])
    expired = SimulatedRequest(1, worker.task, "", 0.0)
    looks: list[float] = []

    def revoked() -> bool:
        looks.append(worker.monotonic())
        raise OSError("the result backend is away")

    setattr(expired, "revoked", revoked)  # noqa: B010  # a method
    received_s = worker.monotonic()
    worker.receive(expired)
    expired.expires_after_s = 0.0
    entry = next(iter(worker.gate.lines)).entries[-1]
    worker.gate.lines.keep_until(entry, received_s)
    entry.expires_s = received_s
    worker.run_for(60.0)
    assert 10 <= len(looks) <= 13


def test_a_paced_limit_lets_one_task_after_the_other_start() -> None:
    worker = OneWorker("10/second paced 500ms", slots=100)
    worker.receive_all(range(20))
    worker.run_for(3.0)
    moments = [at_s for _, at_s in worker.started]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert len(moments) == 20
    assert all(0.0985 <= gap <= 0.105 for gap in gaps)


@pytest.mark.parametrize("is_slot_free", [True, False])
def test_tasks_that_are_dropped_leave_at_once_with_and_without_a_free_slot(
    is_slot_free: bool,
) -> None:
    worker = OneWorker("1/hour", slots=1)
    requests = worker.receive_all(range(20), duration_s=60.0)
    worker.run_for(61.0 if is_slot_free else 1.0)
    for request in requests[1:19]:
        request.is_revoked = True
    worker.gate.drop_revoked("fetch")
    assert [request.announced for request in requests] == [False, *[True] * 18, False]
    assert worker.gate.lines.size == 1
    worker.run_for(3700.0)
    assert worker.numbers == [0, 19]
    assert worker.gate.parked == worker.extra_prefetch == 0
    assert worker.semaphore.value == 1


def test_after_a_freeze_nothing_runs_that_another_worker_has_got() -> None:
    """No timer has fired meanwhile, and the visibility timeout is over. Nothing is sent back or
    acknowledged, either: the message has the same delivery tag with the other worker.
    """
    worker = OneWorker("5/second", max_hold_s=30.0)
    worker.visibility_timeout_s = 60.0
    worker.receive_all(range(50))
    started = len(worker.started)
    worker.clock.advance(61.0)
    worker.receive_all(range(50, 53))
    worker.run_for(10.0)
    assert worker.numbers[started:] == [50, 51, 52]
    assert worker.sent_back == []
    assert len(worker.forgotten) == 50 - started
    assert worker.extra_prefetch == worker.gate.parked == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 12))
def test_with_more_than_max_parked_the_last_in_the_line_goes_back(
    ranks: list[int], max_parked: int
) -> None:
    worker = OneWorker("1/day", max_parked=max_parked)
    worker.receive_all([0])
    requests = []
    for number, rank in enumerate(ranks, 1):
        request = SimulatedRequest(number, worker.task, "", 0.0)
        request.rank = rank
        worker.receive(request)
        requests.append(request)
    in_order = sorted(requests, key=lambda request: request.rank)
    stay = {request for request, _ in worker.sent_back} ^ set(requests)
    assert stay == set(in_order[:max_parked])


@pytest.mark.parametrize("is_asking", [False, True])
def test_a_worker_that_is_told_to_stop_starts_nothing_more(is_asking: bool) -> None:
    """Its event loop may still be in the pass in which a hanging broker answers again."""

    def stop_in_the_fifth(items: Any) -> None:
        worker.is_told_to_stop = is_asking and len(worker.started) == 4

    worker = OneWorker("5/second", before_ask=stop_in_the_fifth)
    worker.receive_all(range(20))
    worker.run_for(0.5)
    begun = len(worker.started)
    assert begun == (4 if is_asking else 5)
    worker.is_told_to_stop = True
    worker.run_for(10.0)
    assert len(worker.started) == begun
    worker.gate.close()
    assert len(worker.given_back) == 20 - begun


def test_tasks_without_limits_are_given_back_too_when_the_connection_is_lost() -> None:
    timeline = Timeline()
    tasks = make_tasks()
    worker = SimulatedWorker(timeline, MemoryStore(timeline.clock), tasks)
    requests = [SimulatedRequest(number, tasks[number % 4], "a", 9.0) for number in range(60)]
    for request in requests:
        worker.receive(request)
    timeline.run_for(1.0)
    worker.semaphore.clear()
    worker.gate.close()
    started = {request for request, _ in worker.started}
    assert started
    assert set(worker.given_back) == set(requests) - started
    assert len(worker.given_back) == len(requests) - len(started)
