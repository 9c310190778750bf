"""Eight threads share one limit: python examples/threads.py [URL]

memory://                   inside this process (the default)
redis://localhost:6379/0    and with every other process that runs this, too
"""

import sys
import threading
from collections import Counter

from distwindow import Limiter

THREADS, CALLS = 8, 40


def main(url: str = "memory://") -> Counter[str]:
    counted: Counter[str] = Counter()
    with Limiter(url, "100/minute") as limiter:
        limiter.reset("examples:threads")

        def work() -> None:
            answers = [bool(limiter.try_acquire("examples:threads")) for _ in range(CALLS)]
            counted.update("admitted" if answer else "refused" for answer in answers)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{THREADS * CALLS} calls: {counted['admitted']} admitted, {counted['refused']} refused")
    return counted


if __name__ == "__main__":
    main(*sys.argv[1:])
