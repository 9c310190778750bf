"""A client of scenario `guards`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import Any

from distwindow import (
    AsyncGuard,
    Blocked,
    BreakerOpen,
    ChainSlot,
    Concurrency,
    DegradeRule,
    FlowRule,
    Guard,
    StoreError,
)
from tests.attack.client import Client, ClientLog, Op, Work, now_ms

LIMITED, BREAKABLE = "limited", "breakable"
FREED_S = 12.0
"""A place whose call was interrupted as it was left is freed after a third of its ttl, 10 s."""
HEALED_S = 14.0
"""A probe whose call was interrupted is replaced after ten seconds."""
ENOUGH = 3
"""So many calls in a row are let through only if the first, a probe, has closed the breaker."""
STUCK = "the service works, and calls stay refused"


class ServiceError(Exception):
    """The service has failed."""


class RefusedLater(Blocked):
    """A slot behind those of the rules has refused the call."""


class Refusing(ChainSlot):
    """Refuses some calls behind all other slots, as a rule of an application might."""

    order = 900

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def enter(self, call: Any) -> None:
        if call.resource == LIMITED and self.rng.random() < 0.3:
            raise RefusedLater("the last slot refuses")


def rules_of(at_once: int) -> list[Any]:
    """Return the rules. The first has a window that outlasts every run: the fraction of permits and
    seconds in an hour cannot be reduced.
    """
    return [
        FlowRule(LIMITED, count=100_000_001 / 3600),
        FlowRule(LIMITED, count=at_once, grade="thread"),
        DegradeRule(
            BREAKABLE, count=0.5, grade="error_ratio", time_window_s=1, min_request_amount=5,
            stat_interval_ms=1000,
        ),
    ]  # fmt: skip


class Entry(Op):
    """One guarded call."""

    name = "entry"
    expected = (StoreError, Blocked)

    def __init__(self, guard: Any, broken: list[list[float]], rng: random.Random) -> None:
        self.guard, self.broken = guard, broken
        self.resource = LIMITED if rng.random() < 0.7 else BREAKABLE
        self.seconds = rng.random() * 0.01
        self.fails = self.resource == LIMITED and rng.random() < 0.3
        self.began = self.ended = 0.0

    def _body(self) -> None:
        is_broken = any(began <= now_ms() < ended for began, ended in self.broken)
        if self.fails or (self.resource == BREAKABLE and is_broken):
            raise ServiceError

    def run(self) -> None:
        try:
            with self.guard.entry(self.resource):
                self.began = self.ended = now_ms()
                time.sleep(self.seconds)
                self.ended = now_ms()
                self._body()
        except ServiceError:
            pass

    async def run_async(self) -> None:
        try:
            async with self.guard.entry(self.resource):
                self.began = self.ended = now_ms()
                await asyncio.sleep(self.seconds)
                self.ended = now_ms()
                self._body()
        except ServiceError:
            pass

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        sure: list[str] = []
        unsure: list[str] = []
        if self.resource == BREAKABLE:
            pass  # its breaker is looked at when all is over
        elif self.began:
            log.write(inside=True, key=LIMITED, began=self.began, ended=self.ended)
            sure.append("permits")
            if interrupted:
                unsure += ["success", "error"]
            else:
                sure.append("error" if self.fails else "success")
        elif interrupted:
            unsure += ["permits", "success", "error"]
        elif isinstance(raised, StoreError):
            unsure.append("permits")
        log.write(
            outcome="interrupted" if interrupted else type(raised).__name__ if raised else "done",
            sure=dict.fromkeys(sure, 1),
            unsure=dict.fromkeys(unsure, 1),
        )


class LostRefunds(logging.Handler):
    """Notes each end of an entry that the store has not taken: its refund may be missing."""

    def __init__(self, log: ClientLog) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        if "was not recorded" in record.msg:
            self.log.write(sure={}, unsure={"permits": 1, "success": 1, "error": 1})


class Guards(Work):
    """The guard of one client."""

    guard: Any

    def _options(self) -> dict[str, Any]:
        logging.getLogger("distwindow").addHandler(LostRefunds(self.log))
        return {
            "rules": rules_of(self.plan["at_once"]),
            "prefix": self.plan["prefix"],
            "consistency": self.plan["mode"],
            "timeout": self.plan["timeout"],
            "slots": [Refusing()],
            "name": self.log.name,
        }

    def open(self) -> None:
        self.guard = Guard(self.plan["url"], **self._options())

    async def open_async(self) -> None:
        self.guard = AsyncGuard(self.plan["url"], **self._options())

    def op(self, rng: random.Random) -> Op:
        return Entry(self.guard, self.plan["broken"], rng)

    def close(self) -> None:
        if self.log.name == self.plan["name"]:  # not in a forked child
            freed_by, healed_by = self._deadlines()
            while self._holds() and self._is_before(freed_by, "a place stays taken"):
                self.guard.flush()
                time.sleep(0.02)  # between two polls
            passed = 0
            while passed < ENOUGH and self._is_before(healed_by, STUCK):
                with suppress(BreakerOpen):
                    with self.guard.entry(BREAKABLE):
                        passed += 1
                time.sleep(0.02)  # between two polls
        self.guard.flush()
        self.guard.close()

    async def close_async(self) -> None:
        freed_by, healed_by = self._deadlines()
        while self._holds() and self._is_before(freed_by, "a place stays taken"):
            await self.guard.flush()
            await asyncio.sleep(0.02)  # between two polls
        passed = 0
        while passed < ENOUGH and self._is_before(healed_by, STUCK):
            with suppress(BreakerOpen):
                async with self.guard.entry(BREAKABLE):
                    passed += 1
            await asyncio.sleep(0.02)  # between two polls
        await self.guard.flush()
        await self.guard.aclose()

    def _deadlines(self) -> tuple[float, float]:
        now = time.monotonic()
        return now + FREED_S, now + HEALED_S

    def _is_before(self, deadline: float, wrong: str) -> bool:
        if time.monotonic() < deadline:
            return True
        self.log.write(wrong=wrong)
        return False

    def _holds(self) -> bool:
        with Concurrency(self.plan["url"], 1, prefix=self.plan["prefix"]) as reader:
            holders = reader.stats(LIMITED).holders
        return any(holder.name == self.log.name for holder in holders)


if __name__ == "__main__":
    Client(Guards).run()
