"""What an observer is told: a batch with each kind of decision, and all else that there is."""

from __future__ import annotations

import itertools
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from distwindow import BreakerChange, Counts, Level, Observer, ObserverEvent, StoreCall
from distwindow.away.outages import Health
from distwindow.contrib.upstream import Pause

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The value of each series, by its name and labels."""

KINDS: tuple[Any, ...] = ("limiter", "web", "queue", "concurrency", "breaker", "upstream")
HOW: tuple[tuple[Any, str, str], ...] = (
    ("allowed", "ok", "store"),
    ("allowed", "ok", "lease"),
    ("refused", "over_limit", "store"),
    ("refused", "over_limit", "deny_cache"),
    ("allowed", "store_down", "policy"),
    ("refused", "store_down", "policy"),
    ("allowed", "store_down", "local"),
    ("refused", "store_down", "local"),
    ("allowed", "ok", "local"),
    ("error", "store_down", "policy"),
)
OF = (("search", "5/s", None), ("search", "9/h", None), ("search", "5/s", "acme"),
      ("login", "5/s", None))  # fmt: skip
"""Names, limits and labels of keys."""
COUNTS = [
    Counts(kind, name, limit, label, result, reason, source, shadow,
           calls=n, permits=3 * n, near=n % 3, waited=(0.02 * n, 0.7)[: n % 3])
    for n, (kind, (name, limit, label), (result, reason, source), shadow) in enumerate(
        itertools.product(KINDS, OF, HOW, (False, True)), start=1
    )
]  # fmt: skip
"""Each with another number of calls, so that a sum tells which of them are in it."""
OUTCOMES: tuple[tuple[Any, bool | None], ...] = (
    ("ok", False), ("timeout", None), ("unavailable", False), ("refused", True),
)  # fmt: skip
STORE_CALLS = [
    StoreCall(
        "limiter",
        "search",
        operation,
        outcome,
        charged,
        (0.003, 0.2) if outcome == "ok" else (0.003,),
    )
    for operation in ("acquire", "flush")
    for outcome, charged in OUTCOMES
]
DOWN, UP = (Health(up, 1.0, None if up else "it is stopped", 0, 0, ()) for up in (False, True))
EVENTS = [
    ObserverEvent("limiter", "search", DOWN),
    ObserverEvent("breaker", "bank", BreakerChange("bank", "closed", "open", 1)),
    ObserverEvent("breaker", "bank", BreakerChange("bank", "open", "half_open", 2)),
    ObserverEvent("breaker", "bank", BreakerChange("bank", "half_open", "open", 3)),
    ObserverEvent("upstream", "api", Pause("api.example.com", 3.0, 2.0)),
]
LEVELS = [
    Level("concurrency", "search", "slots_held", "10", 3),
    Level("concurrency", "search", "slots_held", "20", 4),
    Level("queue", "mails", "tasks_waiting", "over_limit", 7),
    Level("queue", "mails", "oldest_wait_s", "over_limit", 12.5),
]


def tell_all(observer: Observer) -> None:
    """Tell `observer` of all that is here."""
    observer.on_counts(COUNTS)
    for call in STORE_CALLS:
        observer.on_store_call(call)
    for event in EVENTS:
        observer.on_event(event)
    observer.on_levels(LEVELS)


def series(registry: CollectorRegistry) -> Series:
    """Return what is in a registry, without the times at which series were made."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def read(text: str) -> Series:
    """Return what a scrape has."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Series, name: str, **labels: str) -> float:
    """Return the sum of the series of `name` that have these labels."""
    return sum(
        value for (each, of), value in found.items() if each == name and labels.items() <= of
    )
