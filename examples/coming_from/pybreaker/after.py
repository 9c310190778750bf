"""Payments behind a breaker of distwindow: python examples/coming_from/pybreaker/after.py [URL]"""

import sys
from collections import Counter

from distwindow import BreakerOpen, CircuitBreaker, ConsecutiveFailures


class Declined(Exception):
    """The service works, and declines a payment."""


def main(url: str = "redis://localhost:6379/0") -> Counter[str]:
    results = Counter[str]()
    rule = ConsecutiveFailures(3, open_for=60.0)
    with CircuitBreaker(url, rule, ignore=Declined, prefix="shop") as breaker:
        breaker.close("payments")

        @breaker.protect("payments")
        def pay(error: Exception | None = None) -> None:
            if error is not None:
                raise error

        for end in (None, Declined(), OSError(), OSError(), OSError(), None, None):
            try:
                pay(end)
                results["paid"] += 1
            except BreakerOpen:
                results["refused"] += 1
            except (Declined, OSError) as error:
                results[type(error).__name__] += 1
            breaker.flush()  # the worker would do it within a quarter of a second
        results[breaker.state("payments")] += 1
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
