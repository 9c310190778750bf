"""`DISTWINDOW_SHADOW=1` for all that decides by rate limits: nothing is refused, delayed or raised,
and what would have been refused is told.
"""

from __future__ import annotations

import asyncio
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import limits
import pytest

import distwindow
from distwindow import (
    AsyncGuard,
    AsyncLimiter,
    ConfigurationError,
    FlowRule,
    Guard,
    Limiter,
    contrib,
    guarded,
)
from distwindow.contrib.limiter_pool import AsyncLimiterPool, LimiterPool
from distwindow.contrib.tasks import AsyncTaskGate, TaskGate, TaskLimits, acquire_all
from distwindow.ring.limit import parse_limits
from distwindow.rules.shadow import VARIABLE
from distwindow.runtime.options import Options
from distwindow.stores.memory import MemoryStore
from distwindow.support.async_use import result_of, run_at_once
from tests.away.stores import NOT_SENT, UNKNOWN, AsyncRemoteStore
from tests.clock_and_stores import ManualClock
from tests.limits_storage.common import STRATEGIES
from tests.limits_storage.test_storage import strategy_of
from tests.observer.test_integrations import ASKED
from tests.observer.told import Told
from tests.rules.test_shadow import Unwell
from tests.upstream.clients import CLIENTS, Answer, limits_of

LIMIT = "2/hour"
CALLS = 5
DEFAULT = {"default_limits": "1/hour"}
Ask = Callable[[Told], int]
"""Asks a limit of 2 `CALLS` times, or three times, and returns how often the caller was not let
through at once.
"""


def counted(
    call: Callable[[], Any],
    close: Callable[[], Any],
    run: Callable[[Coroutine[Any, Any, int]], int] = run_at_once,
) -> int:
    """Return how many of `CALLS` calls have raised, or returned what is false."""

    async def call_all() -> int:
        stopped = 0
        for _ in range(CALLS):
            try:
                stopped += not await result_of(call())
            except distwindow.Blocked:
                stopped += 1
        await result_of(close())
        return stopped

    return run(call_all())


counted_in_tasks = partial(counted, run=asyncio.run)


# -- limiters --------------------------------------------------------------------------------------


def _entered(entry: Any) -> bool:
    with entry:
        return True


async def _entered_in_task(entry: Any) -> bool:
    async with entry:
        return True


async def _true() -> bool:
    return True


WAYS: dict[str, Callable[[Any, bool], Any]] = {
    "try_acquire": lambda one, _: one.try_acquire("k"),
    "acquire": lambda one, _: one.acquire("k", timeout=0),
    "entry": lambda one, is_async: (_entered_in_task if is_async else _entered)(one.entry("k")),
    "limit": lambda one, is_async: one.limit("k")(_true if is_async else lambda: True)(),
    "reserve": lambda one, _: one.try_reserve("k", 1),
}


def of_limiter(way: str, is_async: bool) -> Ask:
    def ask(told: Told) -> int:
        one: Any = (AsyncLimiter if is_async else Limiter)("memory://", LIMIT, observer=told)
        count: Any = counted_in_tasks if is_async else counted
        return int(count(lambda: WAYS[way](one, is_async), one.aclose if is_async else one.close))

    return ask


def of_pool(is_async: bool) -> Ask:
    def ask(told: Told) -> int:
        pool = (AsyncLimiterPool if is_async else LimiterPool)("memory://", Options(observer=told))
        limiter: Any = pool.get(parse_limits(LIMIT), "deny")
        ways: Any = counted_in_tasks if is_async else counted
        close: Any = pool.aclose if is_async else pool.close  # type: ignore[union-attr]
        return int(ways(lambda: limiter.try_acquire("k"), close))

    return ask


# -- guards ----------------------------------------------------------------------------------------

RELATED = [FlowRule("r", 2, strategy="relate", ref_resource="w")]


def of_guard(make: Callable[..., Any], is_async: bool, way: str) -> Ask:
    def ask(told: Told) -> int:
        one = make("memory://", observer=told, time=ManualClock())
        if is_async:

            async def call() -> bool:
                if way == "guarded":
                    return bool(await guarded(one, "r")(_true)())
                return await _entered_in_task(one.entry("w")) and await _entered_in_task(
                    one.entry("r")
                )

            return counted_in_tasks(call, one.aclose)
        if way == "guarded":
            return counted(lambda: guarded(one, "r")(lambda: True)(), one.close)
        return counted(lambda: _entered(one.entry("w")) and _entered(one.entry("r")), one.close)

    return ask


def guard_of(kind: Any, *rules: Any) -> Callable[..., Any]:
    return lambda store, **options: kind(store, rules, **options)


def guard_of_file(path: Path, kind: Any) -> Callable[..., Any]:
    file = path / "rules.json"
    file.write_text('{"flow": [{"resource": "r", "count": 2}]}')
    return lambda store, **options: kind.from_file(file, store, **options)


# -- outgoing calls --------------------------------------------------------------------------------


def of_client(kind: Any) -> Ask:
    def ask(told: Told) -> int:
        limits = limits_of(
            kind, "memory://", LIMIT, max_wait=0.0, observer=told, on_store_error="deny"
        )
        client = kind(lambda url: Answer(), limits)
        try:
            found = 0
            for _ in range(CALLS):
                try:
                    client.call()
                except client.limited:
                    found += 1
            return found
        finally:
            client.close()

    return ask


# -- the storage for limits ------------------------------------------------------------------------


def of_limits(name: str, is_async: bool) -> Ask:
    def ask(told: Told) -> int:
        import_module("distwindow.contrib.limits")
        item = limits.parse(LIMIT)
        distwindow.set_default_observer(told)
        try:
            uri = f"{'async+' if is_async else ''}distwindow+memory://"
            storage: Any = limits.storage.storage_from_string(uri)
        finally:
            distwindow.set_default_observer(None)
        strategy = strategy_of(name, storage)
        if is_async:
            return counted_in_tasks(lambda: strategy.hit(item, "k"), storage.aclose)
        return counted(lambda: strategy.hit(item, "k"), storage.close)

    return ask


# -- queues ----------------------------------------------------------------------------------------


def job(tenant: str = "a") -> None:
    """What is not run here."""


async def awaited_job(ctx: Any, tenant: str = "a") -> bool:
    return True


def gate(told: Told, limits: Any = LIMIT) -> int:
    made = TaskGate("memory://", observer=told)
    task = made.add(TaskLimits("send", job, limits))
    return counted(lambda: not made.delay(task, ("a",), {}), made._limiters.close)


def async_gate(told: Told) -> int:
    made = AsyncTaskGate("memory://", observer=told)
    task = made.add(TaskLimits("send", job, LIMIT))

    async def call() -> bool:
        return not await made.hold(task, (), {}, 0.0)

    return counted_in_tasks(call, made._limiters.aclose)


def rq(told: Told) -> int:
    ours = import_module("distwindow.contrib.rq")
    of = ours.RateLimits("memory://", observer=told)

    def work() -> None: ...

    delay = getattr(of.limit(limits=LIMIT)(work), ours.DELAY_ATTRIBUTE)
    return counted(lambda: not delay((), {}), of._gate._limiters.close)


def dramatiq(told: Told) -> int:
    of_dramatiq, stub = import_module("dramatiq"), import_module("dramatiq.brokers.stub")
    of = import_module("distwindow.contrib.dramatiq").RateLimits("memory://", observer=told)
    broker = stub.StubBroker()
    broker.add_middleware(of)
    actor = of_dramatiq.actor(job, broker=broker, limits=LIMIT)

    def call() -> bool:
        try:
            of.before_process_message(broker, stub.MessageProxy(actor.message()))
        except of_dramatiq.middleware.SkipMessage:
            return False
        return True

    try:
        return counted(call, of._gate._limiters.close)
    finally:
        broker.close()


def taskiq(told: Told) -> int:
    of_taskiq = import_module("taskiq")
    of = import_module("distwindow.contrib.taskiq").RateLimits("memory://", observer=told)
    broker = of_taskiq.InMemoryBroker().with_middlewares(of)
    broker.task("job", limits=LIMIT)(awaited_job)
    message = of_taskiq.TaskiqMessage(task_id="1", task_name="job", labels={}, args=[], kwargs={})

    async def call() -> bool:
        return not await of.wait(message, 0.0)

    return counted_in_tasks(call, of._gate._limiters.aclose)


def arq(told: Told) -> int:
    pytest.importorskip("arq")
    retry = import_module("arq.worker").Retry
    of = import_module("distwindow.contrib.arq").RateLimits("memory://", observer=told)
    limited = of.limit(limits=LIMIT)(awaited_job)

    async def call() -> bool:
        try:
            return bool(await limited({"job_id": "1"}))
        except retry:
            return False

    return counted_in_tasks(call, of._gate._limiters.aclose)


def celery(told: Told) -> int:
    """The gate of a simulated worker, with its limiter and its counts as in a worker."""
    simulated = import_module("tests.celery.simulated")
    settings = import_module("distwindow.contrib.celery.settings").Settings
    counts = import_module("distwindow.contrib.celery.counts")
    timeline = simulated.Timeline()
    tasks = [simulated.SimulatedTask("plain", limits=[LIMIT], limit_key="{key}")]
    limiters = settings(observer=told).limiters(MemoryStore(timeline.clock))
    worker = simulated.SimulatedWorker(timeline, limiters.store, tasks, slots=CALLS)
    worker.gate._counts = counts.GateCounts(limiters.tally, worker.gate.lines, worker, "local")
    for number in range(CALLS):
        worker.receive(simulated.SimulatedRequest(number, tasks[0], "a", 0.01))
    timeline.run_for(1.0)
    limiters.close()
    return CALLS - len(worker.started)


QUEUES: dict[str, Ask] = {
    "celery": celery, "rq": rq, "dramatiq": dramatiq, "taskiq": taskiq, "arq": arq, "tasks": gate,
    "tasks, awaited": async_gate,
    "tasks of several keys": partial(gate, limits=[("{tenant}", LIMIT), "100/hour"]),
}  # fmt: skip
CLIENTS_BY_NAME = {kind.__name__.lower(): of_client(kind) for kind in CLIENTS}
PRODUCTS: dict[str, Ask] = {
    **ASKED, **QUEUES, **CLIENTS_BY_NAME, "limits": of_limits("moving-window", False),
    **{f"limits, {name}, awaited": of_limits(name, True) for name in STRATEGIES},
    **{f"limits, {name}": of_limits(name, False) for name in STRATEGIES},
    "limiter_pool": of_pool(False), "limiter_pool, awaited": of_pool(True),
    **{f"Limiter.{way}": of_limiter(way, False) for way in WAYS},
    **{f"AsyncLimiter.{way}": of_limiter(way, True) for way in WAYS},
    **{
        f"{kind.__name__}, {way}": of_guard(
            guard_of(kind, *(RELATED if way == "relate" else [FlowRule("r", 2)])),
            kind is AsyncGuard, way,
        )
        for kind in (Guard, AsyncGuard)
        for way in ("entry", "guarded", "relate")
    },
}  # fmt: skip
PARTS = {
    "exporters", "http", "httpx_calls", "model_calls", "queue_counts", "shared_windows", "upstream",
    "langchain", "pydantic_ai", "opentelemetry", "prometheus",
}  # fmt: skip
"""The modules that decide nothing by themselves, or have no observer of their own."""


def asked(told: Told, ask: Ask, monkeypatch: pytest.MonkeyPatch, value: str) -> int:
    monkeypatch.setenv(VARIABLE, value)
    return ask(told)


def refused_by(told: Told, *, shadow: bool) -> int:
    return sum(
        each.calls for each in told.counts if each.result == "refused" and each.shadow is shadow
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_is_refused_if_it_is_enforced_is_told_in_shadow(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(PRODUCTS[product], monkeypatch)


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
def test_a_guard_from_a_file_is_in_shadow_too(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(of_guard(guard_of_file(tmp_path, kind), kind is AsyncGuard, "entry"), monkeypatch)


def _check(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    enforced, in_shadow = Told(), Told()
    refused = asked(enforced, ask, monkeypatch, "0")
    assert refused_by(enforced, shadow=False) == refused > 0
    assert not refused_by(enforced, shadow=True)
    began_at = time.monotonic()
    assert asked(in_shadow, ask, monkeypatch, "1") == 0
    assert time.monotonic() - began_at < 20, "its limits would have it wait for an hour"
    assert refused_by(in_shadow, shadow=True) == refused
    assert {each.shadow for each in in_shadow.counts} == {True}


def test_each_integration_is_among_them() -> None:
    modules = {module.name for module in pkgutil.iter_modules(contrib.__path__)}
    assert modules - PARTS <= PRODUCTS.keys()


def route_of_fastapi(told: Told, **options: Any) -> int:
    fastapi, ours = import_module("fastapi"), import_module("distwindow.contrib.fastapi")
    client = import_module("fastapi.testclient").TestClient
    of = ours.RateLimits("memory://", on_store_error="raise", observer=told, **DEFAULT)
    app = fastapi.FastAPI()
    of.install(app)
    app.get("/", dependencies=[fastapi.Depends(of.limit(LIMIT, **options))])(lambda: "ok")
    with client(app) as one:
        return [one.get("/").status_code for _ in range(CALLS)].count(429)


def route_of_flask(told: Told, **options: Any) -> int:
    flask, ours = import_module("flask"), import_module("distwindow.contrib.flask")
    of = ours.RateLimits("memory://", on_store_error="raise", observer=told, **DEFAULT)
    app = flask.Flask("app")
    of.init_app(app)
    app.get("/")(of.limit(LIMIT, **options)(lambda: "ok"))
    client = app.test_client()
    found = [client.get("/").status_code for _ in range(CALLS)].count(429)
    of.close()
    return found


@pytest.mark.parametrize("overrides", [True, False])
@pytest.mark.parametrize("route", [route_of_fastapi, route_of_flask])
def test_default_limits_hold_in_shadow_where_they_would_hold(
    route: Callable[..., int], overrides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for value, stopped in (("0", CALLS - (2 if overrides else 1)), ("1", 0)):
        told = Told()
        monkeypatch.setenv(VARIABLE, value)
        assert route(told, override_defaults=overrides) == stopped
        refused: Counter[str] = Counter()
        for each in told.counts:
            refused[each.limit] += each.calls if each.result == "refused" else 0
        found.append(+refused)
    assert found[0] == found[1]
    assert ("1/hour" in found[0]) is not overrides


@pytest.mark.parametrize("failure", [NOT_SENT, UNKNOWN, ConfigurationError("no right")], ids=repr)
@pytest.mark.parametrize("answers", ["raise", "deny"])
@pytest.mark.parametrize("in_tasks", [False, True], ids=["threads", "tasks"])
def test_a_store_that_fails_stops_no_outgoing_call(
    in_tasks: bool, answers: Any, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pause is asked for, too."""
    monkeypatch.setenv(VARIABLE, "1")
    kind = next(kind for kind in CLIENTS if kind.is_async is in_tasks)
    remote = Unwell(ManualClock())
    store = AsyncRemoteStore(remote) if in_tasks else remote
    limits = limits_of(kind, store, LIMIT, on_store_error=answers, time=remote.clock)
    client = kind(lambda url: Answer(), limits)
    remote.failure = failure
    assert [client.call() for _ in range(CALLS)] == [200] * CALLS


class FailsLater(Unwell):
    """Fails for good with `later`, once it has answered so many commands."""

    later: Any
    answers = 0

    def execute(self, command: Any, deadline: float | None = None) -> Any:
        self.answers -= 1
        self.failure = self.later if self.answers < 0 else None
        return super().execute(command, deadline)


@pytest.mark.parametrize("failure", [NOT_SENT, UNKNOWN, ConfigurationError("no right")], ids=repr)
@pytest.mark.parametrize("limits", [LIMIT, ["100/hour", ("{tenant}", LIMIT)]], ids=["one", "two"])
@pytest.mark.parametrize("in_celery", [False, True])
def test_a_store_that_fails_holds_no_task(
    limits: Any, failure: Any, in_celery: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it fails first: a call, that of the second key, or what is given back."""
    monkeypatch.setenv(VARIABLE, "1")
    for answers in range(3 * CALLS):
        clock = ManualClock()
        remote = FailsLater(clock)
        remote.later, remote.answers = failure, answers
        ask_once = _celery_asked if in_celery else _gate_asked
        assert ask_once(remote, limits) == CALLS, answers


def _gate_asked(remote: Any, limits: Any) -> int:
    made = TaskGate(remote, on_store_error="hold", time=remote.clock)
    task = made.add(TaskLimits("send", job, limits))
    delays = [made.delay(task, ("a",), {}) for _ in range(CALLS)]
    made._limiters.close()
    return delays.count(0.0)


def _celery_asked(remote: Any, limits: Any) -> int:
    admission = import_module("distwindow.contrib.celery.admission")
    items = TaskLimits("send", job, limits).items(("a",), {})
    pool = LimiterPool(remote, Options(time=remote.clock))
    ask = partial(acquire_all, pool.get(items[0][1]))
    asked = admission.TaskAdmission(ask, remote.clock.monotonic, "hold")
    answers = [asked.may_run(items) for _ in range(CALLS)]
    pool.close()
    return [answer.admitted and not answer.wait_s for answer in answers].count(True)


def test_a_worker_of_dramatiq_logs_at_its_end_what_would_have_been_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While its log is open, which is not so at the end of its process."""
    monkeypatch.setenv(VARIABLE, "1")
    of_dramatiq, stub = import_module("dramatiq"), import_module("dramatiq.brokers.stub")
    of = import_module("distwindow.contrib.dramatiq").RateLimits("memory://")
    broker = stub.StubBroker()
    broker.add_middleware(of)
    actor = of_dramatiq.actor(job, broker=broker, limits=LIMIT)
    for _ in range(CALLS):
        of.before_process_message(broker, stub.MessageProxy(actor.message()))
    broker.emit_after("worker_shutdown", None)
    assert f"would have refused {CALLS - 2} calls by {LIMIT}" in caplog.text
    broker.close()
    of._gate._limiters.close()


def settings_of_django(told: Told, shadow: bool) -> int:
    pytest.importorskip("rest_framework")
    from django.test import Client

    from tests.web.django_project import distwindow, routes

    ours, views = import_module("distwindow.contrib.django"), import_module("django.http")
    with distwindow(observer=told, limits=LIMIT, shadow=shadow):
        with routes(view=lambda request: views.HttpResponse("ok")):
            found = [Client().get("/view").status_code for _ in range(CALLS)]
        ours.rate_limits().close()
    return found.count(429)


def throttle_of_drf(told: Told, shadow: bool) -> int:
    pytest.importorskip("rest_framework")
    from tests.web.django_project import distwindow
    from tests.web.test_drf import status, view

    ours = import_module("distwindow.contrib.drf")
    own = {"rate": LIMIT, "scope": "search", "shadow": shadow}
    throttle = type("Search", (ours.AnonRateThrottle,), own)
    with distwindow(observer=told):
        limited = view(throttle)
        found = [status(limited) for _ in range(CALLS)]
        ours.rate_limits().close()
    return found.count(429)


@pytest.mark.parametrize("ask", [settings_of_django, throttle_of_drf])
def test_a_limit_may_be_in_shadow_where_it_is_configured(ask: Callable[[Told, bool], int]) -> None:
    enforced, in_shadow = Told(), Told()
    refused = ask(enforced, False)
    assert refused == refused_by(enforced, shadow=False) > 0
    assert ask(in_shadow, True) == 0
    assert refused_by(in_shadow, shadow=True) == refused
    assert {each.name for each in in_shadow.counts} == {each.name for each in enforced.counts}


def test_a_key_that_cannot_be_asked_for_holds_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")

    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("no key")

    made = TaskGate("memory://")
    task = made.add(TaskLimits("send", job, LIMIT))
    monkeypatch.setattr(made._limiters.get(task.parts[0].limits), "try_acquire", fail)
    assert [made.delay(task, ("a",), {}) for _ in range(CALLS)] == [0.0] * CALLS
    simulated = import_module("tests.celery.simulated")
    timeline, limited = simulated.Timeline(), simulated.SimulatedTask("plain", limits=[LIMIT])
    store = MemoryStore(timeline.clock)
    worker = simulated.SimulatedWorker(timeline, store, [limited], slots=CALLS, ask=fail)
    for number in range(CALLS):
        worker.receive(simulated.SimulatedRequest(number, limited, "a", 0.01))
    timeline.run_for(0.5)
    assert len(worker.started) == CALLS
