"""Scenario `slots`: processes, threads and tasks that hold the slots of a concurrency limit.

`shared`: over a faulty link, with kills, freezes, forks, interruptions and cancellations: never
more slots are held than the limit, and none stays held.
`taken`: an operator takes all slots of a key away now and then: each holder is told.
`order`: callers wait in processes that are frozen, killed and forked: nobody is overtaken by those
who came more than `BOUND_MS` later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distwindow import AsyncConcurrency, Concurrency, ConcurrencyExceeded, StoreError
from distwindow.ring.key import slots_name
from tests.attack.children import now_ms
from tests.attack.client import Client, Op, Work, result_of
from tests.attack.fleet import ALL_FAULTS, PROCESS_FAULTS, Fleet, attacked, kinds_of, play_fleets
from tests.attack.harness import Run, Violation
from tests.attack.history import History
from tests.servers import Standalone

VARIANTS = ["shared", "taken", "order"]
TTL_S, TIMEOUT_S = 1.0, 0.2
SLACK_MS = 500
"""What a busy machine may add to a time, beyond the pauses that a process has noticed."""
BOUND_MS = SLACK_MS
"""By how much later those may have come who overtake a process that did not pause."""
WAITS_S = 5.0
LOOK_S = 0.002
FREED_S = 10.0
"""How long after the last block a slot may stay held, beyond a third of its time to live."""


def slots(run: Run) -> None:
    """The seed draws the limit, the keys and the faults."""
    play_fleets(run, "slots", [*VARIANTS, "shared"], _play)


def _play(run: Run, rng: random.Random, server: Standalone, variant: str, seconds: float) -> None:
    taken, order = variant == "taken", variant == "order"
    limit, keys = rng.randint(1, 4), ["a", "b"][: rng.randint(1, 2)]
    if order:
        limit, keys, seconds = 1, ["a"], max(4.0, seconds)
    plan = {
        "limit": limit, "keys": keys, "long_share": 0.3 if taken else 0.0 if order else 0.05,
        "waits_s": WAITS_S if order else 0.0,
    }  # fmt: skip
    faults = PROCESS_FAULTS if taken or order else ALL_FAULTS
    taken_at: list[tuple[str, float]] = []

    def take(fleet: Fleet) -> None:
        if taken and rng.random() < 0.7:
            key = rng.choice(keys)
            with server.client() as client:
                client.delete(slots_name("slots", key))
            taken_at.append((key, now_ms()))
            fleet.note(f"slots of {key} deleted")

    kinds = ["sync", "async", "sync", "async"] if order else kinds_of(rng)
    with attacked(run, rng, server, "slots", plan, seconds, faults, take, kinds) as (_, history):
        spans = held_spans(history)
        run.count("calls", len(spans))
        run.count("slots lost", sum(span.told for span in spans))
        if taken:
            bound_ms = TTL_S * 1000 / 3 + 2 * TIMEOUT_S * 1000 + SLACK_MS
            run.count("holders told", check_told(spans, taken_at, bound_ms, history))
        else:
            run.maximum("held at once", check_at_most(spans, limit))
        if order:
            later_ms = check_order(spans, BOUND_MS, history)
            run.maximum("ms that an overtaker came later", round(later_ms))
        _check_free(server, keys, history)


def _check_free(server: Standalone, keys: list[str], history: History) -> None:
    """Raise `Violation` unless only killed processes still hold slots, and these end."""
    with Concurrency(server.url, 1, prefix="slots", timeout=5, ttl=10) as reader:
        for key in keys:
            holders = [holder.name for holder in reader.stats(key).holders]
            if not history.dead.issuperset(holders):
                raise Violation(f"{holders} hold {key!r}; dead are {history.dead}")
        until = time.monotonic() + TTL_S + SLACK_MS / 1000
        while any(reader.stats(key).held for key in keys):
            if time.monotonic() > until:
                raise Violation("the slots of a dead process do not end")
            time.sleep(0.02)  # between two polls


# -- the checks --


class Held(NamedTuple):
    """A time in which a holder had its slot, by what it was told; ms on the machine's clock."""

    key: str
    began: float
    ended: float
    """When it looked for the last time and its slot was not lost: a part of the real time."""
    process: str
    told: bool
    """Whether it was then told that the slot was lost."""
    asked: float = 0.0
    """When it asked for the slot."""


def held_spans(history: History) -> list[Held]:
    """Return when slots were held. A holder logs each moment at which it still had its slot."""
    found: dict[tuple[str, int], Held] = {}
    for process, line in history.having("slot"):
        name = process, line["slot"]
        if name not in found:
            at, asked = line["at"], line.get("asked", 0.0)
            found[name] = Held(line["key"], at, at, process, line["lost"], asked)
        elif line["lost"]:
            found[name] = found[name]._replace(told=True)
        else:
            found[name] = found[name]._replace(ended=line["at"])
    return list(found.values())


def check_at_most(spans: Iterable[Held], limit: int) -> int:
    """Raise `Violation` if more slots of a key were held at once than `limit`. Return the most."""
    by_key: dict[str, list[Held]] = defaultdict(list)
    for span in spans:
        if span.ended > span.began:  # otherwise it looked only once
            by_key[span.key].append(span)
    most = 0
    for key, held in by_key.items():
        # An end comes before a beginning at the same time.
        changes = [(span.began, 1, span) for span in held] + [(s.ended, 0, s) for s in held]
        now: set[Held] = set()
        for _, begins, span in sorted(changes, key=lambda change: change[:2]):
            if not begins:
                now.discard(span)
                continue
            now.add(span)
            most = max(most, len(now))
            if len(now) > limit:
                raise Violation(
                    f"{len(now)} slots of {key!r} are held at once, of {limit}",
                    [one._asdict() for one in now],
                )
    return most


def check_order(spans: Sequence[Held], bound_ms: float, history: History) -> float:
    """Raise `Violation` if somebody got a slot before another who had asked for it more than
    `bound_ms` earlier, and whose process did not pause meanwhile. Return the most, ms.
    """
    most = 0.0
    for span in spans:
        for other in spans:
            if other.key != span.key or other.began >= span.began:
                continue
            later_ms = other.asked - span.asked
            if later_ms > most:
                later_ms -= history.paused_ms(span.process, span.asked, span.began)
                most = max(most, later_ms)
            if later_ms > bound_ms:
                raise Violation(
                    f"a slot of {span.key!r} went to one who had asked {later_ms:.0f} ms later",
                    [span._asdict(), other._asdict()],
                )
    return most


def check_told(
    spans: Sequence[Held], taken_at: Iterable[tuple[str, float]], bound_ms: float, history: History
) -> int:
    """Raise `Violation` if a holder still had its slot `bound_ms` after all slots of its key had
    been taken away, by what it was told. Return how many were told in time.
    """
    told = 0
    for key, at in taken_at:
        for span in spans:
            if span.key != key or not span.began < at <= span.ended:
                continue
            late = span.ended - at - history.paused_ms(span.process, at, span.ended)
            if late > bound_ms:
                raise Violation(
                    f"the slots of {key!r} were taken at {at:.0f} ms, and a holder was not told "
                    f"within {bound_ms:.0f} ms",
                    [span._asdict()],
                )
            told += span.told
    return told


# -- the client: while it holds a slot, it logs each moment at which `slot.lost` was still false --


class Holding(Op):
    """One slot, held for a while."""

    name = "hold"
    expected = (ConcurrencyExceeded, StoreError)

    def __init__(self, work: Slots, rng: random.Random) -> None:
        plan = work.plan
        self.slots, self.log = work.slots, work.log
        self.number = next(self.log.numbers)
        self.key = rng.choice(plan["keys"])
        self.timeout = rng.choice([0, 0.05, 0.3])
        is_long = rng.random() < plan["long_share"]
        self.seconds = rng.random() * (3 * TTL_S if is_long else 0.02)
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
        until = time.monotonic() + self.seconds
        while self._is_held(slot) and time.monotonic() < until:  # noqa: ASYNC110 - a look each time
            await asyncio.sleep(LOOK_S)

    def _is_held(self, slot: Any) -> bool:
        at = now_ms()  # before it looks, so that it surely had the slot at that time
        lost = bool(slot.lost)
        self.log.write(slot=self.number, key=self.key, asked=self.asked, at=at, lost=lost)
        return not lost


class Slots(Work):
    """The slots of one client."""

    slots: Any

    def open(self) -> None:
        self.slots = self.make(
            Concurrency, AsyncConcurrency, limit=self.plan["limit"], name=self.log.name,
            prefix="slots", ttl=TTL_S, timeout=TIMEOUT_S,
        )  # fmt: skip

    def op(self, rng: random.Random) -> Op:
        return Holding(self, rng)

    async def close(self) -> None:
        """Wait until this process holds no slot any more; the worker frees those of interrupted
        blocks, and of slots that nobody refers to.
        """

        async def is_free() -> bool:
            try:
                stats = [await result_of(self.slots.stats(key)) for key in self.plan["keys"]]
            except StoreError:  # its machine stands still
                return False
            names = {holder.name for one in stats for holder in one.holders}
            # A forked child has the name of its parent.
            return self.is_forked or self.log.name not in names

        wrong = "slots stay held, although no block has them"
        await self.poll(is_free, TTL_S / 3 + FREED_S, wrong)
        await self.end(self.slots)


if __name__ == "__main__":
    Client(Slots).run()
