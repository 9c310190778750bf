"""A client of scenario `entries`."""

from __future__ import annotations

import random
from typing import Any

from distwindow import AsyncLimiter, Limiter, RateLimitExceeded, StoreError
from tests.attack.client import Client, ClientLog, Op, Work

ORIGINS = [f"app-{number}" for number in range(5)]
"""More than `max_origins`: some are counted together."""


class EntryOp(Op):
    """One entry."""

    name = "entry"
    expected = (StoreError, RateLimitExceeded)

    def __init__(self, limiters: dict[str, Any], keys: list[str], rng: random.Random) -> None:
        self.window = "tight" if rng.random() < 0.2 else "wide"
        self.limiter, self.key = limiters[self.window], rng.choice(keys)
        self.origin = rng.choice(ORIGINS)
        self.fails = rng.random() < 0.3
        self.is_admitted = False

    def run(self) -> None:
        try:
            with self.limiter.entry(self.key, origin=self.origin):
                self.is_admitted = True
                if self.fails:
                    raise LookupError
        except LookupError:
            pass

    async def run_async(self) -> None:
        try:
            async with self.limiter.entry(self.key, origin=self.origin):
                self.is_admitted = True
                if self.fails:
                    raise LookupError
        except LookupError:
            pass

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        sure: list[str] = []
        unsure: list[str] = []
        ends = ["ring error", "view error"] if self.fails else ["ring success", "view success"]
        if self.is_admitted:
            sure.append("view passed")
            if interrupted:
                # The block may have been interrupted before it has raised, or after.
                unsure += ["ring error", "view error", "ring success", "view success"]
            else:
                sure += ends
        elif interrupted:
            unsure += ["ring blocked", "view blocked", "view passed"]
            unsure += ["ring error", "view error", "ring success", "view success"]
        elif isinstance(raised, RateLimitExceeded):
            sure += ["ring blocked", "view blocked"]
        elif isinstance(raised, StoreError) and raised.charged is not False:
            unsure += ["ring blocked"]
        log.write(
            sure={f"{name} {self.window} {self.key}": 1 for name in sure},
            unsure={f"{name} {self.window} {self.key}": 1 for name in unsure},
        )


class Entries(Work):
    """The limiters of one client."""

    def _options(self, window: str) -> dict[str, Any]:
        return {
            "limits": self.plan[window],
            "prefix": f"{self.plan['prefix']}-{window}",
            "consistency": self.plan["mode"],
            "timeout": self.plan["timeout"],
            "max_origins": self.plan["max_origins"],
            "flush_interval": 0.1,
        }

    def open(self) -> None:
        url = self.plan["url"]
        self.limiters: dict[str, Any] = {
            window: Limiter(url, **self._options(window)) for window in ("wide", "tight")
        }

    async def open_async(self) -> None:
        url = self.plan["url"]
        self.limiters = {
            window: AsyncLimiter(url, **self._options(window)) for window in ("wide", "tight")
        }

    def op(self, rng: random.Random) -> Op:
        return EntryOp(self.limiters, self.plan["keys"], rng)

    def close(self) -> None:
        for limiter in self.limiters.values():
            limiter.flush()
            limiter.close()

    async def close_async(self) -> None:
        for limiter in self.limiters.values():
            await limiter.flush()
            await limiter.aclose()


if __name__ == "__main__":
    Client(Entries).run()
