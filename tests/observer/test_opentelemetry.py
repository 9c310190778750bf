"""`OpenTelemetryObserver` has the numbers of `PrometheusObserver`; a span knows who was refused."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from distwindow import Decision, Level, Limiter
from distwindow.contrib import asgi
from distwindow.contrib.opentelemetry import OpenTelemetryObserver, note_decision
from distwindow.contrib.prometheus import PrometheusObserver
from distwindow.testing import ManualClock
from tests.observer.batches import Series, series, tell_all, total
from tests.programs import printed
from tests.web.test_asgi import call, http_scope

UNITS = {
    "distwindow.decisions": "{decision}",
    "distwindow.permits": "{permit}",
    "distwindow.near_limit": "{decision}",
    "distwindow.store.call.duration": "s",
    "distwindow.store.errors": "{error}",
    "distwindow.wait.duration": "s",
    "distwindow.breaker.changes": "{change}",
    "distwindow.upstream.pauses": "{pause}",
    "distwindow.slots.held": "{slot}",
    "distwindow.queued": "{task}",
}

SAME = {
    "decisions_total": "distwindow.decisions",
    "permits_total": "distwindow.permits",
    "near_limit_total": "distwindow.near_limit",
    "store_errors_total": "distwindow.store.errors",
    "store_call_seconds_count": "distwindow.store.call.duration_count",
    "store_call_seconds_sum": "distwindow.store.call.duration_sum",
    "wait_seconds_count": "distwindow.wait.duration_count",
    "wait_seconds_sum": "distwindow.wait.duration_sum",
    "breaker_changes_total": "distwindow.breaker.changes",
    "upstream_pauses_total": "distwindow.upstream.pauses",
    "slots_held": "distwindow.slots.held",
    "tasks_waiting": "distwindow.queued",
}
"""What has the same numbers: the metrics of Prometheus, and ours."""
ATTRIBUTES = {
    "limiter": "policy", "breaker": "policy", "task": "policy", "tenant": "label", "to": "state"
}  # fmt: skip
"""The attribute of each label, where it has another name."""
OURS_ALONE = {
    "distwindow.slots.held": "distwindow.limit",
    "distwindow.decisions": "error.type",
    "distwindow.store.errors": "error.type",
}
"""What has an attribute that is no label of Prometheus."""


def attribute(label: str, text: str) -> tuple[str, str]:
    if label == "outcome":
        return "error.type", text.removeprefix("ok")
    return f"distwindow.{ATTRIBUTES.get(label, label)}", text


def expected(found: Series) -> Series:
    """Return what Prometheus has, in the words of OpenTelemetry; a label may be empty."""
    return {
        (SAME[name], frozenset(one for label in labels if (one := attribute(*label))[1])): value
        for (full_name, labels), value in found.items()
        if (name := full_name.removeprefix("distwindow_")) in SAME and value
    }


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def observer(reader: InMemoryMetricReader) -> Iterator[OpenTelemetryObserver]:
    provider = MeterProvider([reader])
    yield OpenTelemetryObserver(provider)
    provider.shutdown()


def metrics_of(reader: InMemoryMetricReader) -> list[Any]:
    data: Any = reader.get_metrics_data()
    return [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]


def exported(reader: InMemoryMetricReader) -> Series:
    """Return what was exported, with texts as the values of attributes."""
    found: Series = {}
    for metric in metrics_of(reader):
        for point in metric.data.data_points:
            of = frozenset((k, str(v).lower()) for k, v in point.attributes.items())
            if hasattr(point, "value"):
                found[metric.name, of] = point.value
            else:
                found[f"{metric.name}_count", of] = point.count
                found[f"{metric.name}_sum", of] = point.sum
    return found


def test_the_numbers_are_those_of_prometheus(
    reader: InMemoryMetricReader, observer: OpenTelemetryObserver
) -> None:
    registry = CollectorRegistry()
    for each in (observer, PrometheusObserver(registry, key_label="tenant")):
        tell_all(each)
    ours: Series = defaultdict(float)
    for (name, attributes), value in exported(reader).items():
        alone = OURS_ALONE.get(name)
        ours[name, frozenset(one for one in attributes if one[0] != alone)] += value
    theirs = expected(series(registry))
    assert {name for name, _ in theirs} == set(SAME.values())
    assert ours == pytest.approx(theirs)


def test_names_and_units(reader: InMemoryMetricReader, observer: OpenTelemetryObserver) -> None:
    tell_all(observer)
    assert {metric.name: metric.unit for metric in metrics_of(reader)} == UNITS


def test_levels_go_up_and_down(
    reader: InMemoryMetricReader, observer: OpenTelemetryObserver
) -> None:
    for held in (3, 5, 5, 0, 2):
        observer.on_levels([Level("concurrency", "export", "slots_held", "10", held)])
        assert total(exported(reader), "distwindow.slots.held") == held


# -- spans -------------------------------------------------------------------------------------


def decisions() -> dict[str, Decision]:
    with Limiter("memory://", "1/minute", time=ManualClock()) as limiter:
        allowed, refused = limiter.try_acquire("user:42"), limiter.try_acquire("user:42")
    return {
        "allowed": allowed,
        "refused": refused,
        "failed open": allowed._replace(reason="store_down", source="policy"),
        "failed closed": refused._replace(reason="store_down", source="policy"),
    }


def span_of(decision: Decision, name: str = "") -> ReadableSpan:
    """Return the span of a request of which `decision` was noted."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("server").start_as_current_span("GET /search"):
        note_decision(decision, name)
    provider.shutdown()
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("name", ["", "login"])
@pytest.mark.parametrize("kind", decisions())
def test_the_span_of_a_request_says_what_was_decided(kind: str, name: str) -> None:
    decision = decisions()[kind]
    span = span_of(decision, name)
    expected: dict[str, Any] = {
        "rate_limit.decision": "allowed" if decision.allowed else "refused",
        "rate_limit.fail_open": kind == "failed open",
    }
    events = []
    if not decision.allowed:
        expected["rate_limit.rejected_by"] = name or "1/minute"
        events = [("rate_limit.refused",
                   {"limit": "1/minute", "reason": decision.reason,
                    "retry_after": decision.retry_after})]  # fmt: skip
    assert dict(span.attributes or {}) == expected
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == events
    assert "user:42" not in span.to_json()


def test_nothing_happens_without_a_span() -> None:
    note_decision(decisions()["refused"])


def test_the_span_of_a_refused_request_has_the_event() -> None:
    """As an instrumentation makes one around the application. Others have nothing of ours."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        rate_limits = asgi.RateLimits(
            "memory://", on_store_error="deny", observer=OpenTelemetryObserver(MeterProvider())
        )
        limited = asgi.RateLimitMiddleware(app, rate_limits, "2/minute", name="search")
        for _ in range(3):
            with provider.get_tracer("server").start_as_current_span("GET /"):
                await call(limited, http_scope())
        await rate_limits.aclose()

    asyncio.run(ask())
    spans = exporter.get_finished_spans()
    assert [len(span.events) for span in spans] == [0, 0, 1]
    assert (spans[2].attributes or {})["rate_limit.rejected_by"] == "search"
    assert [span.attributes for span in spans[:2]] == [{}, {}]


ENDS = """
from distwindow import Limiter
from distwindow.contrib.opentelemetry import OpenTelemetryObserver

with_limiter = Limiter("memory://", "5/minute")
with_limiter.try_acquire("key")  # the hook of the process is there before the provider

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter, MetricExportResult, PeriodicExportingMetricReader,
)

class Printed(MetricExporter):
    def export(self, data, timeout_millis=0, **options):
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            if metric.name == "distwindow.decisions":
                print(sum(point.value for point in metric.data.data_points))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=0): return True
    def shutdown(self, timeout_millis=0, **options): ...

reader = PeriodicExportingMetricReader(Printed(), export_interval_millis=600_000)
observer = OpenTelemetryObserver(MeterProvider([reader]))
limiter = Limiter("memory://", "5/minute", observer=observer)
for _ in range(7):
    limiter.try_acquire("key")
"""


@pytest.mark.slow
def test_the_last_calls_of_a_process_are_exported() -> None:
    assert printed("-W", "ignore", "-c", ENDS).split() == ["7"]
