"""The child of scenario `storm`: calls amid interrupts, alone or beside other threads."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import redis

from distwindow import ConfigurationError, Limit, Limiter, StoreError
from tests.attack.children import alive_for, plan, say, watched
from tests.attack.frame import FOREVER
from tests.attack.interrupts import Interrupts, now_s
from tests.attack.stored import stored

TIMEOUT_S = 1.0
SLACK_S = 1.0
LINE_S = 1.5
HANG_S = float(plan().get("hang_s", 10.0)) if __name__ == "__main__" else 10.0
TIGHT = "5/day"


class Tally:
    """What one thread knows of its calls. All by assignment: no interrupt leaves half of it."""

    def __init__(self) -> None:
        self.certain: dict[str, int] = defaultdict(int)
        self.unsure: dict[str, int] = defaultdict(int)
        self.ends: dict[str, int] = defaultdict(int)
        self.unsure_ends: dict[str, int] = defaultdict(int)
        self.blocked: dict[str, int] = defaultdict(int)
        self.unsure_blocked: dict[str, int] = defaultdict(int)
        self.key: str | None = None
        """Of the call under way; so its cost, and in which of the three it will be counted."""
        self.cost = 0
        self.what = ""
        self.calls = 0
        self.worst_s = 0.0
        self.began = 0.0

    def doubt(self) -> None:
        """The call under way has ended with an error: whether it has counted is not known."""
        key, cost = self.key, self.cost
        self.key = None
        if key is None:
            return
        if self.what == "refund":
            self.certain[key] -= cost
        if self.what == "tight":
            self.unsure_blocked[key] += cost
        else:
            self.unsure[key] += cost
        if self.what == "entry":
            self.unsure_ends[key] += 1


class Calls:
    """The limiters and the calls to them."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.rng = random.Random(told["seed"])
        self.keys = [f"k{number}" for number in range(told["keys"])]
        self.unknown = 0
        self.waited = 0
        self.limiter = self.made(FOREVER)
        self.tight_limiter = self.made(TIGHT)

    def made(self, limit: str) -> Limiter:
        return Limiter(
            self.told["url"],
            limit,
            prefix=self.told["prefix"] + ("-tight" if limit == TIGHT else ""),
            consistency=self.told["mode"],
            timeout=TIMEOUT_S,
            flush_interval=0.05,
            sync_interval=0.05,
        )

    def op(self, tally: Tally, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """The next thing to do, with its name."""
        # Of a planted fault nothing else is to be seen.
        draw = 0.92 if self.told.get("planted") else rng.random()
        if draw < 0.6:
            calls = [(rng.choice(self.keys), rng.choice([1, 1, 3])) for _ in range(40)]
            return "try_acquire", partial(self.hits, tally, calls)
        key = rng.choice(self.keys)
        for most, name in (
            (0.72, "tight"),
            (0.78, "entry"),
            (0.84, "refund"),
            (0.90, "acquire"),
            (0.94, "peek"),
            (0.97, "stats"),
        ):
            if draw < most:
                return name, partial(getattr(self, name), tally, key)
        return "flush", partial(self.flush, tally, key)

    def hits(self, tally: Tally, calls: list[tuple[str, int]]) -> None:
        certain, acquire, clock = tally.certain, self.limiter.try_acquire, now_s
        for number, (key, cost) in enumerate(calls):
            name = key.encode() if number % 3 == 0 else key
            tally.what, tally.cost, tally.key = "call", cost, key
            tally.began = clock()
            decision = acquire(name, cost)
            if decision[0]:
                certain[key] = certain[key] + cost
            tally.key = None
            tally.calls = tally.calls + 1
            spent = clock() - tally.began
            if spent > tally.worst_s:
                tally.worst_s = spent

    def tight(self, tally: Tally, key: str) -> None:
        name = "t" + key[-1]
        for _ in range(10):
            tally.what, tally.cost, tally.key = "tight", 2, name
            decision = self.tight_limiter.try_acquire(name, 2)
            if not decision[0]:
                tally.blocked[name] = tally.blocked[name] + 2
            tally.key = None

    def entry(self, tally: Tally, key: str) -> None:
        tally.what, tally.cost, tally.key = "entry", 1, key
        try:
            with self.limiter.entry(key):
                if tally.calls % 2:
                    raise LookupError
        except LookupError:
            pass
        tally.certain[key] = tally.certain[key] + 1
        tally.ends[key] = tally.ends[key] + 1
        tally.key = None

    def refund(self, tally: Tally, key: str) -> None:
        tally.what, tally.cost, tally.key = "call", 4, key
        decision = self.limiter.try_acquire(key, 4)
        tally.certain[key] = tally.certain[key] + 4
        tally.what = "refund"
        given = self.limiter.refund(decision)
        tally.certain[key] = tally.certain[key] - given
        tally.key = None

    def acquire(self, tally: Tally, key: str) -> None:
        tally.what, tally.cost, tally.key = "call", 1, key
        began = now_s()
        self.limiter.acquire(key, timeout=LINE_S)
        if now_s() - began > LINE_S * 0.8:
            self.waited = self.waited + 1  # in a line in which nobody can be for that long
        tally.certain[key] = tally.certain[key] + 1
        tally.key = None

    def peek(self, tally: Tally, key: str) -> None:
        self.limiter.peek(key)

    def stats(self, tally: Tally, key: str) -> None:
        self.limiter.stats(key)

    def flush(self, tally: Tally, key: str) -> None:
        self.limiter.flush()


def wrong(storm: Interrupts, tally: Tally, name: str, caught: BaseException | None) -> None:
    """What a call has raised that nobody has promised."""
    if isinstance(caught, StoreError):
        storm.tally[f"raised {type(caught).__name__}"] += 1
    elif caught is not None:
        storm.wrong(f"raised {type(caught).__name__}", call=name, error=repr(caught)[:300])


class Others:
    """The other threads: they call all the time, and must neither wait long nor see an error."""

    def __init__(self, calls: Calls, interrupts: Interrupts, number: int) -> None:
        self.tallies = [Tally() for _ in range(number)]
        self.stop = False
        self._calls, self._interrupts = calls, interrupts
        self.threads = [
            threading.Thread(target=self._work, args=(tally,), daemon=True)
            for tally in self.tallies
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, tally: Tally) -> None:
        rng = random.Random(id(tally))
        while not self.stop:
            name, work = self._calls.op(tally, rng)
            tally.began = time.monotonic()
            error: Exception | None = None
            try:
                work()
            except Exception as exc:
                error = exc
                closed = isinstance(exc, ConfigurationError) and "closed" in str(exc)
                if not closed:  # another thread has closed it amid this call
                    wrong(self._interrupts, tally, f"{name} in another thread", exc)
            if error is not None:
                tally.doubt()
            tally.worst_s = max(tally.worst_s, time.monotonic() - tally.began)
            tally.began = float("inf")
            time.sleep(rng.random() * 0.002)

    def stuck(self) -> list[int]:
        """Who has been in one operation for far too long."""
        now = time.monotonic()
        return [i for i, tally in enumerate(self.tallies) if now - tally.began > HANG_S - 2]

    def join(self) -> bool:
        self.stop = True
        until = time.monotonic() + HANG_S - 2
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)


def storm(told: dict[str, Any]) -> None:
    """Rounds until the time is up or there were enough interrupts; then the reckoning."""
    rng = random.Random(told["seed"])
    interrupts, calls, mine = Interrupts(rng), Calls(told), Tally()
    others = Others(calls, interrupts, told["threads"] - 1)
    until, next_look = time.monotonic() + told["seconds"], 0.0
    while time.monotonic() < until and interrupts.tally["interrupts"] < told["interrupts"]:
        if time.monotonic() > next_look:
            next_look = time.monotonic() + 0.5
            alive_for(HANG_S)
            if others.stuck():
                interrupts.wrong("another thread hangs", threads=others.stuck())
                faulthandler.dump_traceback()
                break
        within = rng.choice([30e-6, 100e-6, 400e-6, 3e-3])
        if told.get("planted") == "twice":
            within = 100.0  # no interrupts
        if rng.random() < 0.002 and not told.get("planted"):
            close_amid(calls, interrupts, within)
            continue
        name, work = calls.op(mine, rng)
        began = time.monotonic()
        outcome = interrupts.round(name, work, within)
        spent = time.monotonic() - (mine.began if name == "try_acquire" else began)
        mine.worst_s = max(mine.worst_s, spent)
        if outcome.caught is not None:
            mine.doubt()
            if not outcome.interrupted:
                wrong(interrupts, mine, name, outcome.caught)
    if not others.join():
        interrupts.wrong("another thread hangs", threads=others.stuck())
        faulthandler.dump_traceback()
    alive_for(30)
    reckon(calls, interrupts, [mine, *others.tallies])


def close_amid(calls: Calls, interrupts: Interrupts, within: float) -> None:
    """Close the limiter amid the calls of the other threads, interrupted, and then once more."""
    old = calls.limiter
    calls.limiter = calls.made(FOREVER)
    outcome = interrupts.round("close", old.close, within)
    if outcome.caught is not None and not outcome.interrupted:
        interrupts.wrong(f"close raised {type(outcome.caught).__name__}")
    old.close()
    calls.unknown += old.unknown_total
    interrupts.tally["closes"] += 1


def reckon(calls: Calls, interrupts: Interrupts, tallies: list[Tally]) -> None:
    """Everything is told; then all is said to the parent, who compares it with the server."""
    for _ in range(5):
        try:
            calls.limiter.flush()
            break
        except StoreError as exc:
            interrupts.tally["flushes that failed"] += 1
            say(flush=repr(exc))
    else:
        interrupts.wrong("flush fails, though nothing is wrong with the server")
    worker_works(calls, interrupts, tallies[0])
    calls.unknown += calls.limiter.unknown_total
    calls.limiter.close()
    calls.tight_limiter.close()
    sums: dict[str, dict[str, int]] = {}
    for name in ("certain", "unsure", "ends", "unsure_ends", "blocked", "unsure_blocked"):
        total: dict[str, int] = defaultdict(int)
        for tally in tallies:
            for key, number in getattr(tally, name).items():
                total[key] += number
        sums[name] = dict(total)
    if calls.waited:
        interrupts.wrong("acquire waits its whole time, under a limit that refuses nobody")
    worst = max(tally.worst_s for tally in tallies)
    if worst > TIMEOUT_S + SLACK_S:
        interrupts.wrong("a call outlives its deadline", seconds=round(worst, 2))
    interrupts.tally["calls"] = sum(tally.calls for tally in tallies)
    interrupts.tally["slowest call, ms (max)"] = int(worst * 1000)
    interrupts.tally["unknown"] = calls.unknown
    say(done=True, sums=sums, figures=interrupts.tally, history=interrupts.history)


def worker_works(calls: Calls, interrupts: Interrupts, tally: Tally) -> None:
    """The worker tells by itself what was counted here: a thread that has died does not."""
    key = "worker"
    for _ in range(12):
        calls.tight_limiter.try_acquire(key)
    server = redis.Redis.from_url(calls.told["direct_url"])
    name = calls.told["prefix"] + "-tight"
    until = time.monotonic() + 8
    while stored(server, name, key, Limit(TIGHT)).blocked < 7:
        if time.monotonic() > until:
            interrupts.wrong("the worker does not tell any more")
            faulthandler.dump_traceback()
            break
        time.sleep(0.02)
    server.close()


def connecting(told: dict[str, Any]) -> None:
    """Each round connects anew, over a link that is slow or silent."""
    rng = random.Random(told["seed"])
    interrupts, within = Interrupts(rng), told["within"]
    until, worst = time.monotonic() + told["seconds"], 0.0
    while time.monotonic() < until and interrupts.tally["interrupts"] < told["interrupts"]:
        alive_for(HANG_S)
        limiter = Limiter(
            told["url"], FOREVER, prefix=told["prefix"], consistency=told["mode"], timeout=0.25
        )
        call: Callable[[], object] = partial(limiter.try_acquire, "k")
        if told["mode"] == "eventual":
            call = partial(limiter.peek, "k") if rng.random() < 0.5 else limiter.flush
            limiter.try_acquire("k")
        began = time.monotonic()
        outcome = interrupts.round("connecting", call, within)
        worst = max(worst, time.monotonic() - began)
        if outcome.caught is not None and not outcome.interrupted:
            wrong(interrupts, Tally(), "connecting", outcome.caught)
        if told["silent"]:
            continue  # closing it would wait for what the server is to be told
        limiter.close()
    if worst > 0.25 + SLACK_S:
        interrupts.wrong("a call outlives its deadline", seconds=round(worst, 2))
    interrupts.tally["slowest call, ms (max)"] = int(worst * 1000)
    say(done=True, sums={}, figures=interrupts.tally, history=interrupts.history)


def plant(what: str) -> None:
    """A fault of the library, to see that the harness finds it."""
    real = Limiter.peek

    def swallowing(self: Limiter, key: Any) -> Any:
        with suppress(Exception):
            time.sleep(0.01)

    def hanging(self: Limiter, key: Any) -> Any:
        while True:
            with suppress(BaseException):
                time.sleep(1)

    def counting_twice(self: Limiter, key: Any) -> Any:
        self.try_acquire(key)  # which nobody has called
        return real(self, key)

    planted: Any = {"swallow": swallowing, "hang": hanging, "twice": counting_twice}[what]
    Limiter.peek = planted  # type: ignore[method-assign]


if __name__ == "__main__":
    watched()
    sys.setswitchinterval(0.0005)
    task = plan()
    if task.get("planted"):
        plant(task["planted"])
    (connecting if task["connecting"] else storm)(task)
    # What a daemon thread that hangs would hold up at exit was said before.
    sys.stdout.flush()
    os._exit(0)
