"""One process of `upgrade.py`, of either version. It imports only what both have: the public names
of distwindow, and the modules of the attacks that import no others.

`holder`: it holds all slots of a key of its own and the probe of a breaker of its own until it is
killed. The others make calls of every kind, and at the end they wait until they get what the
holders had.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import distwindow
from distwindow import (
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncLimiter,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    Concurrency,
    ErrorCount,
    Limiter,
)
from tests.attack.caller import Callers
from tests.attack.children import now_ms
from tests.attack.client import Client, ClientLog, Op, ServiceError, result_of
from tests.attack.cold_child import COUNTED
from tests.attack.harness import FOREVER

PREFIX = "upgrade"
SHARED, SERVICE = "shared", "service"
SLOTS = 2
"""How many slots each key has."""
TTL_S, HOLDERS_TTL_S, TIMEOUT_S = 3.0, 4.5, 1.5
"""Deadlines further away than the own time to live are compared with that in a holder's name."""
RULE = ErrorCount(5, min_calls=5, window=5.0, open_for=0.4, probe_timeout=3.0)
SYNC_S = 0.1
BACK_S = 8.0
"""A slot or a probe that comes back does so well within this time. So is a waiter served."""
ENOUGH = 3
"""So many calls are let through only if the first, a probe, has closed the breaker."""


class Held:
    """Something that is held: each `look` logs a moment at which it still was."""

    def __init__(self, log: ClientLog, key: str) -> None:
        self.log, self.key, self.number = log, key, next(log.numbers)

    def look(self, *, lost: bool = False) -> None:
        self.log.write(slot=self.number, key=self.key, at=now_ms(), lost=lost)


class Hold(Op):
    """One slot, held for a moment: of the shared key, or one that a holder has."""

    name = "hold"

    def __init__(self, work: Everything, rng: random.Random) -> None:
        self.work, self.seconds = work, rng.random() * 0.02
        self.key = rng.choice([SHARED, SHARED, SHARED, *work.holders])

    async def run_async(self) -> None:
        if self.key == SHARED:
            async with self.work.entered(self.work.slots.hold(SHARED, timeout=BACK_S)) as slot:
                await self._use(slot)
        elif slot := await result_of(self.work.slots.try_hold(self.key)):
            await self._use(slot)
            await result_of(slot.release())
        else:
            stats = await result_of(self.work.slots.stats(self.key))
            names = [holder.name for holder in stats.holders]
            if not all(name.startswith(("old-", "new-")) for name in names):
                self.work.log.write(wrong=f"the holders of {self.key!r} are {names}")

    async def _use(self, slot: Any) -> None:
        held = Held(self.work.log, self.key)
        held.look(lost=slot.lost)
        await self.work.pause(self.seconds)
        held.look(lost=slot.lost)


class CallService(Op):
    """One call of the service, or of one whose probe a holder has, inside a breaker."""

    name = "a call of a service"
    expected = (BreakerOpen,)

    def __init__(self, work: Everything, rng: random.Random) -> None:
        self.work, self.seconds = work, rng.random() * 0.01
        self.key = rng.choice([SERVICE, SERVICE, *work.holders])

    async def run_async(self) -> None:
        asked = now_ms()
        with suppress(ServiceError):
            async with self.work.entered(self.work.breaker.call(self.key)):
                began = now_ms()
                await self.work.pause(self.seconds)
                self.work.log.write(passed=self.key, asked=asked, began=began, ended=now_ms())
                self.work.fail_if_broken(self.key)


class CountEnd(Op):
    """One call inside a breaker that only counts how calls end."""

    name = "a counted call"

    def __init__(self, work: Everything, rng: random.Random) -> None:
        self.work, self.fails = work, rng.random() < 0.3

    async def run_async(self) -> None:
        with suppress(ServiceError):
            async with self.work.entered(self.work.counter.call(SERVICE)):
                if self.fails:
                    raise ServiceError

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        log.count(["ends of calls", "failed calls"] if self.fails else ["ends of calls"])


class Reserve(Op):
    """One reservation, which is settled: less, as much or more is used, or nothing."""

    name = "reserve"

    def __init__(self, work: Everything, rng: random.Random) -> None:
        self.limiter = work.reserving
        self.estimate, self.actual = rng.randint(1, 10), rng.randint(0, 12)
        self.releases = rng.random() < 0.2

    async def run_async(self) -> None:
        reservation = await result_of(self.limiter.try_reserve(SHARED, self.estimate))
        if self.releases:
            await result_of(reservation.release())
        else:
            await result_of(reservation.commit(self.actual))

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        log.write(sure={"reserved": 0 if self.releases else self.actual}, unsure={})


class Everything(Callers):
    """What one process has: limiters, slots, breakers, reservations."""

    def open(self) -> None:
        self.log.write(package=distwindow.__file__)
        self.holders: list[str] = self.plan["holders"]
        common = {"prefix": PREFIX, "timeout": TIMEOUT_S}
        self.slots = self.make(
            Concurrency, AsyncConcurrency, limit=SLOTS, name=self.log.name, **common,
            ttl=HOLDERS_TTL_S if self.log.name in self.holders else TTL_S,
        )  # fmt: skip
        often = {"sync_interval": SYNC_S, "flush_interval": SYNC_S, **common}
        self.breaker = self.make(CircuitBreaker, AsyncCircuitBreaker, rule=RULE, **often)
        self.counter = self.make(CircuitBreaker, AsyncCircuitBreaker, rule=COUNTED, **often)
        self.reserving = self.make(Limiter, AsyncLimiter, limits=FOREVER, **common)
        self.breaker.on_change(self._hear)
        super().open()
        if self.log.name in self.holders:
            self._hold_all(self.log.name)

    def _hear(self, change: BreakerChange) -> None:
        if change.key == SERVICE:
            self.log.write(
                heard=now_ms(), at_ms=change.at_ms, previous=change.previous, state=change.state
            )

    def op(self, rng: random.Random) -> Op:
        if rng.random() < 0.6:
            return super().op(rng)
        kinds: list[Callable[[Everything, random.Random], Op]]
        kinds = [Hold, CallService, CountEnd, Reserve]
        return rng.choice(kinds)(self, rng)

    def fail_if_broken(self, key: str) -> None:
        if key == SERVICE and Path(self.plan["broken"]).exists():
            raise ServiceError

    def _hold_all(self, key: str) -> None:
        """Write a key of every kind that nobody else writes; then take all slots and the probe of
        `key`, and log them until this process is killed.
        """
        for name, limiter in self.limiters.items():
            if "/day" in self.plan["windows"][name]["limits"]:
                limiter.try_acquire(key)
                limiter.flush()
        with self.counter.call(key):
            pass
        self.counter.flush()
        slots = [(self.slots.try_hold(key), Held(self.log, key)) for _ in range(SLOTS)]
        for _ in range(RULE.count):
            with suppress(ServiceError), self.breaker.call(key):
                raise ServiceError
        self.breaker.flush()
        probe = Held(self.log, f"the probe of {key}")
        while True:
            with suppress(BreakerOpen), self.breaker.call(key):
                while True:
                    for slot, held in slots:
                        held.look(lost=slot.lost)
                    probe.look()
                    time.sleep(0.02)
            time.sleep(0.02)

    async def close(self) -> None:
        """Wait for what the holders had, then flush all, and close."""
        for key in [SHARED, *self.holders]:
            await self.poll(partial(self._gets_slot, key), BACK_S, f"no slot of {key!r}")
        for key in [SERVICE, *self.holders]:
            wrong = f"calls of {key!r} stay refused, although it works"
            for _ in range(ENOUGH):
                await self.poll(partial(self._passes, key), BACK_S, wrong)
        for closed in (self.slots, self.breaker, self.counter, self.reserving):
            await self.end(closed)
        await super().close()

    async def _gets_slot(self, key: str) -> bool:
        if not (slot := await result_of(self.slots.try_hold(key))):
            return False
        await result_of(slot.release())
        return True

    async def _passes(self, key: str) -> bool:
        with suppress(BreakerOpen):
            async with self.entered(self.breaker.call(key)):
                return True
        return False


if __name__ == "__main__":
    Client(Everything).run()
