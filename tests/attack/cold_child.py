"""The child of scenario `cold_start`."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter

from distwindow import Limiter
from tests.attack.children import alive_for, plan, say, watched


def main() -> None:
    told = plan()
    limiter = Limiter(
        told["url"], told["limit"], prefix=told["prefix"], consistency="eventual", timeout=2
    )
    keys = [f"k{number}" for number in range(told["keys"])]
    barrier = threading.Barrier(told["threads"])
    allowed: list[Counter[str]] = []
    refused: list[Counter[str]] = []

    def work(seed: int, yes: Counter[str], no: Counter[str]) -> None:
        rng = random.Random(seed)
        hot = rng.sample(keys, 20)
        barrier.wait()
        until, turn = time.monotonic() + told["seconds"], 0
        while time.monotonic() < until:
            turn += 1
            key = rng.choice(hot if turn % 4 == 0 else keys)
            (yes if limiter.try_acquire(key) else no)[key] += 1

    threads = []
    for number in range(told["threads"]):
        allowed.append(Counter())
        refused.append(Counter())
        args = (told["seed"] + number, allowed[-1], refused[-1])
        threads.append(threading.Thread(target=work, args=args))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limiter.flush()
    limiter.close()
    yes, no = sum(allowed, Counter()), sum(refused, Counter())
    say(done=True, allowed=yes, refused=no, calls=yes.total() + no.total())


if __name__ == "__main__":
    watched()
    alive_for(50)
    sys.setswitchinterval(0.0005)
    main()
