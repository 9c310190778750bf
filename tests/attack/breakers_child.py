"""A client of scenario `breakers`: calls a service that is broken at the times of the plan."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from typing import Any

from distwindow import (
    AsyncCircuitBreaker,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ErrorCount,
    StoreError,
)
from tests.attack.client import Client, ClientLog, Op, Work, now_ms
from tests.attack.planted import send_flushes_twice

KEY = "service"
SYNC_S = FLUSH_S = 0.1
TIMEOUT_S = 0.4
RULE = ErrorCount(20, window=2.0, open_for=0.6, probe_timeout=2.0)
COUNTED = ErrorCount(10**9, window=600.0)
"""A rule that never opens a breaker, and whose window is longer than any run."""
ENOUGH = 3
"""So many calls in a row are let through only if the first, a probe, has closed the breaker."""
HEALED_S = RULE.open_for + RULE.probe_timeout + 4.0


class ServiceError(Exception):
    """The service has failed."""


class BreakerCall(Op):
    """One call of the service."""

    name = "call"
    expected = (BreakerOpen,)

    def __init__(self, breaker: Any, plan: dict[str, Any], rng: random.Random) -> None:
        self.breaker, self.broken = breaker, plan["broken"]
        self.counts = plan["counts"]
        self.seconds = rng.random() * 0.01
        self.asked = self.began = self.ended = 0.0
        self.admission: Any = None
        self.fails = False

    def run(self) -> None:
        self.asked = now_ms()
        try:
            with self.breaker.call(KEY) as call:
                self._begin(call)
                time.sleep(self.seconds)
                self._end()
        except ServiceError:
            pass

    async def run_async(self) -> None:
        self.asked = now_ms()
        try:
            async with self.breaker.call(KEY) as call:
                self._begin(call)
                await asyncio.sleep(self.seconds)
                self._end()
        except ServiceError:
            pass

    def _begin(self, call: Any) -> None:
        self.began = self.ended = now_ms()
        self.admission = call._admission
        self.fails = any(began <= self.began < ended for began, ended in self.broken)

    def _end(self) -> None:
        self.ended = now_ms()
        if self.fails:
            raise ServiceError

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        if not self.began:
            if interrupted and self.counts:
                log.write(sure={}, unsure={"calls": 1, "failures": 1})
            return
        if not self.counts:
            log.write(
                asked=self.asked,
                began=self.began,
                ended=self.ended,
                probe=self.admission and self.admission.probe and self.admission.probe.probe_id,
                failed=None if interrupted else self.fails,
            )
        elif interrupted:
            log.write(sure={}, unsure={"calls": 1, "failures": 1})
        else:
            log.write(sure={"calls": 1, "failures": int(self.fails)}, unsure={})


class Breakers(Work):
    """The breaker of one client."""

    breaker: Any

    def _options(self) -> dict[str, Any]:
        return {
            "rule": COUNTED if self.plan["counts"] else RULE,
            "prefix": self.plan["prefix"],
            "sync_interval": SYNC_S,
            "flush_interval": FLUSH_S,
            "timeout": TIMEOUT_S,
            "on_store_error": "deny",
        }

    def _hear(self, change: BreakerChange) -> None:
        self.log.write(
            heard=now_ms(), at_ms=change.at_ms, previous=change.previous, state=change.state
        )

    def open(self) -> None:
        self.breaker = CircuitBreaker(self.plan["url"], **self._options())
        self.breaker.on_change(self._hear)

    async def open_async(self) -> None:
        self.breaker = AsyncCircuitBreaker(self.plan["url"], **self._options())
        self.breaker.on_change(self._hear)

    def op(self, rng: random.Random) -> Op:
        return BreakerCall(self.breaker, self.plan, rng)

    def close(self) -> None:
        """Flush, after a call has been let through: the service works, and the link is sound."""
        until = time.monotonic() + HEALED_S
        passed = 0
        # Not in a forked child.
        while passed < ENOUGH and self.log.name == self.plan["name"]:
            with suppress(BreakerOpen):
                with self.breaker.call(KEY):
                    self._note_last_call()
                passed += 1
            if time.monotonic() > until:
                self.log.write(wrong="the service works, and calls stay refused")
                break
            time.sleep(0.02)  # between two polls
        for _ in range(20):
            with suppress(StoreError):
                self.breaker.flush()
                break
            time.sleep(0.1)  # before the next attempt
        self.breaker.close()

    async def close_async(self) -> None:
        until = time.monotonic() + HEALED_S
        passed = 0
        while passed < ENOUGH:
            with suppress(BreakerOpen):
                async with self.breaker.call(KEY):
                    self._note_last_call()
                passed += 1
            if time.monotonic() > until:
                self.log.write(wrong="the service works, and calls stay refused")
                break
            await asyncio.sleep(0.02)  # between two polls
        for _ in range(20):
            with suppress(StoreError):
                await self.breaker.flush()
                break
            await asyncio.sleep(0.1)  # before the next attempt
        await self.breaker.aclose()

    def _note_last_call(self) -> None:
        if self.plan["counts"]:
            self.log.write(sure={"calls": 1, "failures": 0}, unsure={})


def plant(what: str) -> None:
    """Put a fault into the library, so that a test can see that the scenario finds it."""
    from distwindow.breaker.listeners import Listeners
    from distwindow.consistency.breaker_key_state import Probe
    from distwindow.consistency.breaker_states import Admission, BreakerStates

    states: Any = BreakerStates
    listeners: Any = Listeners
    if what == "lets all through":
        states.decide_by_known = lambda self, state, now: Admission(
            state, state.generation, None, now
        )
    elif what == "own probes":
        states.decide_probe = lambda self, state, request: Admission(
            state, state.generation, Probe(state.name, request.probe_id, 0), self.monotonic()
        )
    elif what == "heard twice":
        real_tell = Listeners.tell
        listeners.tell = lambda self, changes: real_tell(self, changes * 2)
    else:
        send_flushes_twice()


if __name__ == "__main__":
    client = Client(Breakers)
    if client.plan["planted"]:
        plant(client.plan["planted"])
    client.run()
