"""Make the dashboard that `distwindow grafana` prints, of the metrics of `PrometheusObserver`:

python docs/make/grafana.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[1] / "grafana" / "distwindow.json"
_OF = 'limiter=~"$limiter"'
_OF_LIMIT = f'{_OF}, limit=~"$limit"'
_RATE = "[$__rate_interval]"
_ENFORCED = 'shadow="false"'


class Target(NamedTuple):
    """One expression, and the legend of its series; the word is Grafana's."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """One picture. `text` says what moves it."""

    title: str
    text: str
    unit: str
    targets: tuple[Target, ...]
    most: float | None = None
    """The end of the axis."""


def _rate(by: str, metric: str, of: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{of}}}{_RATE}))"


def _quantiles(metric: str, by: str, of: str) -> tuple[Target, ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return tuple(
        Target(
            f"histogram_quantile({quantile}, {_rate(f'le, {by}', f'{metric}_bucket', of)})",
            f"{name} {legend}",
        )
        for quantile, name in ((0.5, "p50"), (0.99, "p99"))
    )


_DECISIONS = "distwindow_decisions_total"
_REFUSED = f'{_OF_LIMIT}, result="refused"'
_NO_BREAKER = 'kind!="breaker"'
_REFUSED_BY = _rate("limiter, limit, reason", _DECISIONS, f"{_REFUSED}, {_ENFORCED}")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Who is refused": (
        Panel(
            "Refused, by limit", "Calls that each limit has refused.", "reqps",
            (Target(f"topk(10, {_REFUSED_BY})", "{{limiter}} {{limit}} {{reason}}"),),
        ),
        Panel(
            "Share refused",
            "Of all that a limiter has decided. A call that waits, or a task, is refused first and "
            "admitted later; breakers decide nothing but refusals, and are not here.",
            "percentunit",
            (Target(f"{_rate('limiter', _DECISIONS, f'{_REFUSED}, {_ENFORCED}, {_NO_BREAKER}')}"
                   f" / {_rate('limiter', _DECISIONS, f'{_OF}, {_ENFORCED}, {_NO_BREAKER}')}",
                   "{{limiter}}"),),
            1.0,
        ),
        Panel(
            "Near the limit",
            "Admitted calls that left less than a fifth of the limit, where that is known: not of "
            "calls that a lease has admitted.", "reqps",
            (Target(_rate("limiter, limit", "distwindow_near_limit_total", _OF_LIMIT),
                   "{{limiter}} {{limit}}"),),
        ),
        Panel(
            "Decisions, by result and source", "Who has decided: the store, or a process.",
            "reqps",
            (Target(_rate("result, source", _DECISIONS, f"{_OF_LIMIT}, {_ENFORCED}"),
                   "{{result}} {{source}}"),),
        ),
        Panel(
            "Permits, by result", "Where calls cost more than one permit, these are more.", "ops",
            (Target(_rate("limiter, result", "distwindow_permits_total", _OF_LIMIT),
                   "{{limiter}} {{result}}"),),
        ),
        Panel(
            "Shadow: refused, if it were enforced", "Beside what is refused by enforced limits.",
            "reqps",
            tuple(Target(_rate("limiter, limit", _DECISIONS, f'{_REFUSED}, shadow="{shadow}"'),
                        f"{name} {{{{limiter}}}} {{{{limit}}}}")
                  for shadow, name in (("true", "shadow"), ("false", "enforced"))),
        ),
    ),
    "The store": (
        Panel(
            "Store up", "0 while a process has found it to be away.", "short",
            (Target("min by (limiter) (distwindow_store_up)", "{{limiter}}"),), 1.0,
        ),
        Panel(
            "Exchanges with the store", "The p99 is of those that were answered, and of timeouts.",
            "s", _quantiles("distwindow_store_call_seconds", "operation", ""),
        ),
        Panel(
            "Exchanges, by outcome", "An exchange may have many commands in it.", "ops",
            (Target(_rate("operation, outcome", "distwindow_store_call_seconds_count", ""),
                   "{{operation}} {{outcome}}"),),
        ),
        Panel(
            "Errors of the store",
            "charged: whether it was counted; unknown: nobody knows, and it may have been.", "ops",
            (Target(_rate("operation, charged", "distwindow_store_errors_total", ""),
                   "{{operation}} charged: {{charged}}"),),
        ),
        Panel(
            "Admitted and refused without the store", "By on_store_error.", "reqps",
            (Target(_rate("kind, limiter", "distwindow_failed_open_total", _OF),
                   "admitted {{kind}} {{limiter}}"),
             Target(_rate("kind, limiter", "distwindow_failed_closed_total", _OF),
                   "refused {{kind}} {{limiter}}")),
        ),
    ),
    "Waiting": (
        Panel(
            "How long calls wait", "Of calls that wait for permits, slots or turns.", "s",
            _quantiles("distwindow_wait_seconds", "limiter, result", _OF),
        ),
        Panel(
            "Calls that waited", "refused: in vain.", "reqps",
            (Target(_rate("limiter, result", "distwindow_wait_seconds_count", _OF),
                   "{{limiter}} {{result}}"),),
        ),
        Panel(
            "Tasks held back", "By the workers of queues, and why.", "short",
            (Target("sum by (task, reason) (distwindow_tasks_waiting)", "{{task}} {{reason}}"),),
        ),
        Panel(
            "The oldest task held back", "For how long it has waited.", "s",
            (Target("max by (task, reason) (distwindow_tasks_oldest_wait_seconds)",
                   "{{task}} {{reason}}"),),
        ),
        Panel(
            "Slots held", "Of concurrency limits, in all processes.", "short",
            (Target(f"sum by (limiter) (distwindow_slots_held{{{_OF}}})", "{{limiter}}"),),
        ),
    ),
    "Breakers and upstreams": (
        Panel(
            "Changes of breakers", "Each process counts those that it sees.", "short",
            (Target(f"sum by (breaker, to) (increase(distwindow_breaker_changes_total{_RATE}))",
                   "{{breaker}} {{to}}"),),
        ),
        Panel(
            "Refused by breakers", "Calls that an open breaker has refused.", "reqps",
            (Target(f"sum by (breaker) (rate(distwindow_breaker_rejected_total{_RATE}))",
                   "{{breaker}}"),),
        ),
        Panel(
            "Pauses of upstreams", "Each process counts those that it sees.", "short",
            (Target("sum by (limiter) (increase("
                    f"distwindow_upstream_pauses_total{{{_OF}}}{_RATE}))", "{{limiter}}"),),
        ),
    ),
}  # fmt: skip

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: of schema 39, without plugins."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": [],
            }
        )  # fmt: skip
        y += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, _COLUMNS)
            place = {
                "x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT
            }  # fmt: skip
            panels.append(_picture(len(panels) + 1, panel, place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "distwindow",
        "title": "distwindow",
        "description": "Rate limits, concurrency limits, breakers and queues.",
        "tags": ["distwindow"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _picture(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query.expression,
                "legendFormat": query.legend, "range": True,
            }
            for index, query in enumerate(panel.targets)
        ],
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    chosen = {"text": "All", "value": "$__all"}
    labels = {"limiter": f"{_DECISIONS}", "limit": f"{_DECISIONS}{{{_OF}}}"}
    return [
        {
            "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source",
            "hide": 0, "refresh": 1, "regex": "", "multi": False, "includeAll": False,
        },
        *(
            {
                "name": label, "type": "query", "label": label.capitalize(),
                "datasource": _SOURCE, "query": f"label_values({metric}, {label})",
                "definition": f"label_values({metric}, {label})", "refresh": 2, "sort": 1,
                "hide": 0, "regex": "", "multi": True, "includeAll": True, "allValue": ".*",
                "current": chosen,
            }
            for label, metric in labels.items()
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
