"""Shadow and observers on one server, on a cluster, and on Sentinel."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distwindow import Limiter
from distwindow.contrib.tasks import TaskGate, TaskLimits
from distwindow.rules.shadow import VARIABLE
from distwindow.support.async_use import result_of
from tests.observer.told import Seen, Told
from tests.rules.test_shadow import CONSISTENCIES, KINDS, run

TOPOLOGIES = ["redis", "cluster", "sentinel"]
LIMITS = ["20/hour", "30/day"]


@pytest.fixture(params=TOPOLOGIES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@KINDS
@CONSISTENCIES
def test_an_observer_is_told_what_is_decided_and_shadow_what_would_be(
    url: str, kind: Any, consistency: Any, prefix: str
) -> None:
    """Of keys on all nodes. A limit that is enforced and asks each time is the oracle of the one in
    shadow; how much is leased depends on the time.
    """
    told, told_of_shadow, seen, seen_in_shadow = Told(), Told(), Seen(), Seen()
    options: Any = {"prefix": prefix, "consistency": consistency, "timeout": 10.0}
    enforced = kind(url, LIMITS, observer=told, **options)
    shadow = kind(url, LIMITS, observer=told_of_shadow, shadow=True, **options)
    chance = random.Random(f"{kind} {consistency}")

    async def call_both() -> None:
        for _ in range(120):
            key, cost = f"key {chance.randrange(4)}", chance.choice([1, 1, 3])
            decision = await result_of(enforced.try_acquire(key, cost))
            seen.note(decision)
            in_shadow = await result_of(shadow.try_acquire(key, cost))
            assert in_shadow.allowed
            is_refused = in_shadow.reason == "shadow"
            seen_in_shadow.note(in_shadow._replace(allowed=not is_refused))
            assert is_refused == (not decision.allowed) or consistency == "leased"
        for each in (enforced, shadow):
            await result_of(each.close() if kind is Limiter else each.aclose())

    run(kind, call_both())
    assert by_result(told) == by_result(seen)
    assert by_result(told_of_shadow) == by_result(seen_in_shadow)
    assert {each.shadow for each in told.counts} == {False}
    assert {each.shadow for each in told_of_shadow.counts} == {True}
    assert {call.outcome for call in told.store_calls} == {"ok"}


def by_result(found: Any) -> dict[str, int]:
    """Return the calls by result: which of two limits has admitted one may change meanwhile."""
    results: dict[str, int] = {}
    for (_, result, _, _), calls in found.calls.items():
        results[result] = results.get(result, 0) + calls
    return results


def test_a_task_whose_keys_lie_on_several_nodes_is_counted_as_if_it_were_held(
    url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv(VARIABLE, value)
        told = Told()
        gate = TaskGate(url, prefix=prefix, observer=told, timeout=10.0)
        limits = [("{tenant}", "4/hour"), ("of all", "9/hour")]
        task = gate.add(TaskLimits("send", lambda tenant: None, limits))
        delays = [gate.delay(task, (tenant,), {}) for tenant in "aabbaaccabcd"]
        gate._limiters.close()
        found.append(by_result(told))
        assert any(delays) == (value == "0")
        assert {each.shadow for each in told.counts} == {value == "1"}
    assert found[0] == found[1]
    assert found[0] == {"allowed": 9, "refused": 3}
