"""A circuit breaker around a service that breaks: python examples/breaker.py [URL]

memory://                   a breaker of this process (the default)
redis://localhost:6379/0    all processes that run this share it
"""

import sys
import time
import uuid
from collections import Counter

from distwindow import BreakerOpen, CircuitBreaker, ErrorRatio


class Service:
    """A service that is broken for a while."""

    def __init__(self) -> None:
        self.is_broken = True

    def pay(self) -> str:
        if self.is_broken:
            raise OSError("the service is broken")
        return "paid"


def main(url: str = "memory://") -> Counter[str]:
    service, results = Service(), Counter[str]()
    rule = ErrorRatio(0.5, window=10, min_calls=5, open_for=0.5)
    key = f"examples:breaker:{uuid.uuid4().hex}"  # so that each run has a breaker of its own
    with CircuitBreaker(url, rule, timeout=2.0) as breaker:
        breaker.on_change(lambda change: print(f"{change.previous} -> {change.state}"))

        def call() -> None:
            try:
                with breaker.call(key):
                    results[service.pay()] += 1
            except BreakerOpen:
                results["refused"] += 1
            except OSError:
                results["failed"] += 1

        for _ in range(5):
            call()
        breaker.flush()  # the worker would do it within a quarter of a second
        for _ in range(10):
            call()
        service.is_broken = False
        time.sleep(rule.open_for + 0.05)
        for _ in range(5):
            call()
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
