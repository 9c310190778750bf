"""The module of docs/howto/celery-by-hand.md, run by a worker; and why it has no `hold`."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from celery import _state
from celery.contrib.testing.worker import start_worker
from kombu.asynchronous import set_event_loop

from distwindow.lifecycle.lifecycle import BlockingClosable
from tests.docs.pages import ROOT, blocks
from tests.servers.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

PAGE = ROOT / "docs" / "howto" / "celery-by-hand.md"
RENDER_S = 0.3


@pytest.fixture
def page(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the blocks, with a `rendered` and a `delivered` that record their calls."""
    # Otherwise the tasks would be those of each application that is made after this.
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    monkeypatch.setattr(_state, "_task_join_will_block", False)
    module = types.ModuleType("page")
    names: Any = module.__dict__
    module.running, module.most, module.done = 0, 0, []  # type: ignore[attr-defined]
    lock = threading.Lock()

    def rendered(report: Any) -> Any:
        with lock:
            names["running"] += 1
            names["most"] = max(names["most"], names["running"])
        time.sleep(RENDER_S)
        with lock:
            names["running"] -= 1
            names["done"].append((report, time.monotonic()))
        return report

    for block in blocks(PAGE, "python"):
        text = block.text.replace("redis://localhost:6379/1", redis_url)
        text = text.replace("redis://localhost:6379/0", redis_url).replace('"shop"', repr(prefix))
        exec(compile("\n" * (block.line - 1) + text, str(PAGE), "exec"), names)
    assert names["rendered"]("a report") == "a report is rendered"
    assert names["delivered"]("a mail") is None
    names["rendered"] = rendered
    names["delivered"] = lambda mail: names["done"].append((mail, time.time()))
    module.app.conf.update(
        task_default_queue=prefix, result_backend="cache+memory://", worker_hijack_root_logger=False
    )
    yield module
    for value in list(names.values()):
        if isinstance(value, BlockingClosable):
            value.close()
    module.app.close()


@contextlib.contextmanager
def worker(page: Any, slots: int = 4) -> Iterator[None]:
    set_event_loop(None)  # see tests/celery/test_worker.py
    with start_worker(
        page.app, pool="threads", concurrency=slots, perform_ping_check=False,
        shutdown_timeout=20.0, loglevel="WARNING",
    ):  # fmt: skip
        yield


def test_no_more_than_n_run_at_once(page: Any) -> None:
    with worker(page):
        results = [page.render.delay(number) for number in range(6)]
        assert [result.get(timeout=30) for result in results] == [*range(6)]
    assert page.most == 1


@pytest.mark.parametrize("way", ["hold", "try_hold and retry"])
def test_how_long_others_wait_for_the_pool(page: Any, way: str) -> None:
    """`pytest -s` prints the table of the page."""

    @page.app.task(name="held")
    def held(report: int) -> Any:
        with page.slots.hold("render"):
            return page.rendered(report)

    @page.app.task(name="other")
    def other() -> float:
        return time.monotonic()

    limited = held if way == "hold" else page.render
    with worker(page):
        began_s = time.monotonic()
        reports = [limited.delay(number) for number in range(10)]
        others = [other.delay() for _ in range(4)]
        last_s = max(result.get(timeout=60) for result in others)
        for report in reports:
            report.get(timeout=60)
    ended_s = [at_s for _, at_s in page.done]
    print(f"\n| {way} | {last_s - began_s:.2f} s | {max(ended_s) - began_s:.1f} s |")
    before = sum(at_s < last_s for at_s in ended_s)
    # With four threads, the last of the others starts when there are three reports left.
    assert before >= 6 if way == "hold" else before <= 3


@contextlib.contextmanager
def service(answers: list[tuple[int, dict[str, str]]]) -> Iterator[tuple[str, list[float]]]:
    """A server that gives these answers, and then 200. Yields its URL, and when it was asked."""
    asked: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(time.time())
            status, fields = answers.pop(0) if answers else (200, {})
            self.send_response(status)
            for name, value in fields.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"fetched" if status == 200 else b"")

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def http_date(after_s: float) -> str:
    return format_datetime(datetime.now(timezone.utc) + timedelta(seconds=after_s), usegmt=True)


@pytest.mark.parametrize(
    ("status", "retry_after"),
    [(429, lambda: "1"), (503, lambda: http_date(2.0)), (429, lambda: "soon"), (503, None)],
)
def test_a_refusal_is_retried_after_its_retry_after(
    page: Any, status: int, retry_after: Callable[[], str] | None
) -> None:
    with worker(page):  # a date would pass while it starts
        fields = {} if retry_after is None else {"Retry-After": retry_after()}
        with service([(status, fields)]) as (url, asked):
            assert page.fetch.delay(url).get(timeout=30) == "fetched"
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 1.0 - 0.1


@pytest.mark.parametrize(
    "value", ["", "soon", "1.5", "-1", "²", "Wed, 21 Oct", "Wed, 21 Oct 2015 07:28:00 -0000"]
)
def test_a_retry_after_that_cannot_be_read_is_a_second(page: Any, value: str) -> None:
    assert page.seconds(value) == 1.0


def test_other_answers_fail_the_task(page: Any) -> None:
    with service([(404, {})]) as (url, asked), worker(page):
        with pytest.raises(Exception, match="answers 404"):
            page.fetch.delay(url).get(timeout=30)
        assert len(asked) == 1


def test_an_open_breaker_retries_the_task_without_a_call(page: Any) -> None:
    with service([(500, {})] * 20) as (url, asked), worker(page):
        failed = [page.fetch.delay(url) for _ in range(20)]
        for result in failed:
            with pytest.raises(Exception, match="answers 500"):
                result.get(timeout=30)
        until(lambda: page.breaker.state("api") == "open", what="an open breaker", timeout=10)
        calls = len(asked)
        results = [page.fetch.delay(url) for _ in range(3)]
        until(lambda: {result.state for result in results} == {"RETRY"}, what="retries", timeout=10)
        assert len(asked) == calls
        assert [result.get(timeout=60) for result in results] == ["fetched"] * 3
    assert (
        len(asked) == calls + 3
    )  # a retry of Celery that is raised in the block would be a failure


def test_each_tenant_and_all_together_keep_their_limits(page: Any) -> None:
    with worker(page):
        results = [page.send.delay(f"t{n % 7}", (n % 7, n)) for n in range(28)]
        for result in results:
            result.get(timeout=60)
    assert sorted(number for (_, number), _ in page.done) == [*range(28)]
    moments: dict[Any, list[float]] = {}
    for (tenant, _), at_s in page.done:
        moments.setdefault(tenant, []).append(at_s)
        moments.setdefault("all", []).append(at_s)
    for key, found in moments.items():
        amount = 10 if key == "all" else 2
        # What was admitted may start later, so a second of starts may hold some of two windows.
        for first in found:
            assert sum(first <= at_s < first + 0.8 for at_s in found) <= 2 * amount
