"""The metrics of `PrometheusObserver`: sums of what it is told, whatever that is."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from distwindow import (
    ConfigurationError,
    Counts,
    Level,
    Limiter,
    ObserverEvent,
    StoreCall,
    StoreError,
)
from distwindow.contrib.prometheus import PrometheusObserver
from tests.away.stores import NOT_SENT, RemoteStore
from tests.clock_and_stores import ManualClock
from tests.observer import promtool
from tests.observer.batches import COUNTS, DOWN, UP, series, tell_all, total
from tests.programs import printed

D = "distwindow_"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def observer(registry: CollectorRegistry) -> PrometheusObserver:
    return PrometheusObserver(registry, key_label="tenant")


# -- what is counted ---------------------------------------------------------------------------

Number = Callable[[Counts], float]


def enforced(counts: Counts) -> bool:
    return not counts.shadow


def by_policy(counts: Counts) -> bool:
    return enforced(counts) and (counts.source, counts.reason) == ("policy", "store_down")


LIMIT = ("kind", "limiter", "limit")
COUNTED: dict[str, tuple[tuple[str, ...], Number]] = {
    "decisions_total": (
        (*LIMIT, "result", "reason", "source", "shadow", "tenant"),
        lambda c: c.calls,
    ),
    "permits_total": ((*LIMIT, "result", "tenant"), lambda c: enforced(c) * c.permits),
    "near_limit_total": ((*LIMIT, "tenant"), lambda c: enforced(c) * c.near),
    "failed_open_total": (
        ("kind", "limiter"),
        lambda c: (by_policy(c) and c.result == "allowed") * c.calls,
    ),
    "failed_closed_total": (
        ("kind", "limiter"),
        lambda c: (enforced(c) and (c.result, c.reason) == ("refused", "store_down")) * c.calls,
    ),
    "breaker_rejected_total": (
        ("breaker",),
        lambda c: (enforced(c) and (c.source_kind, c.result) == ("breaker", "refused")) * c.calls,
    ),
    "wait_seconds_count": (
        ("kind", "limiter", "result"),
        lambda c: enforced(c) * len(c.waited),
    ),
    "wait_seconds_sum": (("kind", "limiter", "result"), lambda c: enforced(c) * sum(c.waited)),
}
"""The labels of each counter, and what one `Counts` adds to it."""


def label_of(counts: Counts, name: str) -> str:
    value = {
        "kind": counts.source_kind,
        "limiter": counts.name,
        "breaker": counts.name,
        "tenant": counts.label or "",
        "shadow": str(counts.shadow).lower(),
    }.get(name)
    return getattr(counts, name) if value is None else value


@pytest.mark.parametrize("name", COUNTED)
def test_each_counter_is_the_sum_over_its_labels(
    name: str, registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    labels, number = COUNTED[name]
    expected: dict[frozenset[tuple[str, str]], float] = defaultdict(float)
    for counts in COUNTS:
        expected[frozenset((label, label_of(counts, label)) for label in labels)] += number(counts)
    half = len(COUNTS) // 2
    observer.on_counts(COUNTS[:half])
    observer.on_counts(COUNTS[half:])
    found = {of: value for (each, of), value in series(registry).items() if each == D + name}
    assert {of: value for of, value in found.items() if value} == pytest.approx(
        {of: value for of, value in expected.items() if value}
    )


@pytest.mark.parametrize("name", ["decisions_total", "permits_total", "near_limit_total"])
@pytest.mark.parametrize("limit_label", [True, False])
@pytest.mark.parametrize("key_label", [None, "tenant"])
def test_a_label_that_is_left_out_changes_no_sum(
    name: str, limit_label: bool, key_label: str | None, registry: CollectorRegistry
) -> None:
    PrometheusObserver(registry, key_label=key_label, limit_label=limit_label).on_counts(COUNTS)
    found = series(registry)
    labels = {label for (each, of) in found for label, _ in of if each == D + name}
    assert ("limit" in labels, "tenant" in labels) == (limit_label, key_label is not None)
    assert total(found, D + name) == sum(COUNTED[name][1](counts) for counts in COUNTS)


def tell_counts(observer: PrometheusObserver, kind: Any) -> None:
    observer.on_counts([Counts(kind, "one", "5/s", None, "allowed", "ok", "store", False, 1, 1, 0)])


def tell_call(observer: PrometheusObserver, kind: Any) -> None:
    observer.on_store_call(StoreCall(kind, "one", "acquire", "ok", False, (0.001,)))


@pytest.mark.parametrize(
    ("kind", "rare"),
    [
        ("limiter", {"failed_open_total": 1, "failed_closed_total": 1}),
        ("breaker", {"breaker_changes_total": 3, "breaker_rejected_total": 1}),
        ("upstream", {"upstream_pauses_total": 1}),
    ],
)
@pytest.mark.parametrize(("tell", "errors"), [(tell_counts, 0), (tell_call, 3)])
def test_what_is_rare_begins_at_0(
    kind: str,
    rare: dict[str, int],
    tell: Callable[..., None],
    errors: int,
    registry: CollectorRegistry,
    observer: PrometheusObserver,
) -> None:
    """Prometheus sees no increase in a counter whose first value is not 0."""
    tell(observer, kind)
    found = series(registry)
    for name, number in (*rare.items(), ("store_errors_total", errors)):
        assert [value for (each, _), value in found.items() if each == D + name] == [0] * number


def test_what_the_store_and_changes_are_counted_as(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    tell_all(observer)
    found = series(registry)
    for operation in ("acquire", "flush"):
        for outcome, number in {"ok": 2, "timeout": 1, "unavailable": 1, "refused": 1}.items():
            of = {"operation": operation, "outcome": outcome}
            assert total(found, D + "store_call_seconds_count", **of) == number
        for charged in ("unknown", "false", "true"):
            of = {"operation": operation, "charged": charged}
            assert total(found, D + "store_errors_total", **of) == 1
    for state, number in {"closed": 0, "half_open": 1, "open": 2}.items():
        assert total(found, D + "breaker_changes_total", breaker="bank", to=state) == number
    assert total(found, D + "upstream_pauses_total", limiter="api") == 1


def test_the_gauge_of_a_store_says_what_was_heard_last(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    def up() -> float:
        return series(registry)[D + "store_up", frozenset({("limiter", "one")})]

    ok = StoreCall("limiter", "one", "acquire", "ok", False, (0.001,))
    observer.on_store_call(ok)
    assert up() == 1
    for health, value in ((DOWN, 0), (UP, 1), (DOWN, 0)):
        observer.on_event(ObserverEvent("limiter", "one", health))
        assert up() == value
    observer.on_store_call(ok)  # was told of later than it was made
    assert up() == 0


def test_levels_are_set_and_slots_of_one_name_added(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    tell_all(observer)
    tell_all(observer)  # they are no sums of what was told
    found = series(registry)
    assert total(found, D + "slots_held", limiter="search") == 3 + 4
    task = {"task": "mails", "reason": "over_limit"}
    assert total(found, D + "tasks_waiting", **task) == 7
    assert total(found, D + "tasks_oldest_wait_seconds", **task) == 12.5
    observer.on_levels([Level("concurrency", "search", "slots_held", "10", 0)])
    assert total(series(registry), D + "slots_held", limiter="search") == 4


# -- limiters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_keys_are_no_more_series_than_one(
    keys: int, registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    with Limiter("memory://", "5/minute", observer=observer, metric_name="search") as limiter:

        def names_after(numbers: range) -> set[Any]:
            for number in numbers:
                limiter.try_acquire(f"user:{number}")
            limiter.flush()
            return set(series(registry))

        of_one = names_after(range(1))
        assert names_after(range(1, keys)) == of_one
    assert total(series(registry), D + "decisions_total", limiter="search") == keys


def test_metrics_that_raise_fail_no_call_and_are_logged_once(
    observer: PrometheusObserver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the folder of the metrics is gone")

    monkeypatch.setattr(Counter, "labels", fail)
    with Limiter("memory://", "5/minute", observer=observer) as limiter:
        for _ in range(3):
            assert limiter.try_acquire("key")
            limiter.flush()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "an observer has failed" in record.message


# -- observers and registries ------------------------------------------------------------------


def test_two_observers_of_one_registry_write_the_same_metrics(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    other = PrometheusObserver(registry, key_label="tenant")
    for each in (observer, other):
        each.on_counts(COUNTS)
    assert total(series(registry), D + "decisions_total") == 2 * sum(c.calls for c in COUNTS)


def test_other_labels_in_the_same_registry_are_refused(
    registry: CollectorRegistry, observer: PrometheusObserver
) -> None:
    with pytest.raises(ConfigurationError, match="pass that one to all limiters"):
        PrometheusObserver(registry)
    PrometheusObserver(registry, namespace="shop").on_counts(COUNTS)
    assert {name.partition("_")[0] for name, _ in series(registry)} == {"shop"}


def test_a_name_that_is_taken_is_refused_and_leaves_nothing_behind(
    registry: CollectorRegistry,
) -> None:
    taken = Counter("distwindow_wait_seconds", "Of somebody else.", registry=registry)
    with pytest.raises(ConfigurationError, match="Choose another namespace="):
        PrometheusObserver(registry)
    registry.unregister(taken)
    assert series(registry) == {}
    PrometheusObserver(registry)


@pytest.mark.parametrize(
    "options",
    [
        {"registry": "REGISTRY"},
        {"namespace": "my shop"},
        {"namespace": ""},
        {"key_label": "limit"},
        {"key_label": "le"},
        {"key_label": "__tenant"},
        {"key_label": str},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        PrometheusObserver(**{"registry": CollectorRegistry(), **options})


# -- processes ---------------------------------------------------------------------------------

FORKED = """
import os
from prometheus_client import CollectorRegistry, Counter, multiprocess
from distwindow.contrib.prometheus import PrometheusObserver
from tests.observer.batches import LEVELS, STORE_CALLS, series, total

own = Counter("own", "Of the application.")
observer = PrometheusObserver()
observer.on_store_call(STORE_CALLS[0])
observer.on_levels(LEVELS)
if (pid := os.fork()) == 0:
    own.inc()  # this alone makes all gauges of the parent in the child, too
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
for name in ("store_up", "slots_held", "tasks_waiting", "store_call_seconds_count"):
    print(name, int(total(series(registry), "distwindow_" + name)))
"""


def test_a_forked_child_says_that_the_store_is_up_and_holds_nothing(tmp_path: Path) -> None:
    said = printed("-c", FORKED, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    assert said.splitlines() == [
        "store_up 1", "slots_held 7", "tasks_waiting 7", "store_call_seconds_count 2"
    ]  # fmt: skip


EXPOSE = """
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from distwindow.contrib.prometheus import PrometheusObserver
from tests.observer.batches import tell_all

tell_all(PrometheusObserver())
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode(), end="")
"""


@pytest.fixture(params=["one process", "multiprocess mode"])
def exposed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The metrics as Prometheus reads them."""
    if request.param == "one process":
        registry = CollectorRegistry()
        tell_all(PrometheusObserver(registry))
        yield generate_latest(registry).decode()
    else:
        yield printed("-c", EXPOSE, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})


@pytest.mark.slow
def test_promtool_has_nothing_to_say_of_the_metrics(exposed: str) -> None:
    assert exposed.count("# TYPE distwindow_") >= 15
    assert promtool.said("check", "metrics", text=exposed) == ""


@pytest.mark.parametrize("answers", ["raise", "allow", "deny", "local"])
def test_each_call_without_the_store_is_in_one_counter(answers: Any) -> None:
    """In one that alerts, but for what the share of a process admits: its limit holds."""
    registry, store = CollectorRegistry(), RemoteStore(ManualClock())
    limiter = Limiter(
        store, "10/hour", on_store_error=answers, share=0.5 if answers == "local" else None,
        observer=PrometheusObserver(registry), time=store.clock,
    )  # fmt: skip
    limiter.try_acquire("key")
    store.failure = NOT_SENT
    for _ in range(20):
        with suppress(StoreError):
            limiter.try_acquire("key")
    store.failure = None
    limiter.close()
    found = series(registry)
    decisions = {
        "errors": total(found, "distwindow_decisions_total", result="error"),
        "open": total(found, "distwindow_failed_open_total"),
        "closed": total(found, "distwindow_failed_closed_total"),
        "within the share": total(
            found, "distwindow_decisions_total", result="allowed", source="local",
            reason="store_down",
        ),
    }  # fmt: skip
    expected: dict[str, dict[str, float]] = {
        "raise": {"errors": 20}, "allow": {"open": 20}, "deny": {"closed": 20},
        "local": {"within the share": 5, "closed": 15},
    }  # fmt: skip
    assert {name: count for name, count in decisions.items() if count} == expected[answers]
