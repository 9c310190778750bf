"""One process of `benchmarks/fleet_commands.py`: uses circuit breakers until it is told to rest.

    python -m benchmarks.fleet_process URL BREAKERS PERIOD_S

It prints "ready" when it has called every breaker, calls each of them every PERIOD_S seconds until
a line comes on its standard input, makes no call from then on, and ends when the input ends.
"""

from __future__ import annotations

import sys
import threading
import time

from distwindow import CircuitBreaker, ErrorRatio


def main() -> None:
    url, breakers, period_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    rests = threading.Event()

    def read() -> None:
        sys.stdin.readline()
        rests.set()

    with CircuitBreaker(url, ErrorRatio(0.5), prefix="fleet", timeout=5.0) as breaker:
        names = [f"service-{number}" for number in range(breakers)]
        reader = threading.Thread(target=read)
        ready = False
        while not rests.is_set():
            began = time.monotonic()
            for name in names:
                with breaker.call(name):
                    pass
            if not ready:
                print("ready", flush=True)
                reader.start()
                ready = True
            rests.wait(max(0.0, began + period_s - time.monotonic()))
        sys.stdin.read()


if __name__ == "__main__":
    main()
