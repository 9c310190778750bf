"""Each call of a limiter has one answer, which passes `answered` on its way to the caller, in each
way to call and whoever has answered. Those of `decide_locally` do not: they are counted where they
are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    AsyncLimiter,
    ConfigurationError,
    DistwindowError,
    FlowRule,
    Guard,
    Limiter,
)
from distwindow.decider import BaseDecider
from tests.away.sharing_process import WAYS, asking_of_web
from tests.clock_and_stores import fresh_key

NOBODY = "redis://127.0.0.1:1"
WAITING = {way for way in WAYS if way.startswith(("acquire", "reserve")) and "all" not in way}
"""These ask again, and may be answered in this process then."""


class Answers:
    """The answers of all limiters of this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed: list[Any] = []
        self.local: list[Any] = []
        answered = BaseDecider.answered

        def noting(decider: BaseDecider, decision: Any) -> Any:
            self.passed.append(decision)
            return answered(decider, decision)

        patch.setattr(BaseDecider, "answered", noting)

    def watch(self, limiter: Any) -> Any:
        """Note what `limiter` decides in this process; return it."""
        decide = limiter.decider.decide_locally

        def noting(key: Any, cost: int) -> Any:
            decision = decide(key, cost)
            if decision is not None:
                self.local.append(decision)
            return decision

        limiter.decider.decide_locally = limiter._decide_locally = noting
        return limiter

    async def check(self, way: str, answer: Any, *, waits: bool = False) -> None:
        self.passed.clear()
        self.local.clear()
        try:
            found = answer()
            if isinstance(found, Awaitable):
                found = await found
        except ConfigurationError:
            return  # not with this consistency
        except DistwindowError:
            pass
        passed, local = len(self.passed), bool(self.local)
        assert passed == (not local) or (waits and passed == 1), (way, self.passed, self.local)


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("answers", ["admit", "refuse", "allow", "deny", "local"])
def test_each_answer_passes_once(
    kind: Any, consistency: Any, answers: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away = answers in ("allow", "deny", "local")
    noted = Answers(monkeypatch)

    async def call_in_all_ways() -> None:
        limiter = noted.watch(
            kind(
                NOBODY if is_away else redis_url, "2/hour" if answers == "refuse" else "100/hour",
                prefix=fresh_key(), consistency=consistency,
                on_store_error=answers if is_away else "raise",
            )
        )  # fmt: skip
        for way, call in WAYS.items():
            for _ in range(4):
                await noted.check(way, lambda: call(limiter, way), waits=way in WAITING)  # noqa: B023
        if kind is AsyncLimiter:
            await limiter.aclose()
        else:
            limiter.close()

    asyncio.run(call_in_all_ways())


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_the_web_and_guards_have_no_other_way(
    tasks: bool, consistency: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Answers(monkeypatch)
    made = BaseDecider.__init__

    def watched(decider: BaseDecider, *parts: Any) -> None:
        made(decider, *parts)
        decide = decider.decide_locally

        def noting(key: Any, cost: int) -> Any:
            decision = decide(key, cost)
            if decision is not None:
                noted.local.append(decision)
            return decision

        decider.decide_locally = noting

    monkeypatch.setattr(BaseDecider, "__init__", watched)

    async def call() -> None:
        ask = asking_of_web(redis_url, tasks, prefix=fresh_key(), consistency=consistency)
        for _ in range(4):
            await noted.check("web", lambda: ask("3/hour"))
        rules = [FlowRule("r", 3)]
        guard: Any = (AsyncGuard if tasks else Guard)(redis_url, rules, prefix=fresh_key())
        for _ in range(4):
            await noted.check("guard", lambda: _guarded(guard))
        if tasks:
            await guard.aclose()
        else:
            guard.close()

    asyncio.run(call())


def _guarded(guard: Any) -> Any:
    if isinstance(guard, AsyncGuard):

        async def enter() -> None:
            async with guard.entry("r"):
                pass

        return enter()
    with guard.entry("r"):
        return None
