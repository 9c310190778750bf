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
from tests.attack.interrupts import Interrupts
from tests.attack.stored import stored
from tests.attack.storm_calls import TIGHT, TIMEOUT_S, Calls, Tally

SLACK_S = 1.0
HANG_S = 10.0


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
        began = mine.began = time.monotonic()
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
    HANG_S = task.get("hang_s", HANG_S)
    if task.get("planted"):
        plant(task["planted"])
    (connecting if task["connecting"] else storm)(task)
    # What a daemon thread that hangs would hold up at exit was said before.
    sys.stdout.flush()
    os._exit(0)
