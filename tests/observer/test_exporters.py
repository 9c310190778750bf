"""What holds for each exporter of metrics."""

from __future__ import annotations

import pytest

from tests.programs import printed

FORKS = """
import os, signal, threading
from tests.observer.batches import STORE_CALLS

def write():
    while True:
        observer.on_store_call(STORE_CALLS[0])

threading.Thread(target=write, daemon=True).start()
for _ in range(60):
    if (pid := os.fork()) == 0:
        signal.alarm(20)  # which ends a child that hangs
        observer.on_store_call(STORE_CALLS[0])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
os._exit(0)
"""
MADE = {
    "prometheus": """
from distwindow.contrib.prometheus import PrometheusObserver

observer = PrometheusObserver()
""",
    "opentelemetry": """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from distwindow.contrib.opentelemetry import OpenTelemetryObserver

observer = OpenTelemetryObserver(MeterProvider([InMemoryMetricReader()]))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("exporter", MADE)
def test_a_process_that_forks_while_metrics_are_written_has_children_that_can_write(
    exporter: str,
) -> None:
    printed("-W", "ignore", "-c", MADE[exporter] + FORKS)
