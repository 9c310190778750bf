"""A client of scenario `slots`. While it holds a slot, it logs each moment at which `slot.lost` was
still false.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from distwindow import AsyncConcurrency, Concurrency, ConcurrencyExceeded, StoreError
from tests.attack.client import Client, ClientLog, Op, Work, now_ms

LOOK_S = 0.002
FREED_S = 1.5
"""How long after the last block a slot may stay held, beyond a third of its time to live."""


class Holding(Op):
    """One slot, held for a while."""

    name = "hold"
    expected = (ConcurrencyExceeded, StoreError)

    def __init__(self, slots: Any, log: ClientLog, plan: dict[str, Any], rng: random.Random):
        self.slots, self.log = slots, log
        self.number = next(log.numbers)
        self.key = rng.choice(plan["keys"])
        self.timeout = rng.choice([0, 0.05, 0.3])
        is_long = rng.random() < plan["long_share"]
        self.seconds = rng.random() * (3 * plan["ttl"] if is_long else 0.02)
        self.how = rng.choice(["hold", "hold", "try", "drop"])
        if plan["waits_s"]:
            self.how, self.timeout, self.seconds = "hold", plan["waits_s"], 0.01
        self.asked = 0.0

    def run(self) -> None:
        self.asked = now_ms()
        if self.how == "hold":
            with self.slots.hold(self.key, timeout=self.timeout) as slot:
                self._use(slot)
            return
        slot = self.slots.try_hold(self.key)
        if slot:
            self._use(slot)
            if self.how == "try":
                slot.release()

    async def run_async(self) -> None:
        self.asked = now_ms()
        if self.how == "hold":
            async with self.slots.hold(self.key, timeout=self.timeout) as slot:
                await self._await_use(slot)
            return
        slot = await self.slots.try_hold(self.key)
        if slot:
            await self._await_use(slot)
            if self.how == "try":
                await slot.release()

    def _use(self, slot: Any) -> None:
        until = time.monotonic() + self.seconds
        while self._is_held(slot) and time.monotonic() < until:
            time.sleep(LOOK_S)

    async def _await_use(self, slot: Any) -> None:
        self._is_held(slot)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            if not self._is_held(slot):
                break

    def _is_held(self, slot: Any) -> bool:
        at = now_ms()  # before it looks, so that it surely had the slot at that time
        lost = bool(slot.lost)
        self.log.write(slot=self.number, key=self.key, asked=self.asked, at=at, lost=lost)
        return not lost

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        """All is logged already."""


class Slots(Work):
    """The slots of one client."""

    slots: Any

    def _options(self) -> dict[str, Any]:
        own = ("prefix", "ttl", "timeout")
        return {"name": self.log.name, **{name: self.plan[name] for name in own}}

    def open(self) -> None:
        self.slots = Concurrency(self.plan["url"], self.plan["limit"], **self._options())

    async def open_async(self) -> None:
        self.slots = AsyncConcurrency(self.plan["url"], self.plan["limit"], **self._options())

    def op(self, rng: random.Random) -> Op:
        return Holding(self.slots, self.log, self.plan, rng)

    def close(self) -> None:
        """Wait until this process holds no slot any more; the worker frees those of interrupted
        blocks, and of slots that nobody refers to.
        """
        until = time.monotonic() + self.plan["ttl"] / 3 + FREED_S
        while own := [key for key in self.plan["keys"] if self._holds(self.slots.stats(key))]:
            if time.monotonic() > until:
                self.log.write(wrong=f"slots of {own} stay held, although no block has them")
                break
            time.sleep(0.02)  # between two polls
        self.slots.close()

    async def close_async(self) -> None:
        until = time.monotonic() + self.plan["ttl"] / 3 + FREED_S
        while own := [key for key in self.plan["keys"] if self._holds(await self.slots.stats(key))]:
            if time.monotonic() > until:
                self.log.write(wrong=f"slots of {own} stay held, although no block has them")
                break
            await asyncio.sleep(0.02)  # between two polls
        await self.slots.aclose()

    def _holds(self, stats: Any) -> bool:
        # A forked child has the name of its parent.
        mine = self.log.name.partition("f")[0]
        return self.log.name == mine and any(holder.name == mine for holder in stats.holders)


if __name__ == "__main__":
    Client(Slots).run()
