"""Each expression of the dashboard has data, in a real Prometheus that scrapes a real gunicorn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.observer import promtool
from tests.observer.test_grafana import RULES, alerts, expressions
from tests.servers import free_port
from tests.servers.wait import until
from tests.web.burst import burst, get
from tests.web.server import serve

pytestmark = pytest.mark.slow

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: gunicorn
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
GUNICORN = (
    "gunicorn tests.observer.apps:wsgi -c tests/observer/gunicorn.py --no-control-socket -w 2 "
    "-k gthread --threads 4 -b 127.0.0.1:{port}"
)


class Prometheus:
    """The API of one that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        answer = get(f"{self._url}{path}?{urlencode(query)}")
        return json.loads(answer.body)["data"] if answer.status == 200 else None

    def values(self, expression: str) -> list[float]:
        """Return the value of each series now, but for those that are no number."""
        data = self.get("query", query=expression)
        assert data is not None, expression
        result = data["result"]
        values = [float(each["value"][1]) for each in result]
        return [value for value in values if value == value]


@contextmanager
def prometheus(folder: Path, scrapes: int) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the server at a port."""
    port = free_port()
    (folder / "prometheus.yml").write_text(CONFIG.format(port=scrapes))
    (folder / "rules.yml").write_text(RULES)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                promtool.needed("prometheus"), f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        asked = Prometheus(port)
        until(lambda: asked.get("status/runtimeinfo"), 30, what="Prometheus answers")
        yield asked
    finally:
        process.terminate()
        process.wait(30)


def chosen(expression: str) -> str:
    """Return an expression as Grafana sends it, where all is chosen."""
    return (
        expression.replace("$__rate_interval", "20s")
        .replace("$limiter", ".*")
        .replace("$limit", ".*")
    )


def test_each_expression_has_data(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    with (
        serve(GUNICORN, "", redis_url, **folder) as served,
        prometheus(tmp_path, served.port) as asked,
    ):
        without = set(expressions())

        def all_have_data() -> bool:
            burst(f"{served.url}/direct", 20)
            assert get(f"{served.url}/tell").status == 200
            for expression in list(without):
                if asked.values(chosen(expression)):
                    without.remove(expression)
            return not without

        try:
            until(all_have_data, 60, every=0.25)
        except TimeoutError:
            pytest.fail(f"without data: {without}")
        rules = asked.get("rules")["groups"][0]["rules"]
        assert {(rule["name"], rule["health"]) for rule in rules} == {
            (alert["alert"], "ok") for alert in alerts()
        }
