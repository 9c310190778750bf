"""The child of scenario `cold_start`."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter

from distwindow import Limiter
from tests.attack.children import dump_stacks_on_sigquit, read_plan, report, restart_watchdog


def main() -> None:
    plan = read_plan()
    limiter = Limiter(
        plan["url"], plan["limit"], prefix=plan["prefix"], consistency="eventual", timeout=2
    )
    keys = [f"k{number}" for number in range(plan["keys"])]
    barrier = threading.Barrier(plan["threads"])
    allowed: list[Counter[str]] = []
    refused: list[Counter[str]] = []

    def work(seed: int, admissions: Counter[str], refusals: Counter[str]) -> None:
        rng = random.Random(seed)
        hot = rng.sample(keys, 20)
        barrier.wait()
        until, number = time.monotonic() + plan["seconds"], 0
        while time.monotonic() < until:
            number += 1
            key = rng.choice(hot if number % 4 == 0 else keys)
            (admissions if limiter.try_acquire(key) else refusals)[key] += 1

    threads = []
    for number in range(plan["threads"]):
        allowed.append(Counter())
        refused.append(Counter())
        args = (plan["seed"] + number, allowed[-1], refused[-1])
        threads.append(threading.Thread(target=work, args=args))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limiter.flush()
    limiter.close()
    admissions, refusals = sum(allowed, Counter()), sum(refused, Counter())
    calls = admissions.total() + refusals.total()
    report(done=True, allowed=admissions, refused=refusals, calls=calls)


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    restart_watchdog(50)
    sys.setswitchinterval(0.0005)
    main()
