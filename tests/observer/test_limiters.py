"""What an observer is told is what a limiter has decided, in each way that it decides."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import Any

import pytest

from distwindow import (
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    Counts,
    Decision,
    ErrorCount,
    Limit,
    Limiter,
    Observer,
    RateLimitExceeded,
    StoreError,
    set_default_observer,
)
from distwindow.away.outages import Outages
from distwindow.observer import _MAX_NAMES, MAX_LABELS, Tally
from distwindow.ring.clock import SYSTEM
from distwindow.stores.memory import MemoryStore
from distwindow.support.async_use import run_at_once
from tests.away.stores import NOT_SENT, UNKNOWN, AsyncRemoteStore, RemoteStore
from tests.clock_and_stores import ManualClock
from tests.observer.told import Seen, Told
from tests.programs import run_python
from tests.servers.wait import free_port, until

KINDS = pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
CONSISTENCIES = pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])


async def result_of(answer: Any) -> Any:
    return await answer if isawaitable(answer) else answer


def run(kind: Any, calls: Coroutine[Any, Any, None]) -> None:
    if kind is Limiter:
        run_at_once(calls)  # it awaits nothing
    else:
        asyncio.run(calls)


def limiter_of(kind: Any, place: str, clock: Any, limits: Any, **options: Any) -> Any:
    if place == "memory":
        return kind("memory://", limits, time=clock, **options), None
    store = RemoteStore(clock)
    where = store if kind is Limiter else AsyncRemoteStore(store)
    return kind(where, limits, time=clock, **options), store


def count_exchanges(limiter: Any) -> Counter[str]:
    """Have a limiter's store count what it is asked from outside, by operations, and return it."""
    found, store = Counter[str](), limiter.decider.store.untimed
    is_inside = False

    def counting(name: str, of: Callable[[Any], str]) -> None:
        ask = getattr(store, name)

        def asked(first: Any, *others: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return ask(first, *others)
            found[of(first)] += 1
            is_inside = True
            try:
                return ask(first, *others)
            finally:
                is_inside = False

        setattr(store, name, asked)

    counting("decide", lambda command: "acquire")
    counting("execute", lambda command: str(command.script))
    counting("execute_many", lambda commands: "flush")
    return found


def refuse_by_itself(key: Any, cost: int, limits: Any, error: Any) -> Any:
    decision = Decision(False, key, cost, limits[0], 0, 1.0, 0.0, 0.0, "store_down", "policy", 1)
    raise RateLimitExceeded(decision)


def refuse_by_a_fallback(key: Any, cost: int, limits: Any, error: Any) -> Any:
    """Refuse as another limiter does whose refusal is cached."""
    raise RateLimitExceeded(
        Decision(False, key, cost, limits[0], 0, 1.0, 1.0, 0.0, "over_limit", "deny_cache", 1)
    )


def fail_itself(key: Any, cost: int, limits: Any, error: Any) -> Any:
    raise LookupError(key)


@KINDS
@CONSISTENCIES
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
@pytest.mark.parametrize(
    "answers",
    ["raise", "allow", "deny", "local", refuse_by_itself, refuse_by_a_fallback, fail_itself],
)
@pytest.mark.parametrize(
    "limits", ["40/second", ["40/second", "100/minute"], "40/second paced 1s"], ids=str
)
@pytest.mark.parametrize("key_label", [None, str])
def test_what_is_told_is_what_was_decided(
    kind: Any, consistency: Any, place: str, answers: Any, limits: Any, key_label: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By limit, result, reason, source and label; calls and permits. The store goes away and
    returns.
    """
    monkeypatch.setattr("distwindow.runtime.command_cache._MAX_COMMANDS", 3)  # some are evicted
    labels = Counter[Any]()
    clock, told, seen = ManualClock(), Told(), Seen()
    limiter, store = limiter_of(
        kind, place, clock, limits, consistency=consistency, observer=told, max_local_keys=2,
        on_store_error=answers, share=0.5 if answers == "local" else None, key_label=key_label,
    )  # fmt: skip
    exchanges = Counter[str]() if store is None else count_exchanges(limiter)
    chance = random.Random(f"{kind} {consistency} {place} {answers} {limits}")

    async def call_at_random() -> None:
        for _ in range(200):
            key, cost = f"key {chance.randrange(3)}", chance.choice([1, 1, 1, 2, 5])
            labels[key_label and key] += 1
            if store is not None:
                store.failure = chance.choice([None] * 20 + [NOT_SENT, UNKNOWN])
            try:
                seen.note(await result_of(limiter.try_acquire(key, cost)))
            except RateLimitExceeded as exc:
                seen.note(exc.decision)
            except (StoreError, LookupError):
                seen.note_error(limiter.limits, cost)
            clock.advance(chance.choice([0, 0, 0.001, 0.01, 0.1]))
            if store is not None:
                store.failure = None
            if chance.random() < 0.05:
                await result_of(limiter.flush())
            if chance.random() < 0.01:
                await result_of(limiter.reset(key))
        await result_of(limiter.close() if kind is Limiter else limiter.aclose())

    run(kind, call_at_random())
    assert told.calls == seen.calls
    assert told.permits == seen.permits
    for counts in told.counts:
        labels[counts.label] -= counts.calls
    assert not any(labels.values())
    assert {counts.source_kind for counts in told.counts} == {"limiter"}
    timed = Counter[str]()
    for call in told.store_calls:
        timed[call.operation] += len(call.seconds)
    exchanges.subtract(timed)
    flushes = exchanges.pop("flush", 0)  # the last one, at the end, is told to nobody any more
    assert 0 <= flushes <= 2
    assert not any(exchanges.values()), "each exchange is timed once"


@pytest.fixture(params=["redis_url", pytest.param("cluster_url", marks=pytest.mark.slow)])
def some_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


OPTIONS: dict[str, Any] = {"max_local_keys": 2, "flush_interval": 0.01, "timeout": 10}
LIMITS = ["3000/second", "20000/minute"]


def assert_sums(told: Told, all_seen: Sequence[Seen]) -> None:
    """Assert that both are the same by result and source. Which of two limits has admitted a call
    may have changed between the call and the end of its lease.
    """
    for name in ("calls", "permits"):
        by_result: list[Counter[Any]] = [Counter(), Counter()]
        everybody: tuple[list[Any], list[Any]] = ([told], [*all_seen])
        for counter, found in zip(by_result, everybody, strict=True):
            for each in found:
                for (_, result, _, source), count in getattr(each, name).items():
                    counter[result, source] += count
        assert by_result[0] == by_result[1]


@CONSISTENCIES
def test_threads_are_counted_exactly(some_url: str, prefix: str, consistency: Any) -> None:
    """Also while keys are evicted, leases end and an observer is told."""
    told, all_seen = Told(), [Seen() for _ in range(4)]
    with Limiter(
        some_url, LIMITS, prefix=prefix, consistency=consistency, observer=told, **OPTIONS
    ) as limiter:

        def call(seen: Seen) -> None:
            for number in range(1500):
                seen.note(limiter.try_acquire(f"key {number % 3}", 1 + (number % 7 == 0)))

        threads = [threading.Thread(target=call, args=(seen,)) for seen in all_seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_sums(told, all_seen)


def test_threads_in_memory_are_counted_exactly() -> None:
    """Whatever their calls cost, with the worker among them."""
    told, all_seen = Told(), [Seen() for _ in range(4)]
    with Limiter("memory://", "3000/minute", observer=told, flush_interval=0.01) as limiter:

        def call(seen: Seen) -> None:
            for number in range(3000):
                seen.note(limiter.try_acquire(f"key {number % 3}", 1 + 2 * (number % 7 == 0)))

        threads = [threading.Thread(target=call, args=(seen,)) for seen in all_seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_sums(told, all_seen)


@CONSISTENCIES
def test_tasks_are_counted_exactly(some_url: str, prefix: str, consistency: Any) -> None:
    """They share connections, and script calls."""
    told, seen = Told(), Seen()

    async def call_in_tasks() -> None:
        async with AsyncLimiter(
            some_url, LIMITS, prefix=prefix, consistency=consistency, observer=told, **OPTIONS
        ) as limiter:

            async def call() -> None:
                for number in range(300):
                    seen.note(await limiter.try_acquire(f"key {number % 3}", 1 + (number % 7 == 0)))

            await asyncio.gather(*(call() for _ in range(20)))

    asyncio.run(call_in_tasks())
    assert_sums(told, [seen])


@KINDS
@CONSISTENCIES
@pytest.mark.parametrize("timeout", [None, 0.05])
def test_waits_are_told(kind: Any, consistency: Any, timeout: float | None) -> None:
    clock, told = ManualClock(auto_advance=True), Told()
    limiter, _ = limiter_of(
        kind, "elsewhere", clock, "2/second", consistency=consistency, observer=told
    )

    async def call() -> None:
        for _ in range(3):
            try:
                await result_of(limiter.acquire("key", timeout=timeout))
            except RateLimitExceeded:
                assert timeout is not None
        await result_of(limiter.flush())

    run(kind, call())
    waited = [counts for counts in told.counts if counts.waited]
    assert [counts.result for counts in waited] == ["refused" if timeout else "allowed"]
    assert [len(counts.waited) for counts in waited] == [1]
    assert told.waited[0] == pytest.approx(0 if timeout else 1, abs=0.2)


@KINDS
def test_exchanges_are_told(kind: Any) -> None:
    clock, told = ManualClock(), Told()
    limiter, store = limiter_of(
        kind, "elsewhere", clock, "4/second", observer=told, on_store_error="allow"
    )

    async def call() -> None:
        for store.failure in (None, NOT_SENT, UNKNOWN):
            await result_of(limiter.try_acquire("key"))
            await result_of(limiter.try_acquire_all([(key, "9/second", 1) for key in "ab"]))
        store.failure = None
        await result_of(limiter.stats("key"))
        await result_of(limiter.flush())

    run(kind, call())
    assert [(c.operation, c.outcome, c.charged, len(c.seconds)) for c in told.store_calls] == [
        ("acquire", "ok", False, 2),
        ("acquire", "unavailable", False, 2),
        ("acquire", "timeout", None, 2),
        ("read", "ok", False, 1),
    ]


@KINDS
def test_an_exchange_is_told_once_whatever_follows_it(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limiter that is being closed keeps no refusal, and raises."""
    told = Told()
    limiter, _ = limiter_of(kind, "elsewhere", ManualClock(), "1/second", observer=told)
    monkeypatch.setattr(limiter.decider.strategy, "cache_refusal", _raise_closed)

    async def call() -> None:
        await result_of(limiter.try_acquire("key"))
        with pytest.raises(ConfigurationError):
            await result_of(limiter.try_acquire("key"))
        await result_of(limiter.flush())

    run(kind, call())
    assert [(c.operation, c.outcome, len(c.seconds)) for c in told.store_calls] == [
        ("acquire", "ok", 2)
    ]


def _raise_closed(*arguments: Any) -> None:
    raise ConfigurationError("it is closed")


def test_exchanges_that_a_server_refuses_are_told_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away, and yet they are sent."""
    told = Told()
    limiter, store = limiter_of(Limiter, "elsewhere", ManualClock(), "5/second", observer=told)
    store.outages = Outages()
    store.outages.begin("server", ConfigurationError("no right"), 0.0)
    monkeypatch.setattr(store, "decide", _raise_closed)
    for _ in range(3):
        with pytest.raises(ConfigurationError):
            limiter.try_acquire("key")
    limiter.flush()
    assert [(c.operation, c.outcome, len(c.seconds)) for c in told.store_calls] == [
        ("acquire", "refused", 3)
    ]


def test_an_observer_may_flush() -> None:
    """What is told of is not told again, and nothing is missed."""
    events: list[Any] = []

    class Flushing(Told):
        def on_event(self, event: Any) -> None:
            events.append(event.change)
            tally.collect_commands(0.0, [])

    tally = Tally(Flushing(), "web", "n", 1.0, ManualClock().monotonic)
    for number in range(5):
        tally.changed(number)
    tally.collect_commands(0.0, [])
    assert events == list(range(5))


def test_near_is_less_than_a_fifth_left() -> None:
    told = Told()
    limiter, store = limiter_of(
        Limiter, "elsewhere", ManualClock(), "10/minute", observer=told, on_store_error="allow"
    )
    for _ in range(12):
        limiter.try_acquire("key")
    store.failure = NOT_SENT  # nobody knows how much is left
    limiter.try_acquire("key")
    store.failure = None
    for _ in range(10):  # with a limit that is equal to that of others, and another object
        limiter.try_acquire_all([("another key", ["10/minute"], 1)])
    limiter.close()
    assert sum(counts.near for counts in told.counts) == 4
    assert {counts.near for counts in told.counts if counts.result == "refused"} == {0}


async def _entered(limiter: Any, key: Any, cost: int) -> Any:
    if isinstance(limiter, Limiter):
        with limiter.entry(key, cost) as entry:
            return entry.decision
    async with limiter.entry(key, cost) as awaited:
        return awaited.decision


WAYS: dict[str, Callable[[Any, Any, int], Any]] = {
    "try": lambda limiter, key, cost: limiter.try_acquire(key, cost),
    "as bytes": lambda limiter, key, cost: limiter.try_acquire(key.encode(), cost),
    "acquire": lambda limiter, key, cost: limiter.acquire(key, cost, timeout=0),
    "entry": _entered,
    "all": lambda limiter, key, cost: limiter.try_acquire_all([(key, limiter.limits, cost)]),
    "priority": lambda limiter, key, cost: limiter.try_acquire(key, cost, priority=True),
    "enqueue": lambda limiter, key, cost: limiter.try_acquire(key, cost, enqueue=True),
}


@KINDS
@pytest.mark.parametrize(
    "limits",
    ["40/second", ["40/second", "100/minute"], "40/second paced 1s", ["4/second paced 2s", "9/2s"]],
    ids=str,
)
@pytest.mark.parametrize("key_label", [None, str])
def test_what_is_told_in_memory_of_each_way_to_call(kind: Any, limits: Any, key_label: Any) -> None:
    """The store counts the calls of some ways, and others are counted where they are answered."""
    clock, told, seen, near = ManualClock(), Told(), Seen(), 0
    limiter = kind("memory://", limits, time=clock, observer=told, key_label=key_label)
    chance = random.Random(f"{kind} {limits}")
    is_shaped = any(limit.is_shaped for limit in limiter.limits)
    is_one_and_plain = len(limiter.limits) == 1 and not is_shaped
    ways = [way for way in WAYS if not (is_shaped and way in ("priority", "enqueue"))]

    async def call_at_random() -> None:
        nonlocal near
        for _ in range(300):
            key, cost = f"key {chance.randrange(3)}", chance.choice([1, 1, 2])
            way = chance.choice(ways)
            try:
                decision = await result_of(WAYS[way](limiter, key, cost))
            except RateLimitExceeded as exc:
                decision = exc.decision
            seen.note(decision)
            if decision.allowed and not (is_one_and_plain and way in UNKNOWN_NEAR):
                near += decision.remaining < decision.limit.amount / 5
            clock.advance(chance.choice([0, 0, 0.001, 0.01, 0.1]))
            if chance.random() < 0.05:
                await result_of(limiter.flush())
        await result_of(limiter.close() if kind is Limiter else limiter.aclose())

    run(kind, call_at_random())
    assert told.calls == seen.calls
    assert told.permits == seen.permits
    assert sum(counts.near for counts in told.counts) == near


UNKNOWN_NEAR = ("try", "as bytes", "acquire", "entry")
"""What the shortcut of one plain limit in memory decides, which does not count who is near it."""


@CONSISTENCIES
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
def test_labels_are_at_most_100_and_other(consistency: Any, place: str) -> None:
    told, asked = Told(), []

    def tenant(key: Any) -> str:
        asked.append(key)
        return str(key).partition(":")[0]

    limiter, _ = limiter_of(
        Limiter, place, ManualClock(), "5/minute", observer=told, key_label=tenant,
        consistency=consistency, metric_name="search",
    )  # fmt: skip
    for number in range(MAX_LABELS + 50):
        for _ in range(2):
            limiter.try_acquire(f"{number}:user")
    limiter.close()
    labels = Counter[Any]()
    for counts in told.counts:
        assert counts.name == "search"
        labels[counts.label] += counts.calls
    assert len(labels) == MAX_LABELS + 1
    assert labels["other"] == 100
    assert len(asked) == MAX_LABELS + 50


def test_names_and_limits_are_bounded() -> None:
    told = Told()
    tally = Tally(told, "web", "n", 1.0, ManualClock().monotonic)
    for number in range(2 * _MAX_NAMES):
        for _ in range(2):
            limit = Limit(f"{number + 1}/minute")
            tally.counted("", limit, "allowed", "ok", "store", 1, 1, name=f"GET /{number}")
    tally.collect_commands(0.0, [])
    assert len({counts.name for counts in told.counts}) == _MAX_NAMES + 1
    assert len({counts.limit for counts in told.counts}) == _MAX_NAMES + 1
    assert sum(told.calls.values()) == 4 * _MAX_NAMES
    assert told.calls["other", "allowed", "ok", "store"] == 2 * _MAX_NAMES


def test_what_is_taken_back_is_told_when_it_is_made_up_for() -> None:
    told = Told()
    tally = Tally(told, "web", "n", 1.0, ManualClock().monotonic)
    for calls, permits in ((1, 1), (0, 0), (-1, -3), (1, 3), (1, 1)):
        tally.counted("", "5/minute", "allowed", "ok", "store", calls, permits)
        tally.collect_commands(0.0, [])
        assert all(counts.calls >= 0 and counts.permits >= 0 for counts in told.counts)
    assert sum(told.calls.values()) == 2


def test_what_a_function_of_labels_raises_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def label(key: Any) -> str:
        raise LookupError(key)

    with Limiter("memory://", "5/minute", observer=told, key_label=label) as limiter:
        assert limiter.try_acquire("key")
    assert [counts.label for counts in told.counts] == ["other"]
    assert "key_label" in caplog.text


class Failing(Told):
    """Does something first that an observer should not."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.do = do

    def on_counts(self, batch: Sequence[Counts]) -> None:
        super().on_counts(batch)
        self.do()


def _raise() -> None:
    raise LookupError("an observer")


@CONSISTENCIES
def test_an_observer_that_fails_fails_nothing_and_is_logged_once(
    consistency: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told = Failing(_raise)
    limiter, _ = limiter_of(
        Limiter, "elsewhere", ManualClock(), "100/minute", observer=told, consistency=consistency
    )
    for _ in range(3):
        for _ in range(5):
            assert limiter.try_acquire("key")
        limiter.flush()
    assert sum(told.calls.values()) == 15
    assert len([r for r in caplog.records if "observer" in r.getMessage()]) == 1


@CONSISTENCIES
def test_an_observer_may_call_the_limiter(consistency: Any) -> None:
    limiter: Any = None
    told = Failing(lambda: limiter.try_acquire("inner"))
    limiter, _ = limiter_of(
        Limiter, "elsewhere", ManualClock(), "100/minute", observer=told, consistency=consistency
    )
    limiter.try_acquire("key")
    limiter.flush()
    limiter.flush()
    assert sum(told.calls.values()) >= 2


def test_a_slow_observer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with Limiter("memory://", "5/minute", observer=Failing(lambda: time.sleep(0.06))) as limiter:
        assert limiter.try_acquire("key")
    assert "has taken 0.0" in caplog.text


@pytest.mark.parametrize("observed", [False, True])
def test_who_has_an_observer_starts_the_worker_at_its_first_call(
    redis_url: str, prefix: str, observed: bool
) -> None:
    told = Told()
    observer = told if observed else None
    with Limiter(
        redis_url, "5/minute", prefix=prefix, flush_interval=0.05, observer=observer
    ) as limiter:
        assert limiter.decider.policy.flush_source.next_due_at == float("inf")
        assert limiter.try_acquire("key")
        is_due = limiter.decider.policy.flush_source.next_due_at < float("inf")
        assert is_due == observed
        ends_at = time.monotonic() + 10
        while observed and not told.calls and time.monotonic() < ends_at:
            time.sleep(0.01)
    assert sum(told.calls.values()) == observed


@pytest.mark.parametrize("flushes", [0, 1, 3])
def test_the_last_call_in_memory_is_told_though_the_worker_comes_meanwhile(flushes: int) -> None:
    """No other call follows it."""

    class Flushed(MemoryStore):
        def decide_at_once(self, command: Any) -> Decision:
            decision = super().decide_at_once(command)
            for _ in range(flushes):  # it is decided, and not counted
                limiter.flush()
            return decision

    told, seen = Told(), Seen()
    with Limiter(Flushed(), "3/minute", observer=told, flush_interval=0.02) as limiter:
        for _ in range(6):
            until(lambda: not limiter.decider.policy.flush_source.has_untold)
            seen.note(limiter.try_acquire("key"))
            until(lambda: told.calls == seen.calls)
        assert told.permits == seen.permits


def test_a_default_observer_is_that_of_what_is_made_then() -> None:
    told = Told()
    before = Limiter("memory://", "5/minute")
    set_default_observer(told)
    try:
        with Limiter("memory://", "5/minute") as limiter:
            limiter.try_acquire("key")
            before.try_acquire("key")
    finally:
        set_default_observer(None)
    before.close()
    assert [(counts.name, counts.calls) for counts in told.counts] == [("distwindow", 1)]


@pytest.mark.parametrize("place", ["memory", "elsewhere"])
@pytest.mark.parametrize("limits", ["40/second", ["40/second", "100/minute"]], ids=str)
@pytest.mark.parametrize("key_label", [None, str])
def test_each_event_loop_is_told_of(place: str, limits: Any, key_label: Any) -> None:
    """What was decided in one that has ended is told, and so are the calls of the next."""
    told = Told()
    limiter, _ = limiter_of(
        AsyncLimiter, place, SYSTEM, limits, observer=told, key_label=key_label,
    )  # fmt: skip

    async def call() -> None:
        for _ in range(5):
            await limiter.try_acquire("key")

    for loops in (1, 2, 3):
        asyncio.run(call())
        assert sum(told.calls.values()) == 5 * loops
    asyncio.run(limiter.aclose())


@pytest.mark.parametrize("limits", ["40/second", ["40/second", "100/minute"]], ids=str)
def test_a_flush_that_is_interrupted_is_made_up_for(limits: Any) -> None:
    """By a signal handler that raises before anything was told."""
    told = Told()
    with Limiter("memory://", limits, observer=told, flush_interval=0.02) as limiter:
        tally = limiter.decider._tally
        assert tally is not None
        take = tally._take
        raised = [KeyboardInterrupt]

        def interrupted() -> Any:
            if raised:
                raise raised.pop()
            return take()

        tally._take = interrupted  # type: ignore[method-assign]  # for one flush
        for _ in range(5):
            limiter.try_acquire("key")
        with pytest.raises(KeyboardInterrupt):
            tally.collect_commands(0.0, [])
        assert tally.has_untold
        limiter.try_acquire("key")
        until(lambda: sum(told.calls.values()) == 6)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_has_the_labels_of_its_parent() -> None:
    program = """
import os
from distwindow import Limiter
from tests.observer.told import Told
told = Told()
limiter = Limiter("memory://", "100/minute", observer=told, flush_interval=30, key_label=str)
for key in range(150):
    limiter.try_acquire(f"key {key}")
limiter.flush()
told.counts.clear()
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    for key in (1, 140, 141):
        limiter.try_acquire(f"key {key}")
    limiter.close()
    print({counts.label: counts.calls for counts in told.counts}, flush=True)
    os._exit(0)
"""
    result = run_python("-c", program)
    assert result.stdout == "{'key 1': 1, 'other': 2}\n", result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_begins_empty() -> None:
    program = """
import os, sys
from distwindow import Limiter
from tests.observer.told import Told
told = Told()
limiter = Limiter("memory://", "100/minute", observer=told, flush_interval=30)
for _ in range(3):
    limiter.try_acquire("key")
child = os.fork()
limiter.try_acquire("key")
limiter.close()
os.write(1, f"{'parent' if child else 'child'} {sum(told.calls.values())}\\n".encode())
if child:
    os.waitpid(child, 0)
"""
    result = run_python("-c", program)
    assert sorted(result.stdout.split("\n")) == ["", "child 1", "parent 4"], result.stderr


@pytest.mark.slow
@CONSISTENCIES
def test_a_killed_process_loses_one_flush_interval_at_most(
    redis_url: str, prefix: str, consistency: str
) -> None:
    program = f"""
import os, signal, time
from distwindow import Limiter
from tests.observer.told import Told
class Printed(Told):
    printed = 0
    def on_counts(self, batch):
        super().on_counts(batch)
        print(sum(self.calls.values()), flush=True)
        self.printed = sum(self.calls.values())
told = Printed()
limiter = Limiter({redis_url!r}, "100000/second", prefix={prefix!r}, observer=told,
                  consistency={consistency!r}, flush_interval=0.05)
for _ in range(500):
    limiter.try_acquire("key")
ends_at = time.monotonic() + 10
while told.printed < 500 and time.monotonic() < ends_at:
    time.sleep(0.01)
for _ in range(10):
    limiter.try_acquire("key")
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_python("-c", program)
    assert int(result.stdout.split()[-1]) >= 500, result.stderr


@KINDS
def test_wrong_arguments_are_named(kind: Any) -> None:
    for option, value in (
        ("observer", Told), ("observer", 4), ("metric_name", ""), ("metric_name", 4),
        ("key_label", "tenant"), ("key_label", lambda: "x"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=option):
            kind("memory://", "5/minute", **{option: value})
    with pytest.raises(ConfigurationError, match="observer"):
        set_default_observer(Told)  # type: ignore[arg-type]


def test_the_methods_of_an_observer_do_nothing() -> None:
    with Limiter("memory://", "5/minute", observer=Observer()) as limiter:
        assert limiter.try_acquire("key")


def test_what_utf_8_does_not_have_is_in_no_label() -> None:
    told = Told()
    with Limiter("memory://", "5/minute", observer=told, key_label=str) as limiter:
        limiter.try_acquire("\ud800")
    assert [counts.label for counts in told.counts] == ["?"]


def test_a_method_that_is_awaited_is_named() -> None:
    class Awaited(Observer):
        async def on_counts(self, batch: Sequence[Counts]) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ConfigurationError, match="on_counts"):
        Limiter("memory://", "5/minute", observer=Awaited())


def test_an_outage_is_told_by_all_that_have_a_store() -> None:
    for make in (Limiter, CircuitBreaker, Concurrency):
        told = Told()
        arguments = {Limiter: "5/minute", CircuitBreaker: ErrorCount(5), Concurrency: 5}
        made: Any = make
        with made(f"redis://127.0.0.1:{free_port()}/0", arguments[make], observer=told) as one:
            call = {Limiter: "try_acquire", CircuitBreaker: "admit", Concurrency: "try_hold"}[make]
            for _ in range(4):
                with suppress(StoreError):
                    getattr(one, call)("key")
            ends_at = time.monotonic() + 20  # what probes the server tells it
            while not told.events and time.monotonic() < ends_at:
                time.sleep(0.01)
        changes = [event.change.up for event in told.events]
        assert changes[:1] == [False], make
        tried = [call for call in told.store_calls for _ in call.seconds]
        assert len(tried) <= 3, make  # the others were answered without an attempt
