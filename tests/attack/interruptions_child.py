"""The child of scenario `interruptions`: interrupted calls, alone or beside other threads."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from distwindow import ConfigurationError, Limit, Limiter, StoreError
from tests.attack.children import dump_stacks_on_sigquit, read_plan, report, restart_watchdog
from tests.attack.harness import FOREVER
from tests.attack.history import read_counts
from tests.attack.interrupter import Interrupter
from tests.attack.interruptions_calls import TIGHT, TIMEOUT_S, CallCounts, Calls

SLACK_S = 1.0
HANG_S = 10.0


def check_error(interrupter: Interrupter, name: str, caught: BaseException | None) -> None:
    """Record an exception of a call that is not documented."""
    if isinstance(caught, StoreError):
        interrupter.figures[f"raised {type(caught).__name__}"] += 1
    elif caught is not None:
        interrupter.wrong(f"raised {type(caught).__name__}", call=name, error=repr(caught)[:300])


class OtherThreads:
    """Threads that are not interrupted: they call all the time, and no call may be late or fail."""

    def __init__(self, calls: Calls, interrupter: Interrupter, number: int) -> None:
        self.counts_of_threads = [CallCounts() for _ in range(number)]
        self.stop = False
        self._calls, self._interrupter = calls, interrupter
        self.threads = [
            threading.Thread(target=self._work, args=(counts,), daemon=True)
            for counts in self.counts_of_threads
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, counts: CallCounts) -> None:
        rng = random.Random(id(counts))
        while not self.stop:
            name, work = self._calls.op(counts, rng)
            counts.began = time.monotonic()
            error: Exception | None = None
            try:
                work()
            except Exception as exc:
                error = exc
                closed = isinstance(exc, ConfigurationError) and "closed" in str(exc)
                if not closed:  # the main thread has closed it during this call
                    check_error(self._interrupter, f"{name} in another thread", exc)
            if error is not None:
                counts.on_error()
            counts.worst_s = max(counts.worst_s, time.monotonic() - counts.began)
            counts.began = float("inf")
            time.sleep(rng.random() * 0.002)  # the main thread runs meanwhile

    def stuck(self) -> list[int]:
        """Return the numbers of the threads whose operation takes far too long."""
        now = time.monotonic()
        return [
            i for i, counts in enumerate(self.counts_of_threads) if now - counts.began > HANG_S - 2
        ]

    def join(self) -> bool:
        self.stop = True
        until = time.monotonic() + HANG_S - 2
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)


def call_interrupted(plan: dict[str, Any]) -> None:
    """Call until the time is over or there were enough interruptions, then report the counts."""
    rng = random.Random(plan["seed"])
    interrupter, calls, own = Interrupter(rng), Calls(plan), CallCounts()
    others = OtherThreads(calls, interrupter, plan["threads"] - 1)
    until, next_check_at = time.monotonic() + plan["seconds"], 0.0
    while time.monotonic() < until and interrupter.figures["interruptions"] < plan["interruptions"]:
        if time.monotonic() > next_check_at:
            next_check_at = time.monotonic() + 0.5
            restart_watchdog(HANG_S)
            if others.stuck():
                interrupter.wrong("another thread hangs", threads=others.stuck())
                faulthandler.dump_traceback()
                break
        within = rng.choice([30e-6, 100e-6, 400e-6, 3e-3])
        if rng.random() < 0.002:
            close_during_calls(calls, interrupter, within)
            continue
        name, work = calls.op(own, rng)
        began = own.began = time.monotonic()
        outcome = interrupter.round(name, work, within)
        spent = time.monotonic() - (own.began if name == "try_acquire" else began)
        own.worst_s = max(own.worst_s, spent)
        if outcome.caught is not None:
            own.on_error()
            if not outcome.interrupted:
                check_error(interrupter, name, outcome.caught)
    if not others.join():
        interrupter.wrong("another thread hangs", threads=others.stuck())
        faulthandler.dump_traceback()
    restart_watchdog(30)
    report_counts(calls, interrupter, [own, *others.counts_of_threads])


def close_during_calls(calls: Calls, interrupter: Interrupter, within: float) -> None:
    """Close the limiter during the calls of the other threads: interrupted, and then once more."""
    old = calls.limiter
    calls.limiter = calls.make_limiter(FOREVER)
    outcome = interrupter.round("close", old.close, within)
    if outcome.caught is not None and not outcome.interrupted:
        interrupter.wrong(f"close raised {type(outcome.caught).__name__}")
    old.close()
    calls.unknown += old.unknown_total
    interrupter.figures["closes"] += 1


def report_counts(
    calls: Calls, interrupter: Interrupter, counts_of_threads: list[CallCounts]
) -> None:
    """Flush all counts, and report them to the parent, which compares them with the server."""
    for _ in range(5):
        try:
            calls.limiter.flush()
            break
        except StoreError as exc:
            interrupter.figures["flushes that failed"] += 1
            report(flush=repr(exc))
    else:
        interrupter.wrong("flush fails, although the server is sound")
    check_worker(calls, interrupter, counts_of_threads[0])
    calls.unknown += calls.limiter.unknown_total
    calls.limiter.close()
    calls.tight_limiter.close()
    sums: dict[str, dict[str, int]] = {}
    for name in ("certain", "unsure", "ends", "unsure_ends", "blocked", "unsure_blocked"):
        total: dict[str, int] = defaultdict(int)
        for counts in counts_of_threads:
            for key, number in getattr(counts, name).items():
                total[key] += number
        sums[name] = dict(total)
    if calls.waited:
        interrupter.wrong("acquire waits for its whole timeout, although no call is refused")
    worst = max(counts.worst_s for counts in counts_of_threads)
    if worst > TIMEOUT_S + SLACK_S:
        interrupter.wrong("a call ends after its deadline", seconds=round(worst, 2))
    interrupter.figures["calls"] = sum(counts.calls for counts in counts_of_threads)
    interrupter.figures["slowest call, ms (max)"] = int(worst * 1000)
    interrupter.figures["unknown"] = calls.unknown
    report(done=True, sums=sums, figures=interrupter.figures, history=interrupter.history)


def check_worker(calls: Calls, interrupter: Interrupter, counts: CallCounts) -> None:
    """Check that the worker flushes by itself, which it would not do if its thread had ended."""
    key = "worker"
    for _ in range(12):
        calls.tight_limiter.try_acquire(key)
    server = redis.Redis.from_url(calls.plan["direct_url"])
    name = calls.plan["prefix"] + "-tight"
    until = time.monotonic() + 8
    while read_counts(server, name, key, Limit(TIGHT)).blocked < 7:
        if time.monotonic() > until:
            interrupter.wrong("the worker does not flush any more")
            faulthandler.dump_traceback()
            break
        time.sleep(0.02)  # between two polls
    server.close()


def connect_interrupted(plan: dict[str, Any]) -> None:
    """Open a new connection in each round, over a link that is slow or silent."""
    rng = random.Random(plan["seed"])
    interrupter, within = Interrupter(rng), plan["within"]
    until, worst = time.monotonic() + plan["seconds"], 0.0
    while time.monotonic() < until and interrupter.figures["interruptions"] < plan["interruptions"]:
        restart_watchdog(HANG_S)
        limiter = Limiter(
            plan["url"], FOREVER, prefix=plan["prefix"], consistency=plan["mode"], timeout=0.25
        )
        call: Callable[[], object] = partial(limiter.try_acquire, "k")
        if plan["mode"] == "eventual":
            call = partial(limiter.peek, "k") if rng.random() < 0.5 else limiter.flush
            limiter.try_acquire("k")
        began = time.monotonic()
        outcome = interrupter.round("connecting", call, within)
        worst = max(worst, time.monotonic() - began)
        if outcome.caught is not None and not outcome.interrupted:
            check_error(interrupter, "connecting", outcome.caught)
        if plan["silent"]:
            continue  # close would wait for the flush of its counts
        limiter.close()
    if worst > 0.25 + SLACK_S:
        interrupter.wrong("a call ends after its deadline", seconds=round(worst, 2))
    interrupter.figures["slowest call, ms (max)"] = int(worst * 1000)
    report(done=True, sums={}, figures=interrupter.figures, history=interrupter.history)


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    sys.setswitchinterval(0.0005)
    plan = read_plan()
    (connect_interrupted if plan["connecting"] else call_interrupted)(plan)
    # All is reported. A daemon thread that hangs would delay a normal exit.
    sys.stdout.flush()
    os._exit(0)
