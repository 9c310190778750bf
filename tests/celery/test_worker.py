"""One Celery worker inside this process: what tasks keep while they wait."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.contrib.testing.worker import start_worker
from kombu.asynchronous import set_event_loop

from distwindow.contrib.celery import RateLimits, task_parked, task_sent_back
from tests.servers import Proxy, Standalone
from tests.servers.faults import Blackhole, Fault, Pass, Refuse
from tests.servers.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]


class Project:
    """An application with a broker of its own, and its worker."""

    def __init__(self, url: str, prefix: str, store: str | None = None, **conf: Any) -> None:
        self.app = Celery("project", broker=url, backend="cache+memory://", set_as_current=False)
        self.app.conf.update(
            task_default_queue=prefix,
            result_expires=60,
            broker_connection_retry_on_startup=True,
            worker_hijack_root_logger=False,
        )
        self.app.conf.update(conf)
        self.limits = RateLimits(self.app, store or url, prefix=prefix)
        self.started: list[tuple[Any, float]] = []
        self.gate: Any = None

    def task(self, **options: Any) -> Any:
        """Return a task that records its first argument and the time, and returns the argument."""
        return self.add(lambda value=None: value, **options)

    def add(self, function: Callable[..., Any], **options: Any) -> Any:
        def run(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self.started.append((args[0] if args else None, time.monotonic()))
            return function(*([self_] if options.get("bind") else []), *args, **kwargs)

        return self.app.task(shared=False, **{**options, "bind": True})(run)

    @contextlib.contextmanager
    def worker(self, pool: str = "threads", slots: int = 4) -> Iterator[None]:
        # Otherwise workers of Celery 5.4 with kombu 5.4 run on the event loop of the first worker
        # in this process, whose timer they do not use: their etas never come, without a gate, too.
        set_event_loop(None)
        with start_worker(
            self.app, pool=pool, concurrency=slots, perform_ping_check=False,
            shutdown_timeout=20.0, loglevel="WARNING",
        ) as worker:  # fmt: skip
            self.gate = worker.distwindow_gate
            yield

    def values(self) -> list[Any]:
        return [value for value, _ in self.started]

    def wait_started(self, count: int, timeout: float) -> None:
        what = f"{count} tasks to start"
        until(lambda: len(self.started) == count, what=what, timeout=timeout)

    def wait_parked(self, count: int) -> None:
        until(lambda: self.gate.parked == count, what=f"{count} parked tasks", timeout=20)


@pytest.fixture
def project(redis_url: str, prefix: str) -> Project:
    return Project(redis_url, prefix)


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_chains_groups_and_chords(project: Project, pool: str) -> None:
    limited = project.task(limits="20/second", name="limited")

    @project.app.task(name="total", shared=False)
    def total(values: list[int]) -> int:
        return sum(values)

    with project.worker(pool):
        result = chord([limited.s(number) for number in range(40)], total.s()).apply_async()
        assert result.get(timeout=20) == sum(range(40))
        assert chain(limited.s(7), limited.s(), limited.s()).apply_async().get(timeout=10) == 7
        assert group(limited.s(n) for n in range(5)).apply_async().get(timeout=10) == [*range(5)]
    assert len(project.started) == 48


def test_retries_are_the_tasks_own(project: Project) -> None:
    seen = []

    def flaky(self: Any, value: int) -> int:
        seen.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0.05)
        return value

    limited = project.add(flaky, bind=True, limits="2/second", max_retries=2, name="limited")
    with project.worker():
        results = [limited.delay(number) for number in range(4)]
        assert [result.get(timeout=20) for result in results] == [0, 1, 2, 3]
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 4


def test_a_revoked_task_and_an_expired_one_never_start(project: Project) -> None:
    limited = project.task(limits="1/8s", name="limited")
    with project.worker():
        first = limited.delay("first")
        assert first.get(timeout=20) == "first"
        revoked = limited.delay("revoked")
        expired = limited.apply_async(["expired"], expires=4)
        last = limited.delay("last")
        project.wait_parked(3)
        assert {result.state for result in (revoked, expired, last)} == {"PENDING"}
        project.app.control.revoke(revoked.id)
        assert last.get(timeout=40) == "last"
        assert project.values() == ["first", "last"]
        assert (revoked.state, expired.state) == ("REVOKED", "REVOKED")
        assert project.gate.parked == 0


def test_what_waits_is_seen_and_purged_from_python(project: Project) -> None:
    limited = project.task(limits="1/hour", name="limited")
    with project.worker():
        assert limited.delay("first").get(timeout=20) == "first"
        waiting = [limited.delay(number) for number in range(3)]
        project.wait_parked(3)
        found = project.app.control.inspect(timeout=5).limits()
        assert [worker["parked"] for worker in found.values()] == [3]
        assert project.app.control.purge() == 3
        until(lambda: project.gate.parked == 0, what="empty lines", timeout=20)
        until(lambda: {one.state for one in waiting} == {"REVOKED"}, what="results", timeout=20)
    assert project.values() == ["first"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_countdown_and_eta_come_first(project: Project, pool: str) -> None:
    limited = project.task(limits="20/second", name="limited")
    with project.worker(pool):
        began = time.monotonic()
        eta = datetime.now(timezone.utc) + timedelta(seconds=0.6)
        later = limited.apply_async(["later"], countdown=1.0)
        soon = limited.apply_async(["soon"], eta=eta)
        assert limited.delay("now").get(timeout=20) == "now"
        assert soon.get(timeout=20) == "soon"
        assert later.get(timeout=20) == "later"
    waited = {value: at_s - began for value, at_s in project.started}
    assert waited.keys() == {"now", "soon", "later"}
    assert waited["soon"] >= 0.55
    assert waited["later"] >= 0.95


def test_links_and_errbacks_are_called(project: Project) -> None:
    limited = project.task(limits="1/500ms", name="limited")
    called: list[int] = []

    @project.app.task(name="note", shared=False)
    def note(value: int) -> None:
        called.append(value)

    with project.worker():
        for number in range(3):
            limited.apply_async([number], link=note.s())
        until(lambda: sorted(called) == [0, 1, 2], what="the links", timeout=20)


def test_signals_say_what_waits_and_what_was_sent_back(redis_url: str, prefix: str) -> None:
    project = Project(redis_url, prefix, distwindow_max_hold=1.0)
    limited = project.task(limits="1/8s", limit_key="one", name="limited")
    parked, back = [], []

    def on_parked(sender: Any, request: Any, key: str, wait_s: float, **_: Any) -> None:
        parked.append((sender.name, request.id, key, 0 < wait_s <= 8))

    def on_sent_back(sender: Any, request: Any, key: str, eta: datetime, **_: Any) -> None:
        back.append((sender.name, request.id, key, eta > datetime.now(timezone.utc)))

    task_parked.connect(on_parked, weak=False)
    task_sent_back.connect(on_sent_back, weak=False)
    try:
        with project.worker():
            limited.apply_async(["first"], task_id="first")
            until(lambda: project.values() == ["first"], what="the first", timeout=20)
            second = limited.apply_async(["second"], task_id="second")
            assert second.get(timeout=40) == "second"
    finally:
        task_parked.disconnect(on_parked)
        task_sent_back.disconnect(on_sent_back)
    assert parked[0] == ("limited", "second", "one", True)
    assert back[0] == ("limited", "second", "one", True)


def test_what_is_sent_back_keeps_all_but_its_eta(redis_url: str, prefix: str) -> None:
    project = Project(redis_url, prefix, distwindow_max_hold=0.5)
    seen: list[dict[str, Any]] = []

    def look(self: Any, value: Any) -> None:
        seen.append(dict(self.request.__dict__))

    limited = project.add(look, bind=True, limits="1/8s", name="limited")
    options: dict[str, Any] = {
        "headers": {"trace": "abc", "stamp": [1, 2]}, "priority": 3, "compression": "gzip",
        "time_limit": 60, "soft_time_limit": 50, "retries": 2, "shadow": "another name",
        "expires": 60, "link": limited.s().set(immutable=True, queue="nowhere"),
    }  # fmt: skip
    with project.worker():
        limited.apply_async(["x"], **options)
        until(lambda: len(seen) == 1, what="the first", timeout=20)
        limited.apply_async(["x"], **options)
        until(lambda: len(seen) == 2, what="the second", timeout=40)
        assert project.gate.sent_back > 0
    first, second = seen
    assert second["eta"] is not None
    own = {"id", "root_id", "eta", "expires", "correlation_id", "origin", "delivery_info", "stack"}
    own |= {"properties", "reply_to", "argsrepr", "_protected", "callbacks", "children"}
    differing = {name for name in first if name not in own and first[name] != second[name]}
    assert differing == set()
    assert first["delivery_info"]["priority"] == second["delivery_info"]["priority"] == 3
    assert first["headers"]["trace"] == second["headers"]["trace"] == "abc"
    assert [callback["options"]["queue"] for callback in second["callbacks"]] == ["nowhere"]
    assert second["correlation_id"] == second["id"] == second["root_id"]
    assert second["reply_to"] == first["reply_to"]
    assert second["retries"] == 2


def test_what_is_sent_back_through_a_topic_exchange_is_not_lost(
    redis_url: str, prefix: str
) -> None:
    """Redis drops what matches no binding: 40 tasks wait there longer than a worker keeps them.
    Another queue of the exchange has 40 tasks before, and no more after.
    """
    bindings = {f"{prefix}-a": "n.a", f"{prefix}-b": "n.*"}
    queues = {
        name: {"exchange": prefix, "exchange_type": "topic", "routing_key": key}
        for name, key in bindings.items()
    }
    project = Project(
        redis_url, prefix, task_queues=queues,
        broker_transport_options={"visibility_timeout": 4, "unacked_restore_interval": 1},
    )  # fmt: skip
    seen: set[tuple[str, str]] = set()

    def look(self: Any, value: Any) -> None:
        info = self.request.delivery_info
        seen.add((info["exchange"], info["routing_key"]))

    limited = project.add(look, bind=True, limits="5/second", name="limited")
    project.app.amqp.queues.select([f"{prefix}-b"])
    declared = [project.app.amqp.queues[name] for name in bindings]
    for number in range(40):
        limited.apply_async([number], exchange=prefix, routing_key="n.a", declare=declared)
    with project.worker():
        until(lambda: len(project.started) >= 40, what="all tasks", timeout=40)
        assert project.gate.sent_back > 0
    assert sorted(project.values()) == list(range(40))
    assert seen == {(prefix, "n.a")}
    with project.app.connection_for_read() as connection:
        assert declared[0](connection.default_channel).queue_declare(passive=True)[1] == 40


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_limits_may_have_keys_of_their_own(project: Project, pool: str) -> None:
    limited = project.task(limits=["9/hour", ("tenant:{0[0]}", "2/hour")], name="limited")
    with project.worker(pool):
        for number in range(24):
            limited.delay(f"{number % 6}-{number}")
        project.wait_parked(24 - 9)
        found = next(iter(project.app.control.inspect(timeout=5).limits().values()))
        assert found["asks"] <= 24
        waits = {line["key"]: (line["waiting"], line["waits for"]) for line in found["lines"]}
        # Each tenant has started one or two, and what waits needs one permit of both limits.
        assert waits.keys() <= {f"limited, tenant:{number}" for number in range(6)}
        shown = {limit for _, limit in waits.values()}
        assert shown <= {"9/hour for limited", *(f"2/hour for tenant:{n}" for n in range(6))}
        assert sum(waiting for waiting, _ in waits.values()) == 15
    started = [value[0] for value in project.values()]
    assert max(started.count(tenant) for tenant in "012345") <= 2
    assert len(started) == 9


def test_threads_do_not_take_permits_before_a_thread_is_free(project: Project) -> None:
    """50 tasks at 20/second behind two long ones: permits that were taken meanwhile would let all
    start at once.
    """
    limited = project.task(limits="20/second", name="limited")

    def sleep(seconds: float) -> None:
        time.sleep(seconds)

    long = project.app.task(name="long", shared=False)(sleep)
    with project.worker(slots=2):
        long.delay(2.5)
        long.delay(2.5)
        time.sleep(0.1)
        for number in range(50):
            limited.delay(number)
        until(lambda: len(project.started) == 50, what="all", timeout=20)
    moments = [at_s for _, at_s in project.started]
    most = max(sum(first <= at_s < first + 0.85 for at_s in moments) for first in moments)
    # The two tasks in hand may have stalled between their permits and their start.
    assert most <= 20 + 2


def test_a_worker_on_a_transport_without_an_event_loop(prefix: str) -> None:
    """kombu's memory transport has a thread for timers, beside that of the consumer."""
    project = Project("memory://", prefix, result_backend="cache+memory://")
    limited = project.task(limits="20/second", name="limited")
    with project.worker():
        for number in range(50):
            limited.delay(number)
        until(lambda: len(project.started) == 50, what="all", timeout=20)
    assert project.values()[:10] == list(range(10)) or sorted(project.values()) == [*range(50)]


@pytest.mark.parametrize("pool", ["threads", "solo"])
@pytest.mark.parametrize("fault", [Blackhole(), Refuse()], ids=["silent", "refused"])
def test_the_gate_hears_of_the_stores_return_from_its_limiter(
    redis_url: str, prefix: str, pool: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with Standalone() as store, Proxy(store.port) as proxy:
        project = Project(redis_url, prefix, proxy.url)
        limited = project.task(limits="20/second", name="limited")
        with project.worker(pool):
            limited.delay(0)
            project.wait_started(1, timeout=20)
            proxy.fault = fault
            for number in range(1, 9):
                limited.delay(number)
            until(lambda: " is away: " in caplog.text, what="an outage", timeout=20)
            project.gate.admission._paused_until_s = math.inf  # no time ends this pause
            proxy.fault = Pass()
            project.wait_started(9, timeout=20)
    assert sorted(project.values()) == [*range(9)]


def test_a_task_may_be_registered_after_the_limits_are_made(project: Project) -> None:
    limited = project.task(limits="1/minute", name="limited")
    with project.worker():
        later = project.task(limits="1/minute", name="later")
        project.gate.worker.consumer.update_strategies()
        for task in (limited, later):
            task.delay("first")
            task.delay("second")
        project.wait_parked(2)
        assert project.values() == ["first", "first"]
