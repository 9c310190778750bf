"""`distwindow grafana`: a dashboard of the metrics of `PrometheusObserver`, and alert rules for
Prometheus: the files of docs/grafana. docs/make/grafana.py makes the dashboard.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from .command import report_errors

_CHECKOUT = Path(__file__).resolve().parents[2] / "docs" / "grafana"


@report_errors
def grafana(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alert rules for Prometheus instead.")
    ] = False,
) -> None:
    """Print a dashboard for Grafana, or alert rules for Prometheus, of the metrics that
    `distwindow.contrib.prometheus` keeps: `distwindow grafana > dashboard.json`.
    """
    name = "rules.yml" if alerts else "distwindow.json"
    packaged = files(__package__) / "grafana_files" / name
    file = packaged if packaged.is_file() else _CHECKOUT / name
    typer.echo(file.read_text(encoding="utf-8"), nl=False)
