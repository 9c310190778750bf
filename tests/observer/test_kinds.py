"""What holds for the observers of all that decides: one that fails fails nothing, the default is
that of the moment at which an object is made, nothing is told in the thread of a call, what is left
is told at the end, and a forked child begins empty.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distwindow import (
    AdaptiveBreaker,
    AuthorityRule,
    BreakerOpen,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    Counts,
    ErrorCount,
    FlowRule,
    Guard,
    Level,
    Limiter,
    Observer,
    ObserverEvent,
    StoreCall,
    set_default_observer,
)
from distwindow.contrib import http
from distwindow.contrib.tasks import TaskGate, TaskLimits
from distwindow.contrib.upstream import UpstreamLimits
from distwindow.errors import Blocked
from tests.observer.told import Told
from tests.programs import run_python
from tests.web.test_rate_limits import Blocking

Decided = tuple[Callable[[], object], Any]
"""What makes one decision, and what is closed."""


def limiter(store: Any, **options: Any) -> Decided:
    made = Limiter(store, "1000/second", **options)
    return lambda: made.try_acquire("key"), made


def web(store: Any, **options: Any) -> Decided:
    made = Blocking(store, on_store_error="raise", **options)
    limit = made.limit("1000/second", name="search")
    return lambda: made.run(limit.decide({}, http.LimitedRequest())), made


def slots(store: Any, **options: Any) -> Decided:
    made = Concurrency(store, 10, **options)

    def hold() -> None:
        with made.hold("key"):
            pass

    return hold, made


def _refused_by(made: Any) -> Decided:
    def call() -> None:
        try:
            with made.call("key"):
                pass
        except BreakerOpen:
            return
        raise AssertionError("it is open")

    return call, made


def breaker(store: Any, **options: Any) -> Decided:
    made = CircuitBreaker(store, ErrorCount(1, open_for=3600.0, min_calls=1), **options)
    made.open("key")
    return _refused_by(made)


def adaptive_breaker(store: Any, **options: Any) -> Decided:
    made = AdaptiveBreaker(store, draw=lambda: 0.0, **options)
    for _ in range(40):
        try:
            with made.call("key") as call:
                call.fail()
        except BreakerOpen:
            break
    return _refused_by(made)


def guard(store: Any, **options: Any) -> Decided:
    made = Guard(store, [FlowRule("r", 1000)], **options)

    def enter() -> None:
        with made.entry("r"):
            pass

    return enter, made


def rules_of_a_guard(store: Any, **options: Any) -> Decided:
    made = Guard(store, [AuthorityRule("r", "a")], **options)

    def enter() -> None:
        with pytest.raises(Blocked), made.entry("r", "b"):
            pass

    return enter, made


def queue(store: Any, **options: Any) -> Decided:
    made = TaskGate(store, **options)
    task = made.add(TaskLimits("send", lambda: None, "1000/second"))
    return lambda: made.delay(task, (), {}), made._limiters


def upstream(store: Any, **options: Any) -> Decided:
    made = UpstreamLimits(store, "1000/second", **options)
    part = made._route_of("api.example").limiter
    return lambda: part.try_acquire("api.example"), made


KINDS: dict[str, Callable[..., Decided]] = {
    made.__name__: made
    for made in (
        limiter, web, slots, breaker, adaptive_breaker, guard, rules_of_a_guard, queue, upstream,
    )
}  # fmt: skip
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def decided_by(told: Told) -> int:
    """Return how many decisions were told, of what was made before the calls none."""
    return sum(told.calls.values())


@EACH_KIND
def test_what_is_left_is_told_by_close(kind: str) -> None:
    told = Told()
    decide, made = KINDS[kind]("memory://", observer=told)
    before = decided_by(told)
    for _ in range(20):
        decide()
    made.close()
    assert decided_by(told) - before in (20, 21), "and maybe one that has opened a breaker"
    assert told.counts


@EACH_KIND
def test_at_the_last_batch_it_is_closed_already(kind: str) -> None:
    """A call that the observer makes there ends, and what was decided before is told."""
    found: list[str] = []

    class Calling(Told):
        is_closing = False

        def on_counts(self, batch: Sequence[Counts]) -> None:
            super().on_counts(batch)
            if self.is_closing:
                try:
                    decide()
                    found.append("opened again")
                except ConfigurationError as exc:
                    found.append(str(exc))

    told = Calling()
    decide, made = KINDS[kind]("memory://", observer=told)
    before = decided_by(told)
    for _ in range(3):
        decide()
    told.is_closing = True
    made.close()
    assert len(found) == 1
    assert ("opened again" if kind in ("web", "queue") else "is closed") in found[0]
    assert decided_by(told) - before in (3, 4), "and maybe one that has opened a breaker"


def test_nothing_is_told_in_the_thread_of_a_call(redis_url: str, prefix: str) -> None:
    threads: set[str] = set()

    class Noting(Told):
        def on_counts(self, batch: Sequence[Counts]) -> None:
            super().on_counts(batch)
            threads.add(threading.current_thread().name)

        def on_store_call(self, call: StoreCall) -> None:
            threads.add(threading.current_thread().name)

        def on_event(self, event: ObserverEvent) -> None:
            threads.add(threading.current_thread().name)

        def on_levels(self, batch: Sequence[Level]) -> None:
            threads.add(threading.current_thread().name)

    all_told = {kind: Noting() for kind in KINDS}
    made = {
        kind: KINDS[kind](redis_url, observer=told, prefix=f"{prefix}:{kind}")
        for kind, told in all_told.items()
    }
    ends_at = time.monotonic() + 20
    while not all(told.calls for told in all_told.values()) and time.monotonic() < ends_at:
        for decide, _ in made.values():
            decide()
        time.sleep(0.02)
    assert threads == {"distwindow"}
    for _, each in made.values():
        each.close()
    assert all(told.calls for told in all_told.values())


class Failing(Observer):
    """Does something that an observer should not."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do
        self.called = 0

    def _told(self, what: object) -> None:
        self.called += 1
        self.do()

    on_counts = on_store_call = on_event = on_levels = _told  # type: ignore[assignment]


def _raise() -> None:
    raise LookupError("an observer")


@pytest.mark.parametrize("does", ["raises", "calls", "blocks"])
def test_an_observer_that_fails_fails_nothing(
    redis_url: str, prefix: str, does: str, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    all_failing, made = {}, {}
    for kind, make in KINDS.items():
        failing = all_failing[kind] = Failing(lambda: None)
        decide, _ = made[kind] = make(redis_url, observer=failing, prefix=f"{prefix}:{kind}")
        ways: dict[str, Callable[[], object]] = {
            "raises": _raise, "calls": decide, "blocks": lambda: released.wait(20),
        }  # fmt: skip
        failing.do = ways[does]
    for decide, _ in made.values():
        decide()
    reached = any if does == "blocks" else all  # one blocks the worker, and so all others
    ends_at = time.monotonic() + 20
    while not reached(each.called for each in all_failing.values()):
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    for decide, _ in made.values():  # while it blocks, too
        decide()
    released.set()
    for kind, (_, each) in made.items():
        all_failing[kind].do = lambda: None
        each.close()
    assert all(each.called for each in all_failing.values())
    logged = [record for record in caplog.records if "an observer has failed" in record.message]
    assert len(logged) == (len(KINDS) if does == "raises" else 0), "once for each"


@EACH_KIND
def test_the_default_observer_is_that_of_the_moment_at_which_it_is_made(kind: str) -> None:
    told, later = Told(), Told()
    before = KINDS[kind]("memory://")
    set_default_observer(told)
    try:
        decide, made = KINDS[kind]("memory://")
        set_default_observer(later)
        before[0]()
        decide()
        decide()
        for each in (before[1], made):
            each.close()
    finally:
        set_default_observer(None)
    assert 2 <= decided_by(told) <= 3, "each is counted once"
    assert not later.counts


@EACH_KIND
def test_what_is_no_observer_is_named(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="observer"):
        KINDS[kind]("memory://", observer=Told)


@EACH_KIND
@pytest.mark.parametrize(
    "methods", [("on_decision",), ("on_counts", "on_count"), ("counts",), ()], ids=str
)
def test_an_observer_that_would_be_told_nothing_is_named(
    kind: str, methods: tuple[str, ...]
) -> None:
    """Its method is written otherwise, or it has none."""
    own = {name: lambda self, what: None for name in methods}
    observer = type("Mine", (Observer,), own)()
    wrong = {"on_decision": "on_decision", "on_count": "on_count"}.get(
        methods[-1] if methods else "", "none"
    )
    for tell in (set_default_observer, lambda one: KINDS[kind]("memory://", observer=one)):
        with pytest.raises(ConfigurationError, match=rf"Mine.*{wrong}.*on_counts, on_store_call"):
            tell(observer)
    rest = {name: lambda self, what: None for name in ("on_levels", "_on_me", "other")}
    _, made = KINDS[kind]("memory://", observer=type("Mine", (Observer,), rest)())
    made.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_begins_empty_and_tells_at_its_end() -> None:
    program = """
import os
from distwindow import Observer
from tests.observer.test_kinds import KINDS
class Printed(Observer):
    calls = 0
    def __init__(self, kind):
        self.kind = kind
    def on_counts(self, batch):
        self.calls += sum(counts.calls for counts in batch)
        who = "parent" if os.getpid() == parent else "child"
        os.write(1, f"{who} {self.kind} {self.calls}\\n".encode())
parent = os.getpid()
told = {kind: Printed(kind) for kind in KINDS}
made = {kind: make("memory://", observer=told[kind]) for kind, make in KINDS.items()}
def decide(times):
    for _ in range(times):
        for decide, _ in made.values():
            decide()
decide(3)
if not (child := os.fork()):
    for each in told.values():
        each.calls = 0
decide(2 if child else 5)
if child:
    os.waitpid(child, 0)
"""
    result = run_python("-c", program)
    last = {tuple(line.split()[:2]): int(line.split()[2]) for line in result.stdout.splitlines()}
    for kind in KINDS:
        assert last["child", kind] == 5, result.stderr
        assert last["parent", kind] in (5, 6), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["asyncio.run", "closed", "left"])
def test_what_tasks_have_decided_is_told_at_exit(ends: str) -> None:
    """However their event loop has ended, and with nothing closed."""
    program = f"""
import asyncio, os
from distwindow import *
from distwindow.contrib import http
from distwindow.observer import Observer
from tests.web.test_rate_limits import Awaiting
class Printed(Observer):
    def __init__(self, kind):
        self.kind = kind
    def on_counts(self, batch):
        os.write(1, f"{{self.kind}} {{sum(counts.calls for counts in batch)}}\\n".encode())
async def decide():
    limiter = AsyncLimiter("memory://", "5/minute", observer=Printed("limiter"))
    await limiter.try_acquire("key")
    slots = AsyncConcurrency("memory://", 5, observer=Printed("slots"))
    async with slots.hold("key"):
        pass
    rule = ErrorCount(1, open_for=60)
    breaker = AsyncCircuitBreaker("memory://", rule, observer=Printed("breaker"))
    await breaker.open("key")
    try:
        async with breaker.call("key"):
            pass
    except BreakerOpen:
        pass
    web = Awaiting("memory://", on_store_error="raise", observer=Printed("web"))
    await web.run(web.limit("5/minute").decide({{}}, http.LimitedRequest()))
    return limiter, slots, breaker, web
ends = {ends!r}
if ends == "asyncio.run":
    kept = asyncio.run(decide())
else:
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(decide())
    if ends == "closed":
        loop.close()
"""
    result = run_python("-c", program)
    told = sorted(result.stdout.split("\n"))[1:]
    assert told == ["breaker 1", "limiter 1", "slots 1", "web 1"], result.stderr
