"""A process that reserves and commits, and logs each step as a line of JSON with its time: run by
`test_reserving_fleet.py` as `python -m tests.reserve.reserver URL PREFIX LIMIT SEED LOG`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from distwindow import Limiter

RESERVATIONS = 200


def main(url: str, prefix: str, limit: str, seed: str, log: str) -> None:
    rng = random.Random(int(seed))
    with Path(log).open("a", buffering=1) as lines:

        def note(number: int, event: str, **more: Any) -> None:
            fields = {"number": number, "event": event, "at": time.monotonic(), **more}
            lines.write(json.dumps(fields) + "\n")

        with Limiter(url, limit, prefix=prefix, timeout=20) as limiter:
            for number in range(RESERVATIONS):
                estimate = rng.randint(1, 20)
                note(number, "ask", estimate=estimate)
                reservation = limiter.try_reserve("k", estimate)
                if not reservation:
                    note(number, "refused")
                    continue
                note(number, "reserved", now_ms=reservation.decision.now_ms)
                time.sleep(rng.random() * 0.02)  # the call; not waited for
                if rng.random() < 0.1:
                    continue  # forgotten: the estimate stays
                actual, now = rng.randint(0, estimate), rng.random() < 0.3
                note(number, "commit", actual=actual)
                reservation.commit(actual, now=now)
                if now:
                    note(number, "settled")
        note(RESERVATIONS, "closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
