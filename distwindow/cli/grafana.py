"""`distwindow grafana`: a dashboard of the metrics of `PrometheusObserver`, which
docs/make/grafana.py makes, and alert rules for Prometheus.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from .command import report_errors

DASHBOARD = files(__package__).joinpath("dashboard.json")
ALERT_RULES = files(__package__).joinpath("alert_rules.yml")


@report_errors
def grafana(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alert rules for Prometheus instead.")
    ] = False,
) -> None:
    """Print a dashboard for Grafana, or alert rules for Prometheus, of the metrics that
    `distwindow.contrib.prometheus` keeps: `distwindow grafana > dashboard.json`.
    """
    typer.echo((ALERT_RULES if alerts else DASHBOARD).read_text(encoding="utf-8"), nl=False)
