"""`on_store_error` and `on_unknown`: every call has the answer of the policy."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distwindow import (
    ConfigurationError,
    Limiter,
    RateLimitExceeded,
    StoreError,
    StoreUnavailable,
)
from distwindow.ring.command import Command
from tests.away.stores import NOT_SENT, UNKNOWN, RemoteStore, limiter_on
from tests.clock_and_stores import ManualClock


def ways_to_ask(limiter: Limiter) -> list[Callable[[], Any]]:
    return [
        lambda: limiter.try_acquire("a"),
        lambda: limiter.try_acquire("b", priority=True),
        lambda: limiter.try_acquire("c", enqueue=True),
        lambda: limiter.try_acquire_all([("d", "10/minute", 1), ("e", "5/minute", 1)]),
        lambda: limiter.peek("f"),
        lambda: limiter.acquire("g", timeout=0),
        lambda: limiter.entry("h").__enter__().decision,
    ]


@pytest.mark.parametrize("consistency", ["direct", "leased"])
@pytest.mark.parametrize("failure", [NOT_SENT, UNKNOWN], ids=["not-sent", "unknown"])
@pytest.mark.parametrize("on_error", ["raise", "allow", "deny", "local"])
@pytest.mark.parametrize("on_unknown", [None, "raise", "allow", "deny", "local"])
def test_each_way_to_ask_has_the_answer_of_the_policy(
    on_error: str, on_unknown: str | None, failure: StoreError, consistency: str
) -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(
        store, on_store_error=on_error, on_unknown=on_unknown, share=_share(on_error, on_unknown),
        consistency=consistency,
    )  # fmt: skip
    policy = on_error if failure.charged is False or on_unknown is None else on_unknown
    store.failure = failure
    for ask in ways_to_ask(limiter):
        if policy == "raise":
            with pytest.raises(StoreError) as raised:
                ask()
            assert raised.value is failure
        elif policy == "deny":
            try:
                decision = ask()
            except RateLimitExceeded as exc:
                decision = exc.decision
            assert (decision.allowed, decision.source) == (False, "policy")
            assert decision.reason == "store_down"
            assert decision.retry_after > 0
        else:
            decision = ask()
            assert (decision.allowed, decision.reason) == (True, "store_down")
            assert decision.source == ("local" if policy == "local" else "policy")
    # What changes or reads the windows has no answer but the store's.
    for call in (lambda: limiter.stats("a"), lambda: limiter.reset("a")):
        with pytest.raises(StoreError):
            call()


def _share(*policies: str | None) -> float | None:
    return 1.0 if "local" in policies else None


def test_a_function_decides_by_key_cost_limits_and_error() -> None:
    seen: list[Any] = []

    def decide(key: Any, cost: int, limits: Any, error: StoreError) -> Any:
        seen.append((key, cost, tuple(map(str, limits)), error))
        return {"yes": True, "no": False, "allow": "allow", "deny": "deny"}.get(key)

    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, "5/s; 10/minute", on_store_error=decide)
    store.failure = NOT_SENT
    answers = [bool(limiter.try_acquire(key, 2)) for key in ("yes", "no", "allow", "deny")]
    assert answers == [True, False, True, False]
    assert seen[0] == ("yes", 2, ("5/second", "10/minute"), NOT_SENT)
    seen.clear()
    assert limiter.try_acquire_all([("yes", "5/s", 2), ("allow", "9/s", 3)])
    assert [call[:3] for call in seen] == [("yes", 2, ("5/second",)), ("allow", 3, ("9/second",))]
    with pytest.raises(TypeError, match="has returned None; it has to return True"):
        limiter.try_acquire("nothing")


@pytest.mark.parametrize("policy", ["raise", "allow", "deny", "local"])
def test_a_configuration_error_is_raised_under_every_policy(policy: str) -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error=policy, share=_share(policy))
    store.failure = ConfigurationError("wrong password")  # type: ignore[assignment]  # so it raises
    store.failure.charged = False  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="wrong password"):
        limiter.try_acquire("k")
    store.failure = None
    with pytest.raises(ValueError, match="can never be admitted"):
        limiter.try_acquire("k", 11)


def test_what_a_policy_lets_through_is_not_counted() -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error="allow")
    store.failure = NOT_SENT
    with limiter.entry("k") as entry:
        pass
    assert entry.decision is not None
    with pytest.raises(ValueError, match="nothing was charged"):
        limiter.refund(entry.decision)
    store.failure = None
    limiter.flush()
    stats = limiter.stats("k")
    assert (stats.passed, stats.success) == (0, 0)


def test_acquire_waits_until_the_store_is_back() -> None:
    clock = ManualClock()
    store = RemoteStore(clock)
    limiter = limiter_on(store, on_store_error="deny")
    store.failure = NOT_SENT
    back_at = clock.now_ms() + 3500
    asked = store.execute

    def execute(command: Command[Any], deadline: float | None = None) -> Any:
        if clock.now_ms() >= back_at:
            store.failure = None
        return asked(command, deadline)

    store.execute = execute  # type: ignore[method-assign]  # to see the time of each call
    decision = limiter.acquire("k", timeout=10)
    assert decision.source == "store"
    assert clock.now_ms() - back_at < 1000
    store.failure = NOT_SENT
    back_at = clock.now_ms() + 10_000
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("k", timeout=2)


def test_health_says_what_is_known() -> None:
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error="local", share=0.5)
    health = limiter.health()
    assert (health.up, health.last_error, health.unknown_total, health.pending) == (
        True, None, 0, 0,
    )  # fmt: skip
    store.failure = UNKNOWN
    limiter.try_acquire("k")
    health = limiter.health()
    assert (health.last_error, health.unknown_total) == ("no reply came", 1)
    assert health.pending == 1
    store.failure = None
    limiter.flush()
    assert limiter.health().pending == 0


def test_a_function_that_can_not_be_called_so_is_refused_when_it_is_given() -> None:
    with pytest.raises(ConfigurationError, match=r"is called with \(key, cost, limits, error\)"):
        limiter_on(RemoteStore(ManualClock()), on_store_error=lambda key: True)


def test_calls_over_several_keys_are_decided_one_after_the_other() -> None:
    """Where threads switch often, none is admitted between another's look and its count."""
    store = RemoteStore(ManualClock())
    limiter = limiter_on(store, on_store_error="local", share=1.0)
    store.failure = NOT_SENT
    items = [("p", "3/minute", 1), ("q", "3/minute", 1), ("r", "100/minute", 1)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(limiter.try_acquire_all, items) for _ in range(40)]
            assert sum(bool(call.result()) for call in calls) == 3
    finally:
        sys.setswitchinterval(before)


def test_a_function_is_not_asked_for_more_keys_once_it_refuses_one() -> None:
    """It may charge another limiter, and the call is refused."""
    store, asked = RemoteStore(ManualClock()), []

    def decide(key: Any, *_: Any) -> bool:
        asked.append(key)
        return bool(key == "a")

    limiter = limiter_on(store, on_store_error=decide)
    store.failure = NOT_SENT
    decision = limiter.try_acquire_all([(key, "5/minute", 1) for key in "abc"])
    assert (decision.allowed, decision.key, asked) == (False, "b", ["a", "b"])


def test_the_last_error_keeps_nothing_of_the_caller_alive() -> None:
    class Request:
        pass

    store = RemoteStore(ManualClock())
    limiter = limiter_on(store)
    store.failure = StoreUnavailable("away")

    def handle() -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(StoreUnavailable):
            limiter.try_acquire("k")
        return weakref.ref(request)

    kept = handle()
    store.failure = None
    gc.collect()
    assert kept() is None
    assert limiter.health().last_error == "away"


class Away(RemoteStore):
    """A store that raises another error for each call."""

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        raise StoreUnavailable("away", charged=False)


@pytest.mark.parametrize("on_error", ["allow", "local"])
def test_an_answer_keeps_nothing_of_the_caller_alive(on_error: str) -> None:
    """Not even until the garbage collector runs."""
    limiter = limiter_on(Away(ManualClock()), on_store_error=on_error, share=_share(on_error, None))

    class Request:
        pass

    def handle(ask: Any) -> weakref.ref[Request]:
        request = Request()
        ask()
        return weakref.ref(request)

    gc.disable()
    try:
        kept = [handle(ask)() for ask in ways_to_ask(limiter)]
    finally:
        gc.enable()
    assert set(kept) == {None}
