"""A client of scenario `breakers`: calls a service that is broken at the times of the plan."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from contextlib import AsyncExitStack, ExitStack, suppress
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

KEY = "service"
SYNC_S = FLUSH_S = 0.1
TIMEOUT_S = 0.4
RULE = ErrorCount(20, window=2.0, open_for=0.6, probe_timeout=2.0)
COUNTED = ErrorCount(10**9, window=600.0)
"""A rule that never opens a breaker, and whose window is longer than any run."""
PROBED = ErrorCount(20, window=2.0, open_for=0.4, probe_timeout=1.2)
AROUND = ErrorCount(30, window=2.0, open_for=0.4, probe_timeout=1.2)
"""The rule of a breaker of the same kind and window around the one with the rule `PROBED`."""
SLOW_S = 1.5 * PROBED.probe_timeout
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


class ProbedCall(BreakerCall):
    """One call of the service inside two breakers, the inner one of which is entered again. A probe
    may take longer than its timeout, and its process may fork inside it.
    """

    def __init__(self, work: Breakers, rng: random.Random) -> None:
        super().__init__(None, work.plan, rng)
        self.work, self.blocks = work, work.blocks
        self.probe_s = rng.choice([self.seconds, SLOW_S, SLOW_S])
        self.child_raised = False

    def run(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError), ExitStack() as stack:
            calls = [stack.enter_context(one) for one in self.blocks()]
            self._begin(calls[1])
            if self.admission.probe is not None:
                # Not in the main thread, where a signal handler may raise in the child.
                if threading.current_thread() is not threading.main_thread():
                    self._leave_in_child(stack)
                time.sleep(self.probe_s)
            self._end()

    async def run_async(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError):
            async with AsyncExitStack() as stack:
                calls = [await stack.enter_async_context(one) for one in self.blocks()]
                self._begin(calls[1])
                if self.admission.probe is not None:
                    await asyncio.sleep(self.probe_s)
                self._end()

    def _leave_in_child(self, stack: ExitStack) -> None:
        child = os.fork()
        if child:
            self.child_raised = os.waitpid(child, 0)[1] != 0
            return
        try:
            self.work.hears = False  # its log is the parent's
            stack.close()
            os._exit(0)
        finally:
            os._exit(1)

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        if self.child_raised:
            log.write(wrong="a child that has left the block of a probe has raised")
        super().note(log, raised, interrupted)


class Breakers(Work):
    """The breaker of one client, and in variant `probes` one around it."""

    breaker: Any
    around: Any = None
    hears = True

    def blocks(self) -> list[Any]:
        """Return what the service is called inside of, from the outside."""
        if self.around is None:
            return [self.breaker.call(KEY)]
        return [self.around.call(KEY), self.breaker.call(KEY), self.breaker.call(KEY)]

    def _options(self) -> dict[str, Any]:
        rule = COUNTED if self.plan["counts"] else PROBED if self.plan["probed"] else RULE
        return {
            "rule": rule,
            "prefix": self.plan["prefix"],
            "sync_interval": SYNC_S,
            "flush_interval": FLUSH_S,
            "timeout": TIMEOUT_S,
            "on_store_error": "deny",
        }

    def _hear(self, change: BreakerChange) -> None:
        if self.hears:
            self.log.write(
                heard=now_ms(), at_ms=change.at_ms, previous=change.previous, state=change.state
            )

    def open(self) -> None:
        self.breaker = CircuitBreaker(self.plan["url"], **self._options())
        if self.plan["probed"]:
            self.around = CircuitBreaker(self.plan["url"], **self._options() | {"rule": AROUND})
        self.breaker.on_change(self._hear)

    async def open_async(self) -> None:
        self.breaker = AsyncCircuitBreaker(self.plan["url"], **self._options())
        if self.plan["probed"]:
            around = self._options() | {"rule": AROUND}
            self.around = AsyncCircuitBreaker(self.plan["url"], **around)
        self.breaker.on_change(self._hear)

    def op(self, rng: random.Random) -> Op:
        if self.around is not None:
            return ProbedCall(self, rng)
        return BreakerCall(self.breaker, self.plan, rng)

    def close(self) -> None:
        """Flush, after a call has been let through: the service works, and the link is sound."""
        until = time.monotonic() + HEALED_S
        passed = 0
        # Not in a forked child.
        while passed < ENOUGH and self.log.name == self.plan["name"]:
            with suppress(BreakerOpen):
                with ExitStack() as stack:
                    for block in self.blocks():
                        stack.enter_context(block)
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
        if self.around is not None:
            self.around.close()

    async def close_async(self) -> None:
        until = time.monotonic() + HEALED_S
        passed = 0
        while passed < ENOUGH:
            with suppress(BreakerOpen):
                async with AsyncExitStack() as stack:
                    for block in self.blocks():
                        await stack.enter_async_context(block)
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
        if self.around is not None:
            await self.around.aclose()

    def _note_last_call(self) -> None:
        if self.plan["counts"]:
            self.log.write(sure={"calls": 1, "failures": 0}, unsure={})


if __name__ == "__main__":
    Client(Breakers).run()
