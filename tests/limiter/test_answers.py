"""Each decision of the store and of `on_store_error` passes `answered` once, as it is made, in each
way to call. Those of `decide_locally` do not: they are counted where they are made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    AsyncLimiter,
    DistwindowError,
    FlowRule,
    Guard,
    Limiter,
    RateLimitExceeded,
    StoreError,
)
from distwindow.away.policy import StoreErrorPolicy
from distwindow.borrow.commands import Borrow
from distwindow.limiter.decider import BaseDecider
from distwindow.observer import COUNTED_IN_STATES
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Lease
from distwindow.waiting.commands import AcquireTurn
from tests.away.sharing_process import WAYS, asking_of_web
from tests.away.stores import NOT_SENT, AsyncRemoteStore, RemoteStore
from tests.clock_and_stores import ManualClock, fresh_key
from tests.observer.told import Seen, Told

LIMITERS = pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])


class Decisions:
    """The decisions that are made in this process, and those that have passed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = 0
        """By a `Store` below, and by policies."""
        self.passed: list[Any] = []
        self.local: list[Any] = []
        """What `decide_locally` has decided."""
        self.told = Told()
        """What an observer is told."""
        self.errors = 0
        """How many calls have raised a `StoreError`."""
        self.clock: ManualClock | None = None
        answered, made = BaseDecider.answered, BaseDecider.__init__

        def note(decider: BaseDecider, decision: Any) -> Any:
            self.passed.append(decision)
            assert self.clock is None or decision.now_ms == self.clock.now_ms()
            return answered(decider, decision)

        def watch(decider: BaseDecider, *parts: Any) -> None:
            made(decider, *parts)
            decider.decide_locally = self._noted(decider.decide_locally)
            decider.strategy.spend_leased = self._noted(  # type: ignore[method-assign]
                decider.strategy.spend_leased
            )

        patch.setattr(BaseDecider, "answered", note)
        patch.setattr(BaseDecider, "__init__", watch)
        for name in ("decide", "decide_all"):
            patch.setattr(StoreErrorPolicy, name, self._counted(getattr(StoreErrorPolicy, name)))

    def _noted(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        def noted(key: Any, cost: int) -> Any:
            decision = decide(key, cost)
            if decision is not None:
                self.local.append(decision)
            return decision

        return noted

    def _counted(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            decision = decide(*arguments)
            self.made += 1
            return decision

        return counted

    async def call(self, call: Callable[[], Any]) -> None:
        """Make a call, which may be refused, and not with each consistency and limit."""
        try:
            found = call()
            if isinstance(found, Awaitable):
                await found
        except DistwindowError as exc:
            self.errors += isinstance(exc, StoreError)


class Store(RemoteStore):
    """A store that counts what it decides."""

    def __init__(self, clock: ManualClock, decisions: Decisions) -> None:
        super().__init__(clock)
        self._decisions = decisions

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        reply = super().execute(command, deadline)
        self._decisions.made += isinstance(command, (Acquire, AcquireTurn, Borrow, Lease))
        return reply


def limiter_on(kind: Any, store: Store, limits: str, consistency: Any, **options: Any) -> Any:
    return kind(
        store if kind is Limiter else AsyncRemoteStore(store), limits, time=store.clock,
        consistency=consistency, **options,
    )  # fmt: skip


@LIMITERS
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("limits", ["4/minute", "4/minute paced 100s"])
@pytest.mark.parametrize("answers", ["raise", "allow", "deny", "local"])
def test_each_decision_passes_once_as_it_is_made(
    kind: Any, consistency: Any, limits: str, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = Decisions(monkeypatch)
    clock = decisions.clock = ManualClock()
    store = Store(clock, decisions)
    goes_away = False
    advance = clock.advance

    def advance_and_lose_the_store(seconds: float) -> None:
        advance(seconds)
        store.failure = store.failure or (NOT_SENT if goes_away else None)

    clock.advance = advance_and_lose_the_store  # type: ignore[method-assign]
    waits = {
        "acquire, waiting": lambda limiter, key: limiter.acquire(key, 2, timeout=100.0),
        "priority, waiting": lambda limiter, key: limiter.acquire(key, timeout=90, priority=True),
        "reserve, waiting": lambda limiter, key: limiter.reserve(key, 2, timeout=100.0),
    }

    async def call_in_all_ways() -> None:
        nonlocal goes_away
        decided: Counter[Any] = Counter()
        limiter = limiter_on(
            kind, store, limits, consistency, on_store_error=answers,
            share=1.0 if answers == "local" else None, observer=decisions.told,
        )  # fmt: skip
        for way, call in (WAYS | waits).items():
            for turn, store.failure in enumerate(
                (None, None, None, NOT_SENT, NOT_SENT, None, None)
            ):
                goes_away = turn == 6  # while it waits
                decisions.made, decisions.passed = 0, []
                await decisions.call(lambda: call(limiter, way))  # noqa: B023
                assert len(decisions.passed) == decisions.made, way
                by_others = [d for d in decisions.passed if d.source not in COUNTED_IN_STATES]
                decided += Counter(map(Seen.name_of, by_others + decisions.local))
                decisions.local = []
        store.failure, goes_away = None, False
        await decisions.call(limiter.close if kind is Limiter else limiter.aclose)
        told = {what: n for what, n in decisions.told.calls.items() if what[1] != "error"}
        assert told == decided
        assert decisions.told.calls.total() - decided.total() == decisions.errors

    asyncio.run(call_in_all_ways())


@pytest.mark.parametrize("consistency", ["direct", "leased"])
@pytest.mark.parametrize("cost", [1, 5])
def test_a_share_knows_of_a_refusal_whose_call_still_waits(consistency: Any, cost: int) -> None:
    """The store goes away while it waits."""
    clock = ManualClock()
    store = RemoteStore(clock)
    other = Limiter(store, "10/minute", time=clock)
    limiter = Limiter(
        store, "10/minute", time=clock, consistency=consistency, on_store_error="local", share=1.0
    )
    other.try_acquire("k", cost)
    clock.move(50_000)
    assert other.try_acquire("k", 10 - cost)
    slept, sleep = [], clock.sleep

    def lose_the_store(seconds: float) -> None:
        slept.append(seconds)
        store.failure = NOT_SENT
        sleep(seconds)

    clock.sleep = lose_the_store  # type: ignore[method-assign]
    assert limiter.acquire("k", cost, timeout=300).source == "local"
    assert sum(slept) >= 50  # the last bucket that it has heard of leaves the window


async def test_who_gives_up_behind_a_head_passes_no_old_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = Decisions(monkeypatch)
    clock = decisions.clock = ManualClock(auto_advance=False)
    limiter = limiter_on(
        AsyncLimiter, Store(clock, decisions), "1/minute", "direct", on_store_error="local", share=1
    )
    assert await limiter.try_acquire("k")
    head = asyncio.create_task(limiter.acquire("k"))
    for _ in range(20):
        await asyncio.sleep(0)
    clock.move(30_000)
    with pytest.raises(RateLimitExceeded):
        await limiter.acquire("k", timeout=1)
    assert len(decisions.passed) == decisions.made
    head.cancel()


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_the_web_and_guards_have_no_other_way(
    tasks: bool, consistency: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = Decisions(monkeypatch)

    async def call() -> None:
        ask, close = asking_of_web(redis_url, tasks, prefix=fresh_key(), consistency=consistency)
        guard: Any = (AsyncGuard if tasks else Guard)(
            redis_url, [FlowRule("r", 3)], prefix=fresh_key()
        )
        for one in (lambda: ask("3/hour"), lambda: _guarded(guard)):
            for _ in range(4):
                decisions.passed, decisions.local = [], []
                await decisions.call(one)
                assert len(decisions.passed) + len(decisions.local) == 1
        for ended in (guard.aclose() if tasks else guard.close(), close()):
            if tasks:
                await ended

    asyncio.run(call())


def _guarded(guard: Any) -> Any:
    if isinstance(guard, AsyncGuard):

        async def enter() -> None:
            async with guard.entry("r"):
                pass

        return enter()
    with guard.entry("r"):
        return None
