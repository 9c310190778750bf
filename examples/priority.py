"""Payments and reports share one limit: python examples/priority.py [URL]

Reports use the window up. A payment that comes then is not refused: it borrows permits of a coming
bucket, and waits until that bucket begins.
"""

import sys
import time
from collections import Counter

from distwindow import Limiter


def main(url: str = "memory://") -> Counter[str]:
    outcomes: Counter[str] = Counter()
    # A payment may wait for as long as the window is, and half of the limit may be lent.
    with Limiter(url, "10/second", max_wait=1.0, borrow_share=0.5) as limiter:
        limiter.reset("examples:priority")
        while limiter.try_acquire("examples:priority"):
            outcomes["reports admitted"] += 1
        for _ in range(6):
            decision = limiter.try_acquire("examples:priority", priority=True)
            outcomes[f"payments {decision.reason}"] += 1
        print(f"borrowed: {limiter.stats('examples:priority').borrowed}")

        began = time.monotonic()
        decision = limiter.acquire("examples:priority", priority=True)
        waited = time.monotonic() - began
        print(f"a payment that waits: {decision.reason}, after {waited:.1f} s")
    print(dict(outcomes))
    return outcomes


if __name__ == "__main__":
    main(*sys.argv[1:])
