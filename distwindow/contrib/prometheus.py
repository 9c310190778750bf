"""Metrics for Prometheus: `Limiter(..., observer=PrometheusObserver())`.

They are `Counter`, `Gauge` and `Histogram` objects of prometheus_client, so they are right in its
multiprocess mode, too: the file of a process that was killed keeps what it has counted, and gauges
are those of the processes that live. docs/howto/prometheus.md has a table of them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from .. import BreakerChange, ConfigurationError, Counts, Level, Observer, ObserverEvent, StoreCall
from ..away.outages import Health
from ..errors import short_repr
from ..support.fork import register_after_fork
from . import needs
from .exporters import CHARGED, STORE_CALL_BUCKETS_S, WAIT_BUCKETS_S, WRITING
from .upstream import Pause

with needs("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["PrometheusObserver"]

BREAKER_STATES = ("closed", "open", "half_open")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class PrometheusObserver(Observer):
    """Keeps the metrics of all objects that it is given to, in `registry`.

    `namespace` begins each name. `key_label="tenant"` adds a label of that name to the counters of
    decisions, permits and calls near the limit: its value is what the `key_label` function of the
    limiter makes of the key. Keys themselves are never a label. `limit_label=False` leaves the
    label `limit` out, where limits are made as the program runs.

    A second observer of the same registry and namespace writes the same metrics. Raises
    `ConfigurationError` if it asks for other labels, if something else in the registry has one of
    the names, and for a name that Prometheus does not take.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        namespace: str = "distwindow",
        key_label: str | None = None,
        limit_label: bool = True,
    ) -> None:
        if not isinstance(registry, CollectorRegistry):
            raise ConfigurationError(
                f"registry={short_repr(registry)} is no prometheus_client.CollectorRegistry"
            )
        check_name("namespace", namespace)
        if key_label is not None:
            check_name("key_label", key_label)
            if key_label in (*_DECISION_LABELS, "le") or key_label.startswith("__"):
                raise ConfigurationError(
                    f"key_label={key_label!r} is a label already: choose another name"
                )
        layout = _Layout(namespace, key_label, bool(limit_label))
        self._layout = layout
        self._metrics = _metrics_in(registry, layout)

    def on_counts(self, batch: Sequence[Counts]) -> None:
        """Count decisions, and how long calls have waited for them."""
        metrics = self._metrics
        with WRITING:
            for counts in batch:
                metrics.begin_at_0(counts.source_kind, counts.name)
                self._count(counts)

    def _count(self, counts: Counts) -> None:
        metrics, has_label = self._metrics, self._layout.key_label is not None
        of = (counts.source_kind, counts.name)
        limit = (counts.limit,) if self._layout.limit_label else ()
        label = (counts.label or "",) if has_label else ()
        if counts.calls > 0:
            shadow = "true" if counts.shadow else "false"
            how = (counts.result, counts.reason, counts.source, shadow)
            metrics.decisions.labels(*of, *limit, *how, *label).inc(counts.calls)
        if counts.shadow:
            return  # all others are of what was enforced
        if counts.permits > 0:
            metrics.permits.labels(*of, *limit, counts.result, *label).inc(counts.permits)
        if counts.near > 0:
            metrics.near_limit.labels(*of, *limit, *label).inc(counts.near)
        if counts.calls > 0 and counts.reason == "store_down":
            if counts.result == "allowed" and counts.source == "policy":
                metrics.failed_open.labels(*of).inc(counts.calls)
            elif counts.result == "refused":
                metrics.failed_closed.labels(*of).inc(counts.calls)
        if counts.calls > 0 and counts.source_kind == "breaker" and counts.result == "refused":
            metrics.breaker_rejected.labels(counts.name).inc(counts.calls)
        for seconds in counts.waited:
            metrics.wait.labels(*of, counts.result).observe(seconds)

    def on_store_call(self, call: StoreCall) -> None:
        """Count exchanges with a store, and how long each took."""
        metrics = self._metrics
        with WRITING:
            metrics.begin_at_0(call.source_kind, call.name)
            metrics.begin_errors_at_0(call.operation)
            for seconds in call.seconds:
                metrics.store_call.labels(call.operation, call.outcome).observe(seconds)
            if call.outcome == "ok":
                if call.name not in metrics.stores_up:
                    metrics.set_up(call.name, True)
            else:
                of_charged = metrics.store_errors.labels(call.operation, CHARGED[call.charged])
                of_charged.inc(len(call.seconds))

    def on_event(self, event: ObserverEvent) -> None:
        """Take in that a store is away or back, a breaker has changed, or an upstream pauses."""
        metrics, change = self._metrics, event.change
        with WRITING:
            if isinstance(change, Health):
                metrics.set_up(event.name, change.up)
            elif isinstance(change, BreakerChange):
                metrics.begin_at_0("breaker", event.name)
                metrics.breaker_changes.labels(event.name, change.state).inc()
            elif isinstance(change, Pause):
                metrics.upstream_pauses.labels(event.name).inc()

    def on_levels(self, batch: Sequence[Level]) -> None:
        """Set the gauges of slots and of tasks that wait."""
        with WRITING:
            for level in batch:
                self._metrics.set_level(level)


class _Layout(NamedTuple):
    """What decides the names and labels of all metrics."""

    namespace: str
    key_label: str | None
    limit_label: bool


_DECISION_LABELS = ("kind", "limiter", "limit", "result", "reason", "source", "shadow")


class _Metrics:
    """The metrics in one registry under one namespace."""

    def __init__(self, registry: CollectorRegistry, layout: _Layout) -> None:
        self.layout = layout
        self._made: list[Any] = []
        key = () if layout.key_label is None else (layout.key_label,)
        of = ("kind", "limiter")
        limit = ("limit",) if layout.limit_label else ()

        def make(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            metric = kind(f"{layout.namespace}_{name}", text, labels, registry=registry, **options)
            self._made.append(metric)
            return metric

        counter, gauge = partial(make, Counter), partial(make, Gauge)
        try:
            self.decisions: Counter = counter(
                "decisions_total", "Calls that were decided, or that raised (error).",
                *of, *limit, "result", "reason", "source", "shadow", *key,
            )  # fmt: skip
            self.permits: Counter = counter(
                "permits_total", "Permits that calls have asked for.", *of, *limit, "result", *key
            )
            self.near_limit: Counter = counter(
                "near_limit_total",
                "Admitted calls that left less than a fifth of the limit, where that is known.",
                *of, *limit, *key,
            )  # fmt: skip
            self.store_call: Histogram = make(
                Histogram, "store_call_seconds", "Seconds of one exchange with the store.",
                "operation", "outcome", buckets=STORE_CALL_BUCKETS_S,
            )  # fmt: skip
            self.store_errors: Counter = counter(
                "store_errors_total",
                "Exchanges with the store that failed, and whether they were counted in it.",
                "operation", "charged",
            )  # fmt: skip
            self.store_up: Gauge = gauge(
                "store_up", "1 while the store answers, 0 while it is away.", "limiter",
                multiprocess_mode="livemin",
            )  # fmt: skip
            self.failed_open: Counter = counter(
                "failed_open_total", "Calls admitted because the store was away.", *of
            )
            self.failed_closed: Counter = counter(
                "failed_closed_total", "Calls refused because the store was away.", *of
            )
            self.wait: Histogram = make(
                Histogram, "wait_seconds", "Seconds that calls have waited to be admitted.",
                *of, "result", buckets=WAIT_BUCKETS_S,
            )  # fmt: skip
            self.breaker_changes: Counter = counter(
                "breaker_changes_total",
                "Changes of state that each process has seen of a breaker.", "breaker", "to",
            )  # fmt: skip
            self.breaker_rejected: Counter = counter(
                "breaker_rejected_total", "Calls that a breaker has refused.", "breaker"
            )
            self.slots_held: Gauge = gauge(
                "slots_held", "Slots of a concurrency limit that are held now.", "limiter",
                multiprocess_mode="livesum",
            )  # fmt: skip
            self.tasks_waiting: Gauge = gauge(
                "tasks_waiting", "Tasks that workers hold back now.", "task", "reason",
                multiprocess_mode="livesum",
            )  # fmt: skip
            self.tasks_oldest_wait: Gauge = gauge(
                "tasks_oldest_wait_seconds",
                "For how long the oldest task that is held back has waited.", "task", "reason",
                multiprocess_mode="livemax",
            )  # fmt: skip
            self.upstream_pauses: Counter = counter(
                "upstream_pauses_total",
                "Pauses that an upstream has asked for, as each process has seen them.", "limiter",
            )  # fmt: skip
        except ValueError as exc:
            for metric in self._made:
                registry.unregister(metric)
            raise ConfigurationError(
                f"the registry has a metric that is named as one of the observer: {exc}. Choose "
                f"another namespace=, or another registry"
            ) from exc
        self.stores_up: set[str] = set()
        """The limiters that have a series of `store_up`."""
        self._begun: set[tuple[str, str]] = set()
        self._levels: dict[Any, dict[str, float]] = {}
        """By the gauge: what each limit of it holds."""
        register_after_fork(self)

    def after_fork(self) -> None:
        """Begin anew: nothing is held, and no store is known to be away. In multiprocess mode all
        gauges of a child begin at 0, which would say that each store is away.
        """
        with WRITING:
            for name in self.stores_up:
                self.store_up.labels(name).set(1)
            for gauge, parts in self._levels.items():
                gauge.set(0)
                parts.clear()

    def begin_at_0(self, kind: str, name: str) -> None:
        """Have the counters of what is rare at 0, from the first call on: Prometheus sees no
        increase in a counter that appears with another value.
        """
        if (kind, name) in self._begun:
            return
        self._begun.add((kind, name))
        if kind == "breaker":
            self.breaker_rejected.labels(name)
            for state in BREAKER_STATES:
                self.breaker_changes.labels(name, state)
        else:
            self.failed_open.labels(kind, name)
            self.failed_closed.labels(kind, name)
        if kind == "upstream":
            self.upstream_pauses.labels(name)

    def begin_errors_at_0(self, operation: str) -> None:
        for charged in CHARGED.values():
            self.store_errors.labels(operation, charged)

    def set_up(self, name: str, up: bool) -> None:
        self.stores_up.add(name)
        self.store_up.labels(name).set(1 if up else 0)

    def set_level(self, level: Level) -> None:
        """Set a gauge. The slots of several limits of one name are added."""
        if level.what == "slots_held":
            gauge, part = self.slots_held.labels(level.name), level.limit
        else:
            metric = self.tasks_waiting if level.what == "tasks_waiting" else self.tasks_oldest_wait
            gauge, part = metric.labels(level.name, level.limit), ""
        parts = self._levels.setdefault(gauge, {})
        parts[part] = level.value
        gauge.set(sum(parts.values()))


_known: weakref.WeakKeyDictionary[CollectorRegistry, dict[str, _Metrics]] = (
    weakref.WeakKeyDictionary()
)


def _metrics_in(registry: CollectorRegistry, layout: _Layout) -> _Metrics:
    """Return the metrics in `registry`, made with the first observer of it."""
    with WRITING:
        of_registry = _known.setdefault(registry, {})
        metrics = of_registry.get(layout.namespace)
        if metrics is None:
            metrics = of_registry[layout.namespace] = _Metrics(registry, layout)
    if metrics.layout != layout:
        there = metrics.layout
        raise ConfigurationError(
            f"another PrometheusObserver has these metrics in the registry, with "
            f"key_label={there.key_label!r} and limit_label={there.limit_label}: pass that one to "
            f"all limiters, or choose another namespace="
        )
    return metrics


def check_name(option: str, value: Any) -> None:
    """Raise `ConfigurationError` for what is no name of a metric or a label."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigurationError(
            f"{option}={short_repr(value)} is no name for Prometheus: letters, digits and _, "
            f'such as "tenant"'
        )
