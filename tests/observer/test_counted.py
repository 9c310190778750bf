"""What an observer is told of what stands on limiters, and of what decides besides them, is what an
application has seen: by name, limit, result, reason and source.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    AuthorityRule,
    Blocked,
    BreakerOpen,
    CircuitBreaker,
    Concurrency,
    ConcurrencyExceeded,
    Counts,
    DegradeRule,
    ErrorRatio,
    FlowRule,
    Guard,
    Key,
    Limiter,
    StoreError,
    SystemRule,
)
from distwindow.breaker.circuit_breaker import AsyncBreaker
from distwindow.contrib import http
from distwindow.ring.clock import SYSTEM
from distwindow.support.async_use import result_of
from tests.away.stores import NOT_SENT, AsyncRemoteStore, RemoteStore
from tests.clock_and_stores import ManualClock
from tests.observer.told import Told, run
from tests.web.test_rate_limits import Awaiting, Blocking

CONSISTENCIES = pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
Row = tuple[str, str, str, str, str]


class Named(Told):
    """Adds up by name, too."""

    def rows(self) -> dict[Row, int]:
        """Return the calls by name, limit, result, reason and source."""
        return self._sum(lambda counts: counts.calls)

    def permits_by_row(self) -> dict[Row, int]:
        return self._sum(lambda counts: counts.permits)

    def _sum(self, of: Callable[[Counts], int]) -> dict[Row, int]:
        rows: Counter[Row] = Counter()
        for each in self.counts:
            rows[each.name, each.limit, each.result, each.reason, each.source] += of(each)
        return {row: count for row, count in rows.items() if count}


def store_of(in_tasks: bool, clock: Any) -> tuple[RemoteStore, Any]:
    store = RemoteStore(clock)
    return store, AsyncRemoteStore(store) if in_tasks else store


def rows_of(*rows: tuple[Any, ...]) -> dict[Row, int]:
    """Return these rows, each of which ends in its count."""
    return {row[:5]: row[5] for row in rows if row[5]}


# -- requests --------------------------------------------------------------------------------------


class Site:
    """Runs requests through limits, as an integration does, and notes what these have seen."""

    def __init__(self, way: str, store: Any, **options: Any) -> None:
        self.way = way
        self.of: Any = (Blocking if way == "blocking" else Awaiting)(store, **options)
        self.calls: Counter[Row] = Counter()
        self.permits: Counter[Row] = Counter()

    async def request(self, limits: Sequence[Any], key: str, status: int, asks: str) -> None:
        asked, request = http.LimitedRequest(), {"peer": key}
        seen: list[tuple[Any, Any]] = []
        """Limits with their decisions; a refusal is the last."""
        under = limits[:1] if asks == "first" else limits
        failed: Sequence[Any] = ()
        together = under[: {"together": 3, "two, then one": 2}.get(asks, 0)]
        if len(together) < 2:
            together = ()
        try:
            if together:
                failed = together
                decision = await result_of(self.of.run(http.decide_all(together, request, asked)))
                seen += [(each, decision) for each in together]
            for limit in under[len(together) :]:
                failed = (limit,)
                if self.way == "at once":
                    decision = await http.result_of(limit.decide_at_once(request, asked))
                else:
                    decision = await result_of(self.of.run(limit.decide(request, asked)))
                seen.append((limit, decision))
        except http.RateLimited as refused:
            status, seen = refused.status_code, self._kept(seen, status)
            named = str(refused.decision.key).partition(":")[0]
            binding = next((each for each in failed if each.name == named), failed[0])
            seen.append((binding, refused.decision))
        except StoreError:
            status, seen = 503, [*seen]
            for limit in failed:
                self.note(limit.name, limit.text, "error", "store_down", "policy", limit.fixed_cost)
        for limit, decision in seen:
            result = "allowed" if decision.allowed else "refused"
            shown = decision.limit
            if limit in together and decision.allowed and limit.text != str(decision.limit):
                shown = limit.text
            self.note(
                limit.name, str(shown), result, decision.reason, decision.source, limit.fixed_cost
            )
        if asked.needs_response:
            await result_of(self.of.run(asked.settle(None, status)))

    @staticmethod
    def _kept(seen: list[tuple[Any, Any]], status: int) -> list[tuple[Any, Any]]:
        """Return what was not given back for a request that another limit has refused."""
        return [
            (limit, decision)
            for limit, decision in seen
            if decision.charged is None or (limit.count_when and limit.count_when(None))
        ]

    def note(self, *row: Any) -> None:
        *what, cost = row
        self.calls[tuple(what)] += 1
        self.permits[tuple(what)] += cost


@CONSISTENCIES
@pytest.mark.parametrize("way", ["blocking", "awaiting", "at once"])
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
@pytest.mark.parametrize("answers", ["raise", "allow", "deny", "local"])
def test_requests_are_counted_by_the_limit_that_admits_or_refuses(
    consistency: Any, way: str, place: str, answers: Any
) -> None:
    """Several limits of a request, one by one and together; the store goes away and returns. What a
    limit admits and a later one refuses is given back, and counts for that one alone.
    """
    in_tasks = way != "blocking"
    clock, told = ManualClock(), Named()
    remote, store = store_of(in_tasks, clock)
    site = Site(
        way, "memory://" if place == "memory" else store, time=clock, consistency=consistency,
        on_store_error=answers, share=0.5 if answers == "local" else None, observer=told,
        prefix="shop",
    )  # fmt: skip
    of: dict[str, tuple[str, dict[str, Any]]] = {
        "all": ("30/second", {}),
        "search": ("12/second", {"cost": 2}),
        "login": ("8/second", {"count_when": lambda response: True}),
        "token": ("20/second", {"count_when": lambda response: False}),
    }
    limits = [site.of.limit(limit, name=name, **options) for name, (limit, options) in of.items()]
    for limit in limits:
        limit.fixed_cost = of[limit.name][1].get("cost", 1)
    chance = random.Random(f"{consistency} {way} {place} {answers}")

    async def ask_at_random() -> None:
        for _ in range(150):
            asked = chance.sample(limits, chance.randrange(1, 4))
            if chance.random() < 0.1:
                remote.failure = NOT_SENT
            asks = chance.choice(["first", "each", "together", "two, then one"])
            await site.request(asked, f"10.0.0.{chance.randrange(2)}", 200, asks)
            remote.failure = None
            clock.advance(chance.choice([0, 0, 0.001, 0.1]))
            if chance.random() < 0.1:
                flushed_with = site.of.opened._flushed_with
                await result_of(flushed_with.flush())
        await result_of(site.of.aclose() if in_tasks else site.of.close())

    run(in_tasks, ask_at_random())
    assert told.rows() == dict(site.calls)
    assert told.permits_by_row() == dict(site.permits)
    assert {counts.source_kind for counts in told.counts} == {"web"}
    assert {call.name for call in told.store_calls} == ({"shop"} if place == "elsewhere" else set())


@CONSISTENCIES
def test_requests_of_threads_are_counted_exactly(
    redis_url: str, prefix: str, consistency: Any
) -> None:
    """While the worker tells: those that a later limit refuses are taken back, some of them from
    what was told already.
    """
    told, seen = Named(), Counter[tuple[str, str]]()
    of = Blocking(
        redis_url, on_store_error="raise", observer=told, prefix=prefix, consistency=consistency,
        timeout=10.0,
    )  # fmt: skip
    limits = [of.limit("9000/minute", name="all"), of.limit("60/second", name="search")]

    def work() -> None:
        for number in range(250):
            asked = http.LimitedRequest()
            under = limits if number < 200 else limits[:1]
            try:
                for limit in under:
                    of.run(limit.decide({}, asked))
            except http.RateLimited as refused:
                of.run(asked.settle(None, refused.status_code))
                seen["search", "refused"] += 1
            else:
                seen.update((str(limit.name), "allowed") for limit in under)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of.close()
    found = Counter[tuple[str, str]]()
    for (name, _, result, _, _), count in told.rows().items():
        found[name, result] += count
    assert found == seen


def test_a_request_that_is_refused_after_it_was_told_is_taken_out_of_the_next() -> None:
    told = Named()
    of = Blocking("memory://", on_store_error="raise", observer=told)
    first, second = of.limit("9/minute", name="first"), of.limit("1/minute", name="second")

    def ask(*limits: Any, told_between: bool = False) -> None:
        asked = http.LimitedRequest()
        try:
            for limit in limits:
                of.run(limit.decide({}, asked))
                if told_between:
                    of.opened._flushed_with.flush()
        except http.RateLimited as refused:
            of.run(asked.settle(None, refused.status_code))

    ask(first, second)
    ask(first, second, told_between=True)
    for _ in range(2):
        ask(first)
    of.close()
    assert told.rows() == {
        ("first", "9/minute", "allowed", "ok", "local"): 3,
        ("second", "1/minute", "allowed", "ok", "local"): 1,
        ("second", "1/minute", "refused", "over_limit", "local"): 1,
    }


def text_of(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def test_labels_of_requests_are_of_their_keys() -> None:
    told = Named()
    keys = ["ann", b"bob", Key("cid", tag="t"), None]
    of = Blocking(
        "memory://",
        on_store_error="raise",
        observer=told,
        key_label=lambda key: f"<{text_of(key)}>",
    )
    limit = of.limit("9/minute", name="a:b", key=lambda request: keys[request["number"]])
    for number in range(len(keys)):
        of.run(limit.decide({"number": number}, http.LimitedRequest()))
    of.close()
    labels = {str(counts.label) for counts in told.counts}
    assert labels == {"<ann>", "<bob>", "<{t}cid>", "<9.9.9.9>"}
    assert {counts.name for counts in told.counts} == {"a:b"}


def test_requests_that_wait_are_told_for_how_long() -> None:
    told = Named()
    of = Blocking(
        "memory://", on_store_error="raise", observer=told, time=ManualClock(auto_advance=True)
    )
    limit = of.limit("1/second paced 5s", name="search")
    for _ in range(3):
        of.run(limit.decide({}, http.LimitedRequest()))
    of.close()
    assert sorted(told.waited) == [pytest.approx(1, abs=0.1)] * 2
    assert sum(told.calls.values()) == 3


# -- slots -----------------------------------------------------------------------------------------


async def entered(block: Any) -> Any:
    """Return the slot of a block, entered."""
    return await block.__aenter__() if hasattr(block, "__aenter__") else block.__enter__()


@pytest.mark.parametrize("kind", [Concurrency, AsyncConcurrency])
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
def test_slots_are_counted_as_they_are_asked_for(kind: Any, place: str) -> None:
    """Held, refused and failed, with `try_hold` and `hold`, and how many are held now."""
    in_tasks = kind is AsyncConcurrency
    told, seen = Named(), Counter[str]()
    remote, store = store_of(in_tasks, SYSTEM)
    where = "memory://" if place == "memory" else store
    slots = kind(where, 3, observer=told, metric_name="reports")
    chance, held = random.Random(f"{kind} {place}"), []
    waited = 0

    async def ask_at_random() -> None:
        nonlocal waited
        for _ in range(200):
            if chance.random() < 0.1:
                remote.failure = NOT_SENT
            try:
                if chance.random() < 0.5:
                    slot = await result_of(slots.try_hold("key"))
                    seen["allowed" if slot else "refused"] += 1
                    held.extend([(slot, slot)] if slot else [])
                else:
                    block = slots.hold("key", timeout=0.003)
                    held.append((await entered(block), block))
                    seen["allowed"] += 1
            except ConcurrencyExceeded:
                seen["refused"] += 1
                waited += 1
            except StoreError:
                seen["error"] += 1
            remote.failure = None
            if held and chance.random() < 0.4:
                await result_of(held.pop()[0].release())
            if chance.random() < 0.1:
                await result_of(slots.flush())
                assert told.levels[-1].value == len(held)
        await result_of(slots.aclose() if in_tasks else slots.close())

    run(in_tasks, ask_at_random())
    source = "local" if place == "memory" else "store"
    assert told.rows() == told.permits_by_row()
    assert told.rows() == rows_of(
        ("reports", "3", "allowed", "ok", source, seen["allowed"]),
        ("reports", "3", "refused", "no_slot", source, seen["refused"]),
        ("reports", "3", "error", "store_down", "policy", seen["error"]),
    )
    refused = [each for each in told.counts if each.result == "refused"]
    assert sum(len(each.waited) for each in refused) == waited > 0
    assert told.levels[-1][:4] == ("concurrency", "reports", "slots_held", "3")
    assert told.levels[-1].value == 0
    operations = {call.operation for call in told.store_calls}
    assert operations >= {"hold", "free"} if place == "elsewhere" else not operations


def test_slots_of_threads_are_counted_exactly() -> None:
    """Some wait behind others, and are told for how long; a slot of `try_hold` is refused while
    they do.
    """
    told, seen = Named(), Counter[str]()

    def work() -> None:
        for number in range(30):
            if number % 3:
                with slots.hold("key"):
                    seen["allowed"] += 1
                continue
            with slots.try_hold("key") as slot:
                seen["allowed" if slot else "refused"] += 1

    with Concurrency("memory://", 1, observer=told, prefix="p") as slots:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results = Counter[str]()
    for (name, _, result, _, _), count in told.rows().items():
        assert name == "p"
        results[result] += count
    assert +results == +seen
    assert told.levels[-1].value == 0


def test_how_many_slots_are_held_is_told_when_one_is_released_or_lost() -> None:
    told, clock = Named(), ManualClock()
    slots = Concurrency("memory://", 5, observer=told, time=clock)
    held = [slots.try_hold("key") for _ in range(3)]

    def told_when_due() -> float:
        tally = slots._held.tally
        assert tally is not None
        assert tally.next_due_at <= clock.monotonic() + 0.25
        slots.flush()
        return told.levels[-1].value

    assert told_when_due() == 3
    held.pop().release()
    assert told_when_due() == 2
    clock.advance(31.0)
    assert held[0].lost
    assert told_when_due() < 2
    slots.close()


# -- breakers --------------------------------------------------------------------------------------


def breaker_of(kind: Any, where: Any, clock: ManualClock, told: Told) -> Any:
    options = {"time": clock, "observer": told, "metric_name": "payments"}
    if kind in (AdaptiveBreaker, AsyncAdaptiveBreaker):
        return kind(where, draw=random.Random(1).random, **options)
    return kind(where, ErrorRatio(0.5, min_calls=4, open_for=2.0), **options)


async def called(breaker: Any, way: str, fails: bool) -> None:
    """Make one call of a service in a way; raises `BreakerOpen`, or `OSError` if it fails."""
    in_tasks = isinstance(breaker, AsyncBreaker)

    def work() -> None:
        if fails:
            raise OSError

    async def work_in_task() -> None:
        work()

    if way == "protect":
        await result_of(breaker.protect("key")(work_in_task if in_tasks else work)())
    elif way == "admit":
        admission = await result_of(breaker.admit("key"))
        await result_of(breaker.finish(admission, fails))
    else:
        limiter: Any = (AsyncLimiter if in_tasks else Limiter)("memory://", "1000/minute")
        block = breaker.call("key") if way == "call" else limiter.entry("key", breaker=breaker)
        if in_tasks:
            async with block:
                work()
        else:
            with block:
                work()


@pytest.mark.parametrize(
    "kind", [CircuitBreaker, AsyncCircuitBreaker, AdaptiveBreaker, AsyncAdaptiveBreaker]
)
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
@pytest.mark.parametrize("way", ["call", "protect", "admit", "entry"])
def test_refused_calls_and_changes_of_breakers_are_told(kind: Any, place: str, way: str) -> None:
    in_tasks = issubclass(kind, AsyncBreaker)
    clock, told, refused = ManualClock(), Named(), 0
    heard: list[Any] = []
    _, store = store_of(in_tasks, clock)
    breaker = breaker_of(kind, "memory://" if place == "memory" else store, clock, told)
    if hasattr(breaker, "on_change"):
        breaker.on_change(heard.append)
    chance = random.Random(f"{kind} {place} {way}")

    async def call_at_random() -> None:
        nonlocal refused
        for number in range(300):
            try:
                await called(breaker, way, number % 150 < 75 and chance.random() < 0.9)
            except BreakerOpen:
                refused += 1
            except OSError:
                pass
            clock.advance(chance.choice([0, 0.01, 0.3]))
            if chance.random() < 0.2:
                await result_of(breaker.flush())
        await result_of(breaker.aclose() if in_tasks else breaker.close())

    run(in_tasks, call_at_random())
    rule = "adaptive" if "Adaptive" in kind.__name__ else "error_ratio"
    assert refused > 0
    assert told.rows() == rows_of(("payments", rule, "refused", "open", "local", refused))
    assert [event.change for event in told.events] == heard
    assert {event[:2] for event in told.events} == ({("breaker", "payments")} if heard else set())
    assert bool(heard) == hasattr(breaker, "on_change")
    assert bool(told.store_calls) == (place == "elsewhere")


# -- guards ----------------------------------------------------------------------------------------

RULES = [
    AuthorityRule("write", "app-a,app-b"),
    SystemRule(qps=14),
    FlowRule("write", 8),
    FlowRule("read", 6, strategy="relate", ref_resource="write"),
    FlowRule("write", 2, grade="thread"),
    DegradeRule("write", grade="error_ratio", count=0.5, time_window_s=2),
]


@CONSISTENCIES
@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
def test_each_rule_of_a_guard_counts_what_it_admits_or_refuses(
    kind: Any, consistency: Any, place: str
) -> None:
    """Those before a rule that refuses have admitted the entry."""
    in_tasks = kind is AsyncGuard
    clock, told = ManualClock(), Named()
    _, store = store_of(in_tasks, clock)
    guard = kind(
        "memory://" if place == "memory" else store, RULES, time=clock, observer=told,
        metric_name="shop", consistency=consistency,
    )  # fmt: skip
    chance, stopped = random.Random(f"{kind} {consistency} {place}"), Counter[str]()
    admitted: list[Any] = []

    async def enter(entry: Any, fails: bool) -> None:
        await result_of(entry.__aenter__() if in_tasks else entry.__enter__())
        if chance.random() < 0.5:
            admitted.append(entry)  # it holds its slot for a while
        else:
            await leave(entry, OSError() if fails else None)

    async def leave(entry: Any, exc: Any = None) -> None:
        ends = (type(exc) if exc else None, exc, None)
        await result_of(entry.__aexit__(*ends) if in_tasks else entry.__exit__(*ends))

    async def call_at_random() -> None:
        for _ in range(400):
            origin = chance.choice(["app-a", "app-b", "app-c"])
            resource = chance.choice(["write", "write", "read"])
            try:
                await enter(guard.entry(resource, origin), chance.random() < 0.6)
                stopped[resource] += 1
            except Blocked as exc:
                stopped[
                    f"{resource} {type(exc.rule).__name__} {getattr(exc.rule, 'grade', '')}"
                ] += 1
            clock.advance(chance.choice([0, 0.01, 0.05]))
            if admitted and chance.random() < 0.2:
                await leave(admitted.pop())
        for entry in admitted:
            await leave(entry)
        await result_of(guard.aclose() if in_tasks else guard.close())

    run(in_tasks, call_at_random())
    by_rule: Counter[Any] = Counter()
    for (name, limit, result, reason, _), count in told.rows().items():
        assert name == "shop"
        by_rule[limit, result, reason] += count
    found = +stopped
    opened, slots = found["write DegradeRule error_ratio"], found["write FlowRule thread"]
    entered = found["write"] + opened
    expected = {
        ("allow app-a,app-b", "refused", "authority"): found["write AuthorityRule "],
        ("qps 14", "refused", "system"): found["write SystemRule "] + found["read SystemRule "],
        ("8/second", "refused", "over_limit"): found["write FlowRule qps"],
        ("6/second", "refused", "over_limit"): found["read FlowRule qps"],
        ("8/second", "allowed", "ok"): entered + slots,
        ("2", "refused", "no_slot"): slots,
        ("2", "allowed", "ok"): entered,
        ("error_ratio", "refused", "open"): opened,
    }
    assert dict(by_rule) == {what: count for what, count in expected.items() if count}
    assert len(by_rule) >= 6
    kinds = {counts.source_kind for counts in told.counts}
    assert {"limiter", "concurrency"} <= kinds <= {"limiter", "concurrency", "breaker"}
