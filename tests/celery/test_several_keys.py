"""Limits of one Celery task with keys of their own: all or none, and who waits for what."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter, StoreUnavailable
from distwindow.stores.memory import MemoryStore
from tests.celery.simulated import (
    OneWorker,
    SimulatedRequest,
    SimulatedTask,
    SimulatedWorker,
    Timeline,
)
from tests.celery.test_gate import check_bound

TOTAL, OF_TENANT = Limit("10/second"), Limit("2/second")
BOTH = [TOTAL, ("tenant:{key}", OF_TENANT)]
Pool = Literal["prefork", "threads", "solo", "gevent"]


def play(
    limits: Any,
    keys: list[str],
    *,
    workers: int = 1,
    pool: Pool = "prefork",
    gap_ms: int = 0,
    seconds: float = 600.0,
    **options: Any,
) -> tuple[list[SimulatedWorker], MemoryStore, Timeline]:
    """Have tasks with these keys come, and run for so long."""
    timeline = Timeline()
    store = MemoryStore(timeline.clock)
    task = SimulatedTask("fetch", limits=limits, **options)
    fleet = [SimulatedWorker(timeline, store, [task], pool=pool) for _ in range(workers)]
    for number, key in enumerate(keys):
        fleet[number % workers].receive(SimulatedRequest(number, task, key, 0.01))
        timeline.run_for(gap_ms / 1000)
    timeline.run_for(seconds)
    return fleet, store, timeline


def starts(fleet: list[SimulatedWorker]) -> list[tuple[float, SimulatedRequest]]:
    return sorted(
        ((at_s, request) for worker in fleet for request, at_s in worker.started),
        key=lambda start: start[0],
    )


def asks(fleet: list[SimulatedWorker]) -> int:
    return sum(worker.admission.asks for worker in fleet)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
@settings(max_examples=15, deadline=None)
@given(
    keys=st.lists(st.sampled_from("aaabcdefg"), max_size=60),
    workers=st.integers(1, 3),
    gap_ms=st.sampled_from([0, 30, 150]),
)
def test_each_limit_holds_by_itself_and_what_one_refuses_no_other_is_charged_for(
    pool: Pool, keys: list[str], workers: int, gap_ms: int
) -> None:
    fleet, store, timeline = play(BOTH, keys, workers=workers, pool=pool, gap_ms=gap_ms)
    found = starts(fleet)
    assert sorted(request.number for _, request in found) == list(range(len(keys)))
    check_bound([at_s for at_s, _ in found], TOTAL)
    by_tenant = defaultdict(list)
    for at_s, request in found:
        by_tenant[request.args[0]].append((at_s, request.number))
    for tenant, moments in by_tenant.items():
        check_bound([at_s for at_s, _ in moments], OF_TENANT)
        for place in range(workers):
            own = [number for _, number in moments if number % workers == place]
            assert own == sorted(own)
        with Limiter(store, OF_TENANT, time=timeline.clock) as limiter:
            assert limiter.stats(f"tenant:{tenant}").passed == 0  # nothing is left charged
    for worker in fleet:
        assert worker.gate.lines.size == worker.gate.parked == worker.extra_prefetch == 0
        assert not worker.gate.lines._used_up


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from("aab"), max_size=40),
    st.sampled_from(["5/second", "3/200ms", "10/second strict"]),
    st.integers(1, 3),
)
def test_a_limit_with_a_key_of_its_own_is_as_one_with_limit_key(
    keys: list[str], limit: str, workers: int
) -> None:
    one, *_ = play(limit, keys, workers=workers, limit_key="{key}")
    other, *_ = play([("{key}", limit)], keys, workers=workers)
    moments = [
        [(round(at_s, 3), request.number) for at_s, request in starts(fleet)]
        for fleet in (one, other)
    ]
    assert moments[0] == moments[1]
    assert asks(one) == asks(other)


@pytest.mark.parametrize("workers", [1, 3])
def test_lines_that_wait_for_one_limit_ask_as_one_line_does(workers: int) -> None:
    """300 tenants with one task each: without a line of lines each would ask in each bucket."""
    keys = [str(number) for number in range(300)]
    one, *_ = play("10/second", keys, workers=workers)
    many, *_ = play(BOTH, keys, workers=workers)
    moments = [[at_s for at_s, _ in starts(fleet)] for fleet in (one, many)]
    assert all(abs(a - b) < 0.02 for a, b in zip(*moments, strict=True))
    assert asks(many) <= 1.1 * asks(one) + workers
    numbers = [request.number for _, request in starts(many)]
    assert all(late > early for early, late in pairwise(numbers)) or workers > 1


def test_tenants_take_turns_and_one_with_a_long_line_delays_no_other() -> None:
    fleet, *_ = play([Limit("4/second"), ("{key}", "100/second")], ["a"] * 40 + ["b"] * 4)
    started = [request.args[0] for _, request in starts(fleet)]
    assert started[:12].count("b") >= 3  # the total is shared between both
    fleet, *_ = play([Limit("100/second"), ("{key}", "1/second")], ["a"] * 40 + ["b"] * 2)
    of_b = [at_s for at_s, request in starts(fleet) if request.args[0] == "b"]
    assert of_b[0] - starts(fleet)[0][0] < 0.01
    assert of_b[1] - of_b[0] < 1.01


def test_a_task_waits_for_the_limit_that_has_room_last() -> None:
    fleet, *_ = play([Limit("5/second"), ("{key}", "1/minute")], ["a"] * 4)
    first, *later = [at_s for at_s, _ in starts(fleet)]
    assert [round(at_s - first) for at_s in later] == [60, 120, 180]
    assert asks(fleet) <= 4 * 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6)), max_size=30))
def test_costs_are_of_each_limit(calls: list[tuple[str, int]]) -> None:
    """Requests and what they use, as tokens: a cost above the limit waits for the whole of it."""
    limits = ["5/second", ("tokens:{key[0]}", "5/2 seconds", lambda key: int(key[1:]))]
    fleet, *_ = play(limits, [f"{tenant}{tokens}" for tenant, tokens in calls])
    tokens_at: dict[str, list[float]] = defaultdict(list)
    for at_s, request in starts(fleet):
        tenant, tokens = request.args[0][0], int(request.args[0][1:])
        tokens_at[tenant] += [at_s] * min(tokens, 5)
    assert sum(map(len, tokens_at.values())) == sum(min(tokens, 5) for _, tokens in calls)
    check_bound([at_s for at_s, _ in starts(fleet)], Limit("5/second"))
    for moments in tokens_at.values():
        check_bound(moments, Limit("5/2 seconds"))


def test_a_paced_limit_may_stand_beside_others() -> None:
    fleet, *_ = play([Limit("10/second paced 2s"), ("{key}", "3/2 seconds")], ["a"] * 6 + ["b"] * 6)
    found = starts(fleet)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(found)]
    assert len(found) == 12
    assert min(gaps) >= 0.0985  # paced
    for tenant in "ab":
        of_tenant = [at_s for at_s, request in found if request.args[0] == tenant]
        assert of_tenant[3] - of_tenant[0] >= 1.5


@pytest.mark.parametrize("limit", ["one of all", "one of each"])
def test_what_finds_no_room_has_turns_in_the_line_of_the_limit_that_refuses(limit: str) -> None:
    """Each task has a tenant of its own, and so a line of its own: turns of these would be now."""
    timeline = Timeline()
    store = MemoryStore(timeline.clock)
    limits = BOTH if limit == "one of all" else [Limit("1000/second"), ("{key}", "10/second")]
    task = SimulatedTask("fetch", limits=limits)
    workers = [SimulatedWorker(timeline, store, [task], max_parked=10) for _ in range(2)]
    times: Counter[int] = Counter()
    pick = random.Random(7)

    def deliver(request: SimulatedRequest, delay_s: float) -> None:
        worker = pick.choice(workers)
        timeline.call_after(delay_s, lambda: worker.receive(request))

    for worker in workers:
        send_back = worker.send_back

        def redeliver(request: Any, delay_s: float, send_back: Any = send_back) -> Any:
            times[request.number] += 1
            deliver(request, delay_s)
            return send_back(request, delay_s)

        setattr(worker, "send_back", redeliver)  # noqa: B010  # a method
    for number in range(200):
        key = str(number) if limit == "one of all" else "a"
        deliver(SimulatedRequest(number, task, key, 0.0, eta=object()), 0.0)
    timeline.run_for(40.0)
    assert sum(len(worker.started) for worker in workers) == 200
    assert times.total() <= 1.4 * 180


def test_an_outage_holds_all_lines_and_costs_one_call_for_each_pause() -> None:
    failed = 0

    def fail_for_a_while(items: Any) -> None:
        nonlocal failed
        if 1.0 <= worker.monotonic() - began_s < 4.0:
            failed += 1
            raise StoreUnavailable("away")

    worker = OneWorker(BOTH, before_ask=fail_for_a_while)
    began_s = worker.monotonic()
    worker.receive_all(range(100), [str(number) for number in range(40)])
    worker.run_for(60.0)
    assert len(worker.started) == 100
    assert failed <= 6
    check_bound([at_s for _, at_s in worker.started], TOTAL)


def test_what_is_revoked_or_lost_leaves_no_line_behind_that_waits_for_nobody() -> None:
    worker = OneWorker(BOTH)
    keys = [str(number) for number in range(60)]
    for request in worker.receive_all(range(60), keys)[10:50]:
        request.is_revoked = True
    worker.gate.drop_revoked("fetch")
    worker.run_for(30.0)
    assert worker.numbers == [*range(10), *range(50, 60)]
    assert not worker.gate.lines._used_up
    worker.receive_all(range(60), keys)
    worker.semaphore.clear()
    worker.gate.close()
    assert not worker.gate.lines._used_up
    assert not list(worker.gate.lines)
