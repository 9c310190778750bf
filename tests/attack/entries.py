"""Scenario `entries`: entries with origins that succeed, fail, and are interrupted, cancelled or
killed, over a faulty link, with every consistency.

Each end is counted exactly once in the ring and in the minute view, and the views by origin sum up
to that of all entries.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

from distwindow import AsyncLimiter, Limit, Limiter, RateLimitExceeded, StoreError
from tests.attack.client import Client, ClientLog, Op, Work, result_of
from tests.attack.fleet import attacked, play_fleets
from tests.attack.harness import FOREVER, MODES, Run, Violation
from tests.attack.history import check_tallies, read_all_counts
from tests.servers import Standalone

WINDOWS = {"wide": FOREVER, "tight": "5/day"}
KEYS = ["a", "b", "c"]
ORIGINS = [f"app-{number}" for number in range(5)]
"""More than `max_origins`: some are counted together."""


def entries(run: Run) -> None:
    """The seed draws the consistency and the faults."""
    # Much less than a minute, so that the minute view has everything.
    play_fleets(run, "entries", MODES, _play)


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    plan = {"mode": mode}
    with attacked(run, rng, server, "entries", plan, seconds) as (_, history):
        stored: Counter[str] = Counter()
        for window, limit in WINDOWS.items():
            prefix = f"entries-{window}"
            with server.client(decode_responses=False) as client:
                for key, counts in read_all_counts(client, prefix, KEYS, Limit(limit)).items():
                    for name in ("success", "error", "blocked"):
                        stored[f"ring {name} {window} {key}"] += getattr(counts, name)
            with Limiter(server.url, limit, prefix=prefix, timeout=5) as limiter:
                for key in KEYS:
                    for name, number in _minute(limiter, key).items():
                        stored[f"view {name} {window} {key}"] += number
        # Four calls may be under way in a process that is killed. Each counts a pass in the view,
        # and its end in the view and the ring, or a block in both.
        under_way = len(history.dead) * 4 * 3
        check_tallies("entries", stored, history, sent_later=True, under_way=under_way)
        certain, _ = history.tallies()
        run.count("calls", sum(n for name, n in certain.items() if name.startswith("view")))
        run.count("ends checked", sum(n for name, n in certain.items() if "success" in name))


def _minute(limiter: Limiter, key: str) -> dict[str, int]:
    """Return the minute view of all entries, which those of their origins sum up to."""
    view, by_origin = limiter.minute(key), limiter.origins(key)
    found = {name: getattr(view, name) for name in ("passed", "blocked", "success", "error")}
    for name, number in found.items():
        of_origins = sum(getattr(origin, name) for origin in by_origin.values())
        if of_origins != number:
            raise Violation(
                f"{name} of {key!r}: {number} in the view of all entries, {of_origins} in those of "
                "origins",
                [f"{name}: {stats}" for name, stats in by_origin.items()],
            )
    return found


# -- the client --


class EntryOp(Op):
    """One entry."""

    name = "entry"
    expected = (StoreError, RateLimitExceeded)

    def __init__(self, work: Entries, rng: random.Random) -> None:
        self.window = "tight" if rng.random() < 0.2 else "wide"
        self.limiter, self.key = work.limiters[self.window], rng.choice(KEYS)
        self.origin = rng.choice(ORIGINS)
        self.fails = rng.random() < 0.3
        self.is_admitted = False

    def run(self) -> None:
        with suppress(LookupError), self.limiter.entry(self.key, origin=self.origin):
            self.is_admitted = True
            if self.fails:
                raise LookupError

    async def run_async(self) -> None:
        with suppress(LookupError):
            async with self.limiter.entry(self.key, origin=self.origin):
                self.is_admitted = True
                if self.fails:
                    raise LookupError

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        sure: list[str] = []
        unsure: list[str] = []
        failed, succeeded = ["ring error", "view error"], ["ring success", "view success"]
        if self.is_admitted:
            sure.append("view passed")
            if interrupted:
                # The block may have been interrupted before it has raised, or after.
                unsure += failed + succeeded
            else:
                sure += failed if self.fails else succeeded
        elif interrupted:
            unsure += ["ring blocked", "view blocked", "view passed", *failed, *succeeded]
        elif isinstance(raised, RateLimitExceeded):
            sure += ["ring blocked", "view blocked"]
        elif isinstance(raised, StoreError) and raised.charged is not False:
            unsure += ["ring blocked"]
        log.count(
            (f"{name} {self.window} {self.key}" for name in sure),
            (f"{name} {self.window} {self.key}" for name in unsure),
        )


class Entries(Work):
    """The limiters of one client."""

    def open(self) -> None:
        self.limiters = {
            window: self.make(
                Limiter, AsyncLimiter, limits=limit, prefix=f"entries-{window}", timeout=0.5,
                consistency=self.plan["mode"], max_origins=3, flush_interval=0.1,
            )
            for window, limit in WINDOWS.items()
        }  # fmt: skip

    def op(self, rng: random.Random) -> Op:
        return EntryOp(self, rng)

    async def close(self) -> None:
        for limiter in self.limiters.values():
            await result_of(limiter.flush())
            await self.end(limiter)


if __name__ == "__main__":
    Client(Entries).run()
