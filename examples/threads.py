"""Eight threads share one limit: python examples/threads.py [URL]

memory://                   the threads of this process share it (the default)
redis://localhost:6379/0    all processes that run this share it
"""

import sys
import threading
from collections import Counter

from distwindow import Limiter

THREADS, CALLS = 8, 40


def main(url: str = "memory://") -> Counter[str]:
    results: Counter[str] = Counter()
    with Limiter(url, "100/minute") as limiter:
        limiter.reset("examples:threads")

        def call() -> None:
            decisions = [bool(limiter.try_acquire("examples:threads")) for _ in range(CALLS)]
            results.update("admitted" if decision else "refused" for decision in decisions)

        threads = [threading.Thread(target=call) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{THREADS * CALLS} calls: {results['admitted']} admitted, {results['refused']} refused")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
