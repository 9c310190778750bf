"""One of several processes under one limit: writes each decision that its application has seen, and
each time what its observer was told in all, in the order of both.

    python -m tests.observer.counting_process URL PREFIX CONSISTENCY CALLS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from distwindow import Counts, Limiter
from tests.observer.told import Seen, Told


def write(kind: str, *words: object) -> None:
    os.write(1, f"{kind} {' '.join(map(str, words))}\n".encode())  # whole lines, of two threads


class Written(Told):
    def on_counts(self, batch: Sequence[Counts]) -> None:
        super().on_counts(batch)
        by_result = [0, 0]
        for (_, result, _, _), permits in self.permits.items():
            by_result[result == "refused"] += permits
        write("told", *by_result)


def main(url: str, prefix: str, consistency: Any, calls: str) -> None:
    with Limiter(
        url, "300/hour", prefix=prefix, consistency=consistency, observer=Written(),
        flush_interval=0.02, sync_interval=0.02, timeout=10,
    ) as limiter:  # fmt: skip
        for number in range(int(calls)):
            cost = 1 + (number % 5 == 0)
            decision = limiter.try_acquire(f"key {number % 2}", cost)
            write("seen", Seen.name_of(decision)[1], cost)


if __name__ == "__main__":
    main(*sys.argv[1:])
