"""`examples/web/django_app.py` on real servers: several processes, and threads or tasks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("rest_framework")

from tests.programs import run_python
from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import burst, get, statuses
from tests.web.proxy import PROXIES, ProxyType
from tests.web.server import SOURCES, Served, serve

pytestmark = pytest.mark.slow

APP = "examples.web.django_app"
GUNICORN = f"gunicorn -w 4 --threads 4 {APP}:application -b 127.0.0.1:{{port}}"
UVICORN = f"uvicorn {APP}:asgi --workers 2 --port {{port}} --log-level warning"
RUNSERVER = f"{APP} runserver --noreload 127.0.0.1:{{port}}"
TWENTY = {200: 20, 429: 180}
FIELDS = ("ratelimit", "ratelimit-policy")


@pytest.fixture(scope="module")
def gunicorn(store: Standalone) -> Iterator[Served]:
    with serve(GUNICORN, "", store.url) as running:
        yield running


@pytest.fixture(scope="module")
def uvicorn(store: Standalone) -> Iterator[Served]:
    with serve(UVICORN, "", store.url) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/async", "/items"])
def test_a_burst_gets_the_limit_across_processes_and_threads(
    gunicorn: Served, source: str, path: str
) -> None:
    answers = burst(gunicorn.url + path, 200, source=source)
    assert statuses(answers) == TWENTY
    assert {each.limits for each in answers if each.status == 200} == {FIELDS}
    assert {each.limits for each in answers if each.status == 429} == {(*FIELDS, "retry-after")}


def test_a_throttle_of_rest_framework_itself_beside_it(gunicorn: Served, source: str) -> None:
    ours = statuses(burst(f"{gunicorn.url}/items", 200, source=source))
    theirs = statuses(burst(f"{gunicorn.url}/items-by-drf", 200, source=source))
    print(f"UserRateThrottle, 20/minute, 200 at once: ours {ours}, REST framework's {theirs}")
    assert ours == TWENTY


@pytest.mark.parametrize("path", ["/async", "/", "/items"])
def test_under_asgi(uvicorn: Served, source: str, path: str) -> None:
    assert statuses(burst(uvicorn.url + path, 200, source=source)) == TWENTY
    assert "SynchronousOnlyOperation" not in uvicorn.output
    assert "Traceback" not in uvicorn.output


def test_runserver_sends_the_refusal(store: Standalone, source: str) -> None:
    with serve(RUNSERVER, "", store.url) as running:
        assert statuses(burst(f"{running.url}/", 60, source=source)) == {200: 20, 429: 40}
        refused = get(f"{running.url}/", source=source)
    assert refused.status == 429
    assert 1 <= int(refused.field("retry-after") or 0) <= 60
    assert refused.field("content-type") == "application/problem+json"
    assert b"#quota-exceeded" in refused.body


def test_runserver_shows_a_page_of_ones_own(store: Standalone, source: str) -> None:
    with serve(RUNSERVER, "", store.url, REFUSAL_VIEW="__main__.slow_down") as running:
        burst(f"{running.url}/", 20, source=source)
        refused = get(f"{running.url}/", source=source)
    assert (refused.status, refused.body) == (429, b"Too fast.\n")
    assert refused.field("retry-after")


@pytest.mark.parametrize("path", ["/", "/async", "/items"])
def test_forged_headers_change_nothing(gunicorn: Served, source: str, path: str) -> None:
    answers = [
        get(gunicorn.url + path, {"X-Forwarded-For": f"9.9.9.{n}"}, source=source).status
        for n in range(30)
    ]
    assert answers.count(200) == 20


@PROXIES
@pytest.mark.parametrize(
    ("path", "environment"),
    [("/items", {"NUM_PROXIES": "1"}), ("/", {"TRUSTED_PROXIES": "127.0.0.1"})],
)
def test_behind_a_proxy(
    store: Standalone, path: str, environment: dict[str, str], proxy_type: ProxyType
) -> None:
    with serve(GUNICORN, "", store.url, **environment) as running:
        with proxy_type(running.port) as proxy:
            for source in (next(SOURCES), next(SOURCES)):
                answers = [
                    get(proxy.url + path, {"X-Forwarded-For": f"9.9.9.{n}"}, source=source).status
                    for n in range(30)
                ]
                assert answers.count(200) == 20


@pytest.mark.parametrize("says_what_happens_without_store", [True, False])
def test_manage_py_check(tmp_path: Path, says_what_happens_without_store: bool) -> None:
    options = {"store": "memory://"}
    if says_what_happens_without_store:
        options["on_store_error"] = "allow"
    program = tmp_path / "manage.py"
    program.write_text(
        "import django\n"
        "from django.conf import settings\n"
        "from django.core.management import execute_from_command_line\n"
        "apps = ['distwindow.contrib.django']\n"
        f"settings.configure(INSTALLED_APPS=apps, DISTWINDOW={options})\n"
        "django.setup()\n"
        "execute_from_command_line()\n"
    )
    run = run_python(program, "check")
    assert (run.returncode == 0) == says_what_happens_without_store, run.stderr
    assert ("distwindow.E001" in run.stderr) != says_what_happens_without_store
    assert "Traceback" not in run.stderr


# -- what goes wrong ------------------------------------------------------------------------------


def test_workers_that_are_killed_change_nothing(store: Standalone, source: str) -> None:
    with serve(GUNICORN, "", store.url) as running:
        first = burst(f"{running.url}/items", 10, source=source)
        [master] = [p for p in psutil.Process().children() if str(running.port) in str(p.cmdline())]
        for worker in master.children():
            worker.send_signal(signal.SIGKILL)
        until(lambda: len(master.children()) == 4, 60, what="new workers")
        until(lambda: get(f"{running.url}/free").status == 200, 60)
        second = burst(f"{running.url}/items", 100, source=source)
    assert statuses(first) == {200: 10}
    assert statuses(second) == {200: 10, 429: 90}


@pytest.mark.parametrize("command", [GUNICORN, UVICORN], ids=["gunicorn", "uvicorn"])
def test_a_store_that_stands_still(command: str, source: str) -> None:
    with Standalone() as store, serve(command, "", store.url, DISTWINDOW_TIMEOUT="0.25") as running:
        free_s = min(_seconds(f"{running.url}/free") for _ in range(5))
        paths = {"/async": {200}, "/": {200}, "/login": {503}, "/strict": {500}}
        for path in paths:
            get(running.url + path, source=source, method="POST")
        store.pause()
        try:
            for path, expected in paths.items():
                answers = burst(running.url + path, 8, source=source, method="POST")
                assert set(statuses(answers)) == expected, path
            assert min(_seconds(f"{running.url}/free") for _ in range(5)) < free_s + 0.05
        finally:
            store.resume()
        until(lambda: get(f"{running.url}/", source=source).limits == FIELDS)


def _seconds(url: str) -> float:
    began = time.monotonic()
    assert get(url).status == 200
    return time.monotonic() - began
