"""Metrics for OpenTelemetry: `Limiter(..., observer=OpenTelemetryObserver())`; and what the span of
a request is told of its limit: `note_decision(decision)`.

Names have the form of `aspnetcore.rate_limiting.*`, which OpenTelemetry's conventions have:
`distwindow.policy` is the name of the limiter, as `aspnetcore.rate_limiting.policy` is there.

    distwindow.decisions             {decision}   counter
    distwindow.permits               {permit}     counter
    distwindow.near_limit            {decision}   counter
    distwindow.store.call.duration   s            histogram
    distwindow.store.errors          {error}      counter
    distwindow.wait.duration         s            histogram
    distwindow.breaker.changes       {change}     counter
    distwindow.upstream.pauses       {pause}      counter
    distwindow.slots.held            {slot}       up-down counter
    distwindow.queued                {task}       up-down counter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import (
    BreakerChange,
    Counts,
    Decision,
    Level,
    Observer,
    ObserverEvent,
    StoreCall,
    __version__,
)
from ..runtime.shutdown import SHUTDOWN
from . import needs
from .exporters import CHARGED, STORE_CALL_BUCKETS_S, WAIT_BUCKETS_S, WRITING
from .upstream import Pause

with needs("otel", "opentelemetry"):
    from opentelemetry import metrics, trace

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span

__all__ = ["OpenTelemetryObserver", "note_decision"]

Attributes = dict[str, str | bool]


class OpenTelemetryObserver(Observer):
    """Writes what all objects tell that it is given to, as metrics of `meter_provider`, by default
    the global one. It makes no spans. A process that is forked needs a provider of its own, and so
    an observer of its own: OpenTelemetry exports what the parent had counted from each child.
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        # Limiters may be made earlier than the provider, which takes nothing after its own end.
        SHUTDOWN.flush_before_others()
        meter = metrics.get_meter("distwindow", __version__, meter_provider)
        self._decisions = meter.create_counter(
            "distwindow.decisions", "{decision}", "Calls that were decided, or that raised (error)."
        )
        self._permits = meter.create_counter(
            "distwindow.permits", "{permit}", "Permits that calls have asked for."
        )
        self._near_limit = meter.create_counter(
            "distwindow.near_limit", "{decision}",
            "Admitted calls that left less than a fifth of the limit, where that is known.",
        )  # fmt: skip
        self._store_call = meter.create_histogram(
            "distwindow.store.call.duration", "s", "How long one exchange with the store took.",
            explicit_bucket_boundaries_advisory=STORE_CALL_BUCKETS_S,
        )  # fmt: skip
        self._store_errors = meter.create_counter(
            "distwindow.store.errors", "{error}", "Exchanges with the store that failed."
        )
        self._wait = meter.create_histogram(
            "distwindow.wait.duration", "s", "How long calls have waited to be admitted.",
            explicit_bucket_boundaries_advisory=WAIT_BUCKETS_S,
        )  # fmt: skip
        self._breaker_changes = meter.create_counter(
            "distwindow.breaker.changes", "{change}",
            "Changes of state that each process has seen of a breaker.",
        )  # fmt: skip
        self._upstream_pauses = meter.create_counter(
            "distwindow.upstream.pauses", "{pause}",
            "Pauses that an upstream has asked for, as each process has seen them.",
        )  # fmt: skip
        self._slots = meter.create_up_down_counter(
            "distwindow.slots.held", "{slot}", "Slots of a concurrency limit that are held now."
        )
        self._queued = meter.create_up_down_counter(
            "distwindow.queued", "{task}", "Tasks that workers hold back now."
        )
        self._levels: dict[tuple[str, ...], float] = {}

    def on_counts(self, batch: Sequence[Counts]) -> None:
        """Count decisions, and how long calls have waited for them."""
        with WRITING:
            for counts in batch:
                self._count(counts)

    def _count(self, counts: Counts) -> None:
        policy: Attributes = {
            "distwindow.kind": counts.source_kind, "distwindow.policy": counts.name
        }  # fmt: skip
        limit: Attributes = {**policy, "distwindow.limit": counts.limit}
        if counts.label is not None:
            limit["distwindow.label"] = counts.label
        result: Attributes = {"distwindow.result": counts.result}
        if counts.calls > 0:
            how: Attributes = {
                **limit, **result, "distwindow.reason": counts.reason,
                "distwindow.source": counts.source, "distwindow.shadow": counts.shadow,
            }  # fmt: skip
            if counts.result == "error":
                how["error.type"] = counts.reason
            self._decisions.add(counts.calls, how)
        if counts.shadow:
            return  # all others are of what was enforced
        if counts.permits > 0:
            self._permits.add(counts.permits, {**limit, **result})
        if counts.near > 0:
            self._near_limit.add(counts.near, limit)
        for seconds in counts.waited:
            self._wait.record(seconds, {**policy, **result})

    def on_store_call(self, call: StoreCall) -> None:
        """Record exchanges with a store, and how long each took."""
        with WRITING:
            how: Attributes = {"distwindow.operation": call.operation}
            if call.outcome != "ok":
                how["error.type"] = call.outcome
                charged = {"distwindow.charged": CHARGED[call.charged]}
                self._store_errors.add(len(call.seconds), {**how, **charged})
            for seconds in call.seconds:
                self._store_call.record(seconds, how)

    def on_event(self, event: ObserverEvent) -> None:
        """Count that a breaker has changed, or that an upstream pauses."""
        with WRITING:
            if isinstance(event.change, BreakerChange):
                state = {"distwindow.policy": event.name, "distwindow.state": event.change.state}
                self._breaker_changes.add(1, state)
            elif isinstance(event.change, Pause):
                self._upstream_pauses.add(1, {"distwindow.policy": event.name})

    def on_request(self, decision: Decision, name: str) -> None:
        """Note on the span of a request that it was refused, or admitted without the store."""
        note_decision(decision, name)

    def on_levels(self, batch: Sequence[Level]) -> None:
        """Add what slots and tasks that wait have become more or fewer by."""
        with WRITING:
            for level in batch:
                if level.what == "slots_held":
                    counter, what = self._slots, {"distwindow.limit": level.limit}
                elif level.what == "tasks_waiting":
                    counter, what = self._queued, {"distwindow.reason": level.limit}
                else:
                    continue
                name = level[1:4]
                change = level.value - self._levels.get(name, 0)
                self._levels[name] = level.value
                counter.add(change, {"distwindow.policy": level.name, **what})


def note_decision(decision: Decision, name: str = "", *, span: Span | None = None) -> None:
    """Note what was decided of a request on `span`, by default the current one: as attributes
    `rate_limit.decision` ("allowed" or "refused"), `rate_limit.rejected_by` (`name`, or else the
    limit that refused) and `rate_limit.fail_open` (whether it was admitted because the store was
    away); a refusal also as the event `rate_limit.refused` with `limit`, `reason` and `retry_after`
    (seconds). The key is not noted. Does nothing without a span that is recorded.
    """
    span = trace.get_current_span() if span is None else span
    if not span.is_recording():
        return
    allowed, limit = decision.allowed, str(decision.limit)
    span.set_attribute("rate_limit.decision", "allowed" if allowed else "refused")
    span.set_attribute("rate_limit.fail_open", allowed and decision.reason == "store_down")
    if not allowed:
        span.set_attribute("rate_limit.rejected_by", name or limit)
        span.add_event(
            "rate_limit.refused",
            {"limit": limit, "reason": decision.reason, "retry_after": decision.retry_after},
        )
