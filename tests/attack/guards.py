"""Scenario `guards`: guarded entries that a later slot refuses, that fail, and that are interrupted
or cancelled anywhere on their way through the chain, over a faulty link.

What a call took is given back or counted: its permits and its end once; never more calls run at
once than the rule says, and no place stays taken; when the service works, all are let through.
"""

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
from distwindow.guard.rules import limit_of
from tests.attack.children import now_ms
from tests.attack.client import Client, ClientLog, Op, ServiceError, Work, result_of
from tests.attack.fleet import ALL_FAULTS, attacked, play_fleets
from tests.attack.harness import Run, Violation
from tests.attack.history import check_tallies, read_counts
from tests.attack.slots import Held, check_at_most
from tests.servers import Standalone

VARIANTS = ["direct", "leased"]
SOUND_S = 2.0
"""The service works for so long at the end."""
PREFIX, LIMITED, BREAKABLE = "guards", "limited", "breakable"
FREED_S = 12.0
"""A place whose call was interrupted as it was left is freed after a third of its ttl, 10 s."""
HEALED_S = 14.0
"""A probe whose call was interrupted is replaced after ten seconds."""
ENOUGH = 3
"""So many calls are let through only if the first, a probe, has closed the breaker."""


def guards(run: Run) -> None:
    """The seed draws the consistency and the faults."""
    play_fleets(run, "guards", ["direct", "direct", "leased"], _play, end_s=3.0)


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    began = now_ms() + 1500
    plan: dict[str, Any] = {
        "mode": mode, "at_once": rng.randint(1, 4),
        "broken": [began, began + 1000 * (seconds - SOUND_S) / 2],
    }  # fmt: skip
    # A frozen process does not renew its places, and those of a forked child whose link was broken
    # at its end are taken for half a minute; `slots` has both.
    faults = {name: n for name, n in ALL_FAULTS.items() if name not in ("freeze", "fork")}
    with attacked(run, rng, server, "guards", plan, seconds, faults) as (_, history):
        flow = rules_of(plan["at_once"])[0]
        with server.client(decode_responses=False) as client:
            counts = read_counts(client, PREFIX, flow.resource, limit_of(flow))
        stored = {"success": counts.success, "error": counts.error, "permits": counts.passed}
        if mode != "direct":  # a lost lease is counted as well
            stored["permits"] = history.tallies()[0]["permits"]
        for _, line in history.having("outcome"):
            run.count("calls")
            run.count(f"calls, {line['outcome']}")
        # Ends are flushed, and permits are charged at once; a refund comes after its charge.
        under_way = len(history.dead) * 4 * 2
        check_tallies("guards", stored, history, sent_later=True, under_way=under_way)
        spans = [
            Held(LIMITED, line["began"], line["ended"], process, False)
            for process, line in history.having("inside")
        ]
        run.maximum("inside at once", check_at_most(spans, plan["at_once"]))
        holders = _holders(server.url, timeout=5)
        if not history.dead.issuperset(holders):
            raise Violation(f"{holders} hold {LIMITED!r}; dead are {history.dead}")


def _holders(url: str, **options: Any) -> list[str]:
    with Concurrency(url, 1, prefix=PREFIX, **options) as reader:
        return [holder.name for holder in reader.stats(LIMITED).holders]


# -- the client --


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

    def __init__(self, work: Guards, rng: random.Random) -> None:
        self.guard, self.broken = work.guard, work.plan["broken"]
        self.resource = LIMITED if rng.random() < 0.7 else BREAKABLE
        self.seconds = rng.random() * 0.01
        self.fails = self.resource == LIMITED and rng.random() < 0.3
        self.began = self.ended = 0.0

    def _end(self) -> None:
        self.ended = now_ms()
        is_broken = self.broken[0] <= self.ended < self.broken[1]
        if self.fails or (self.resource == BREAKABLE and is_broken):
            raise ServiceError

    def run(self) -> None:
        with suppress(ServiceError), self.guard.entry(self.resource):
            self.began = self.ended = now_ms()
            time.sleep(self.seconds)
            self._end()

    async def run_async(self) -> None:
        with suppress(ServiceError):
            async with self.guard.entry(self.resource):
                self.began = self.ended = now_ms()
                await asyncio.sleep(self.seconds)
                self._end()

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        sure: list[str] = []
        unsure: list[str] = []
        if self.resource == BREAKABLE:
            pass  # its breaker is looked at when all is over
        elif self.began:
            log.write(inside=True, began=self.began, ended=self.ended)
            sure.append("permits")
            if interrupted:
                unsure += ["success", "error"]
            else:
                sure.append("error" if self.fails else "success")
        elif interrupted:
            unsure += ["permits", "success", "error"]
        elif isinstance(raised, StoreError):
            unsure.append("permits")
        how = "interrupted" if interrupted else type(raised).__name__ if raised else "done"
        log.write(outcome=how)
        log.count(sure, unsure)


class LostRefunds(logging.Handler):
    """Notes each end of an entry that the store has not taken: its refund may be missing."""

    def __init__(self, work: Guards) -> None:
        super().__init__()
        self.work = work

    def emit(self, record: logging.LogRecord) -> None:
        if "was not recorded" in record.msg:
            self.work.log.count(unsure=["permits", "success", "error"])


class Guards(Work):
    """The guard of one client."""

    guard: Any

    def open(self) -> None:
        logging.getLogger("distwindow").addHandler(LostRefunds(self))
        self.guard = self.make(
            Guard, AsyncGuard, rules=rules_of(self.plan["at_once"]), prefix=PREFIX,
            consistency=self.plan["mode"], timeout=0.3, slots=[Refusing()], name=self.log.name,
        )  # fmt: skip

    def op(self, rng: random.Random) -> Op:
        return Entry(self, rng)

    async def close(self) -> None:
        passed = 0

        async def is_free() -> bool:
            await result_of(self.guard.flush())
            return self.log.name not in _holders(self.plan["url"])

        async def is_closed() -> bool:
            nonlocal passed
            with suppress(BreakerOpen):
                async with self.entered(self.guard.entry(BREAKABLE)):
                    passed += 1
            return passed == ENOUGH

        until = time.monotonic() + HEALED_S
        await self.poll(is_free, FREED_S, "a place stays taken")
        left = until - time.monotonic()
        await self.poll(is_closed, left, "the service works, and calls stay refused")
        await result_of(self.guard.flush())
        await self.end(self.guard)


if __name__ == "__main__":
    Client(Guards).run()
