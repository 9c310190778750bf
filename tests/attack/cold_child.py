"""The child of scenarios `cold_start` and `refused_rights`: threads that call random keys."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from distwindow import CircuitBreaker, DistwindowError, ErrorCount, Limiter
from tests.attack.children import dump_stacks_on_sigquit, read_plan, report, restart_watchdog

COUNTED = ErrorCount(10**9, window=600.0)
"""A rule that never opens a breaker, and whose window is longer than any run."""
RESTORED_S = 20.0
"""How long a child tries to flush at its end."""


class Calls:
    """What one thread has called, and what came of it, by key."""

    def __init__(self) -> None:
        self.allowed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        """Calls that may have been charged."""
        self.failed = 0
        """Calls that were surely not executed."""

    def call(self, target: Any, key: str) -> None:
        if isinstance(target, CircuitBreaker):
            with target.call(key):
                self.allowed[key] += 1
            return
        try:
            (self.allowed if target.try_acquire(key) else self.refused)[key] += 1
        except DistwindowError as exc:
            if getattr(exc, "charged", False) is None:
                self.unknown[key] += 1
            else:
                self.failed += 1


class Lines(logging.Handler):
    """Keeps the log lines of distwindow."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    plan = read_plan()
    logging.getLogger("distwindow").addHandler(lines := Lines())
    target: Any
    if plan["mode"] == "breaker":
        target = CircuitBreaker(plan["url"], COUNTED, prefix=plan["prefix"], timeout=2)
    else:
        target = Limiter(
            plan["url"], plan["limit"], prefix=plan["prefix"], consistency=plan["mode"], timeout=2
        )
    keys = [f"k{number}" for number in range(plan["keys"])]
    barrier = threading.Barrier(plan["threads"])
    calls = [Calls() for _ in range(plan["threads"])]

    def work(seed: int, own: Calls) -> None:
        rng = random.Random(seed)
        hot = rng.sample(keys, min(20, len(keys)))
        barrier.wait()
        until, number = time.monotonic() + plan["seconds"], 0
        while time.monotonic() < until:
            number += 1
            own.call(target, rng.choice(hot if number % 4 == 0 else keys))
            if plan["pause"]:
                time.sleep(plan["pause"])

    threads = [
        threading.Thread(target=work, args=(plan["seed"] + number, own))
        for number, own in enumerate(calls)
    ]
    report(began=True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + RESTORED_S
    while time.monotonic() < until:
        with suppress(DistwindowError):
            target.flush()
            break
        time.sleep(0.05)  # between two polls
    target.close()
    allowed: Counter[str] = sum((own.allowed for own in calls), Counter())
    refused: Counter[str] = sum((own.refused for own in calls), Counter())
    unknown: Counter[str] = sum((own.unknown for own in calls), Counter())
    report(
        done=True, allowed=allowed, refused=refused, unknown=unknown, lines=lines.texts,
        failed=sum(own.failed for own in calls),
        calls=allowed.total() + refused.total() + unknown.total(),
    )  # fmt: skip


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    restart_watchdog(50)
    sys.setswitchinterval(0.0005)
    main()
