"""Jobs that start one after the other, at the pace of the fleet: python examples/pacing.py [URL]

memory://                   the threads of this process keep the pace (the default)
redis://localhost:6379/0    all processes that run this keep it together
"""

import sys
import threading
from itertools import pairwise

from distwindow import Limiter

THREADS, JOBS = 4, 3


def main(url: str = "memory://") -> list[float]:
    """Return the ms between the moments at which the jobs may start."""
    moments: list[float] = []
    with Limiter(url, "50/second paced 10s") as limiter:
        limiter.reset("examples:pacing")

        def work() -> None:
            for _ in range(JOBS):
                decision = limiter.acquire("examples:pacing")  # returns when the job may start
                moments.append(decision.now_ms + decision.wait * 1000)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    moments.sort()
    gaps = [after - before for before, after in pairwise(moments)]
    print(f"{len(moments)} jobs, at least {min(gaps):.3f} ms from one start to the next")
    return gaps


if __name__ == "__main__":
    main(*sys.argv[1:])
