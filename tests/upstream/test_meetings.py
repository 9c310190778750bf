"""What calls that go out meet: each consistency, on each kind of store, and each policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from distwindow import Key, Limiter
from distwindow.away.policy import Answer as Policy
from distwindow.contrib.upstream import openai
from distwindow.runtime.options import Consistency
from distwindow.stores.memory import MemoryStore
from tests.servers import free_port

from .clients import AIOHTTP, HTTPX2, Answer, Client, limits_of

STORES = ("memory", "redis", "cluster", "sentinel")
# What the fleet knows is not the client's; one that blocks, and one that is awaited.
both_kinds = pytest.mark.parametrize("kind", [HTTPX2, AIOHTTP], ids=lambda kind: kind.__name__)
every_consistency = pytest.mark.parametrize("consistency", get_args(Consistency))


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        return MemoryStore()
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def processes(store: Any, prefix: str) -> Iterator[Any]:
    """Return what makes objects of one fleet, which are closed at the end."""
    made: list[Client] = []

    def make(kind: type[Client], upstream: Any, **options: Any) -> Client:
        made.append(kind(upstream, limits_of(kind, store, prefix=prefix, timeout=5, **options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def served(*processes: Client) -> int:
    """Return how many calls are served until each process has one that is not sent."""
    count, waiting = 0, list(processes)
    while waiting:
        for process in waiting[:]:
            try:
                count += process.call() == 200
            except process.limited:
                waiting.remove(process)
    return count


@both_kinds
@every_consistency
def test_a_fleet_has_one_window(
    kind: type[Client], consistency: Consistency, processes: Any
) -> None:
    fleet = [
        processes(kind, lambda url: Answer(), limits="20/hour", max_wait=0, consistency=consistency)
        for _ in range(2)
    ]
    if consistency == "eventual":
        assert served(*fleet) >= 20
    else:
        assert served(*fleet) == 20


@both_kinds
@every_consistency
def test_a_pause_is_the_fleets(
    kind: type[Client], consistency: Consistency, processes: Any
) -> None:
    """Of one that has the pause from the response, and of one that asks for it."""
    answers = [Answer(), Answer(), Answer(429, {"Retry-After": "60"})]
    options = {"limits": "20/hour", "max_wait": 0, "consistency": consistency}
    one, other = (processes(kind, lambda url: answers.pop(0), **options) for _ in range(2))
    assert [one.call(), other.call(), one.call()] == [200, 200, 429]
    third = processes(kind, lambda url: Answer(), **options)
    for process in (one, third):
        with pytest.raises(process.limited) as caught:
            process.call()
        assert caught.value.is_paused
        assert 0 < caught.value.retry_after <= 66


@both_kinds
@every_consistency
def test_requests_and_tokens_are_admitted_together(
    kind: type[Client], consistency: Consistency, processes: Any, store: Any, prefix: str
) -> None:
    """Also in a cluster, where both keys have to be in one slot, and in each consistency by the
    store. A call that is refused for its tokens takes no request.
    """
    preset = openai(requests="20/hour", tokens="100/hour", estimate=lambda body: 40)
    fleet = [
        processes(kind, lambda url: Answer(), limits=preset, max_wait=0, consistency=consistency)
        for _ in range(2)
    ]
    for process in fleet:
        assert process.call() == 200
    for process in fleet:
        with pytest.raises(process.limited):
            process.call()
        process.close()
    tokens = Key("tokens", tag="api.example:")
    for key, limit, count in (("api.example:", "20/hour", 2), (tokens, "100/hour", 80)):
        with Limiter(store, limit, prefix=prefix, timeout=5) as limiter:
            assert limiter.stats(key).passed == count


@pytest.mark.parametrize("limits", [None, "5/minute"])
@pytest.mark.parametrize("consistency", get_args(Consistency))
@pytest.mark.parametrize("policy", [*get_args(Policy), lambda *call: True, lambda *call: False])
@both_kinds
def test_each_policy_answers_for_a_store_that_is_away(
    kind: type[Client], policy: Any, consistency: Consistency, limits: str | None
) -> None:
    """With a window of its own `eventual` needs no answer, but the pause does."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    process = kind(
        lambda url: Answer(),
        limits_of(kind, url, limits, on_store_error=policy, consistency=consistency, max_wait=0,
                  timeout=0.5),
    )  # fmt: skip
    try:
        if policy == "raise":
            with pytest.raises(process.store_error) as caught:
                process.call()
            assert isinstance(caught.value, process.library_error)
        elif policy == "deny" or (
            limits and callable(policy) and not policy() and consistency != "eventual"
        ):
            with pytest.raises(process.limited, match="not sent"):
                process.call()
        else:
            assert process.call() == 200
    finally:
        process.close()
