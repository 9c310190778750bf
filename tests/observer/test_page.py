"""The programs of docs/howto/prometheus.md run, each in a process of its own, and expose what they
have decided.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from distwindow.contrib.http.rate_limits import BaseRateLimits
from distwindow.contrib.prometheus import PrometheusObserver
from tests.docs.pages import ROOT, blocks
from tests.docs.test_code import DOCUMENTED_URL
from tests.observer.batches import KINDS, Series, read, series, tell_all, total
from tests.observer.test_grafana import RULES, metrics
from tests.patience import PATIENT_S
from tests.programs import printed
from tests.servers import Standalone, free_port
from tests.servers.wait import until
from tests.web.burst import get

PAGE = ROOT / "docs" / "howto" / "prometheus.md"
TEXT = PAGE.read_text("utf-8")


def program(word: str) -> str:
    """Return the program of the page that imports something of `word`."""
    here = (each.text for each in blocks(PAGE, "python") if "test_page.py" in (each.norun or ""))
    return next(text for text in here if f"from {word}" in text)


def decided(found: Series, **labels: str) -> float:
    return total(found, "distwindow_decisions_total", **labels)


def scrape_12(scrape: Callable[[], str]) -> str:
    """Return a scrape that has all twelve calls of a program."""
    until(lambda: decided(read(scrape())) >= 12, what="12 decisions")
    return scrape()


ENDS = {
    "distwindow import Limiter": """
import urllib.request

def scrape():
    with urllib.request.urlopen("http://localhost:9100/metrics") as response:
        return response.read().decode()
""",
    "fastapi": """
from fastapi.testclient import TestClient

client = TestClient(app).__enter__()
answers = [client.get("/search").status_code for _ in range(12)]
assert answers == [200] * 10 + [429] * 2

def scrape():
    return client.get("/metrics/").text
""",
    "flask": """
client = app.test_client()
answers = [client.get("/search").status_code for _ in range(12)]
assert answers == [200] * 10 + [429] * 2

def scrape():
    return client.get("/metrics/").text
""",
    "django": """
import django
from django.test import Client

django.setup()
answers = [Client().get("/search").status_code for _ in range(12)]
assert answers == [200] * 10 + [429] * 2

def scrape():
    return Client().get("/metrics").content.decode()
""",
}
"""What calls each program twelve times, and scrapes it."""
LIMITERS = {"fastapi": "GET /search", "flask": "GET /search", "django": "__main__.search"}


def has_observer(kind: Any) -> bool:
    return "observer" in inspect.signature(kind.__init__).parameters


@pytest.mark.parametrize(
    "word",
    [
        "distwindow import Limiter",
        *(pytest.param(each, marks=pytest.mark.slow) for each in LIMITERS),
    ],
)
def test_a_program_says_what_it_has_decided(
    word: str, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    if word in LIMITERS and not has_observer(BaseRateLimits):
        pytest.skip("RateLimits of the web take no observer yet")
    text = program(word).replace('"shop"', f'"{prefix}"').replace("9100", str(free_port()))
    if word not in LIMITERS:
        text = text.replace("observer=observer", f'observer=observer, prefix="{prefix}"')
    patient = f'"{redis_url}", "timeout": {PATIENT_S}'
    if word != "django":
        patient = f'"{redis_url}", timeout={PATIENT_S}'
    text = text.replace(f'"{DOCUMENTED_URL}", "10/minute"', f'"{redis_url}", "10/minute"')
    text = text.replace(f'"{DOCUMENTED_URL}", "on_store', f'{patient}, "on_store')
    text = text.replace(f'"{DOCUMENTED_URL}", on_store', f"{patient}, on_store")
    port = re.search(r"start_http_server\((\d+)\)", text)
    end = ENDS[word].replace("9100", port[1] if port else "")
    path = tmp_path / "program.py"
    path.write_text(
        f"{text}\n{end}\nfrom tests.observer.test_page import scrape_12\nprint(scrape_12(scrape))\n"
    )
    found = read(printed("-W", "ignore", path))
    limiter = LIMITERS.get(word, "crawler")
    assert decided(found, limiter=limiter, result="allowed") == 10
    assert decided(found, limiter=limiter, result="refused") == 2
    assert decided(found) == 12
    assert {dict(of).get("limit") for _, of in found if ("result", "refused") in of} == {
        "10/minute"
    }


@pytest.mark.slow
def test_a_worker_of_celery_says_what_it_has_started(tmp_path: Path) -> None:
    from celery import Celery

    from distwindow.contrib.celery import RateLimits

    if not has_observer(RateLimits):
        pytest.skip("RateLimits of Celery take no observer yet")
    port = free_port()
    (tmp_path / "metrics").mkdir()
    with Standalone() as redis:
        base = redis.url.removesuffix("/0")
        text = program("celery").replace("redis://localhost:6379", base)
        (tmp_path / "proj.py").write_text(text.replace("9100", str(port)))
        worker = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "celery", "-A", "proj", "worker", "-c", "2"],
            cwd=tmp_path, start_new_session=True,
            env={
                **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}",
                "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
            },
        )  # fmt: skip
        try:
            with Celery("client", broker=f"{base}/1", set_as_current=False) as client:
                for _ in range(12):
                    client.send_task("proj.fetch", ["url"])

            def found() -> Series:
                answer = get(f"http://127.0.0.1:{port}/metrics")
                return read(answer.body.decode() if answer.status == 200 else "")

            started = {"kind": "queue", "limiter": "proj.fetch", "result": "allowed"}
            until(lambda: decided(found(), **started) == 10, 60, what="ten starts")
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


# -- the tables --------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    below = TEXT.split(f"\n## {heading}\n")[1]
    lines = [line for line in below.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def labels_of_each() -> dict[str, list[str]]:
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    collectors: Any = registry._collector_to_names
    return {
        names[0] + "_total" * (each._type == "counter"): list(each._labelnames)
        for each, names in collectors.items()
    }


def test_the_table_has_each_metric_with_its_labels() -> None:
    there = [row for row in rows("All metrics") if len(row) == 4]
    said = {f"distwindow_{row[0].strip('`')}": re.findall(r"`(\w+)`", row[2]) for row in there}
    assert said == labels_of_each()
    assert set(said) == set(metrics())


def test_the_table_has_each_kind_and_each_alert() -> None:
    kinds = next(row for row in rows("All metrics") if row[0] == "`kind`")[1]
    assert re.findall(r"`(\w+)`", kinds) == list(KINDS)
    alerts = [row[0].strip("`") for row in rows("Grafana, and alerts")]
    assert alerts == re.findall(r"- alert: (\w+)", RULES)


def test_so_many_series_are_there_of_each() -> None:
    registry = CollectorRegistry()
    tell_all(PrometheusObserver(registry))
    found = series(registry)

    def of(metric: str, **labels: str) -> int:
        whole = re.compile(f"distwindow_{metric}(_bucket|_sum|_count)?")
        return sum(whole.fullmatch(n) is not None and labels.items() <= o for n, o in found)

    one = {"kind": "web", "limiter": "search"}
    assert of("permits_total", limit="5/s", **one) == 3
    assert of("near_limit_total", limit="5/s", **one) == 1
    assert of("failed_open_total", **one) + of("failed_closed_total", **one) == 2
    assert of("wait_seconds", result="allowed", **one) == 15
    assert of("store_errors_total", operation="acquire") == 3
    assert of("store_call_seconds", operation="acquire", outcome="ok") == 16
    assert of("breaker_changes_total", breaker="bank") == 3
    assert of("breaker_rejected_total", breaker="bank") == 1
