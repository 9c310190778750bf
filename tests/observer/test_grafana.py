"""The dashboard and the alert rules name metrics that there are, and the rules alert."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from distwindow.cli.app import app
from distwindow.contrib.prometheus import PrometheusObserver
from tests.docs.pages import maker
from tests.observer import promtool

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "grafana"
RULES = (DOCS / "rules.yml").read_text(encoding="utf-8")
NAME = re.compile(r"\bdistwindow_\w+")
SUFFIX = re.compile("_(bucket|sum|count)$")


def metrics() -> dict[str, str]:
    """Return the type of each metric, by its name in expressions, without that of its parts."""
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    return {m.name + "_total" * (m.type == "counter"): m.type for m in registry.collect()}


def named_in(expression: str) -> set[str]:
    """Return the metrics that an expression reads."""
    known = metrics()
    names = set()
    for name in NAME.findall(expression):
        whole = SUFFIX.sub("", name)
        names.add(whole if known.get(whole) == "histogram" else name)
    return names


def dashboard() -> Any:
    return json.loads((DOCS / "distwindow.json").read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(RULES)["groups"][0]["rules"]
    return rules


@pytest.mark.parametrize(
    ("options", "file"), [((), "distwindow.json"), (("--alerts",), "rules.yml")]
)
def test_the_files_of_the_docs_are_what_the_command_prints(
    options: tuple[str, ...], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["grafana", *options], standalone_mode=False)
    assert capsys.readouterr().out == (DOCS / file).read_text("utf-8")


def test_the_file_of_the_dashboard_is_what_its_script_makes() -> None:
    assert dashboard() == maker("grafana.py").dashboard()


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert dashboard()["schemaVersion"] == 39
    assert {panel["type"] for panel in panels()} == {"row", "timeseries"}  # both are Grafana's own
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        sources = [panel, *panel.get("targets", ())] if letters else []
        assert all(each["datasource"]["uid"] == "${datasource}" for each in sources)
    places = [panel["gridPos"] for panel in panels()]
    assert all(at["x"] + at["w"] <= 24 for at in places)
    for one, two in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        below = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or below


def test_its_variables_are_all_that_is_chosen() -> None:
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "limiter", "limit"}
    used = set(re.findall(r"\$(\w+)", " ".join(expressions())))
    assert used == {"limiter", "limit", "__rate_interval"}


def test_each_name_in_the_dashboard_is_a_metric_and_each_metric_is_in_it() -> None:
    assert set().union(*map(named_in, expressions())) == set(metrics())


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_names_metrics_and_says_what_to_do(alert: dict[str, Any]) -> None:
    assert named_in(alert["expr"]) <= set(metrics())
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["description"]
    assert alert["labels"]["severity"] in ("warning", "critical")


def test_promtool_takes_the_rules_and_they_alert_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES)
    shutil.copy(HERE / "rules_test.yml", tmp_path)
    said = promtool.said("check", "rules", tmp_path / "rules.yml")
    assert f"SUCCESS: {len(alerts())} rules found" in said
    promtool.said("test", "rules", tmp_path / "rules_test.yml")
    tested = yaml.safe_load((HERE / "rules_test.yml").read_text("utf-8"))["tests"]
    raised = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert raised == {alert["alert"] for alert in alerts()}
