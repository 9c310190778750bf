"""Twelve threads, of which three at a time use a database: python examples/concurrency.py [URL]

memory://                   the threads of this process share the slots (the default)
redis://localhost:6379/0    all processes that run this share them
"""

import sys
import threading
import time

from distwindow import Concurrency, ConcurrencyExceeded

THREADS, SLOTS = 12, 3


def main(url: str = "memory://") -> dict[str, int]:
    inside: list[int] = []
    most = done = 0
    with Concurrency(url, SLOTS) as slots:

        def report(number: int) -> None:
            nonlocal most, done
            try:
                with slots.hold("examples:report", timeout=30.0) as slot:
                    inside.append(number)
                    most = max(most, len(inside))
                    for _ in range(5):  # a long task looks now and then whether it may go on
                        if slot.lost:
                            break
                        time.sleep(0.002)
                    else:
                        done += 1
                    inside.remove(number)
            except ConcurrencyExceeded as exc:
                print(f"report {number}: {exc}")

        threads = [threading.Thread(target=report, args=[n]) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = slots.stats("examples:report").held
    print(f"{done} reports, at most {most} at once, {left} slots still held")
    return {"done": done, "most": most, "left": left}


if __name__ == "__main__":
    main(*sys.argv[1:])
