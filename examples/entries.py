"""Entries and their origins: python examples/entries.py [URL]

memory://                   the statistics of this process (the default)
redis://localhost:6379/0    those of all processes that run this
"""

import sys
import uuid
from contextlib import suppress

from distwindow import Limiter, RateLimitExceeded


class NotFound(Exception):
    """An answer of the service, and no error of it."""


def pay(number: int) -> str:
    if number % 5 == 0:
        raise NotFound
    if number % 3 == 0:
        raise ConnectionError
    return "paid"


def main(url: str = "memory://") -> dict[str, tuple[int, int, int, int]]:
    key = f"examples:entries:{uuid.uuid4().hex}"  # so that each run has statistics of its own
    with Limiter(url, "20/minute", ignore=NotFound, timeout=2.0) as limiter:
        for number in range(1, 31):
            origin = "checkout" if number % 2 else "search"
            with suppress(NotFound, ConnectionError, RateLimitExceeded):
                with limiter.entry(key, origin=origin):
                    pay(number)
        found = {
            origin: (one.passed, one.blocked, one.success, one.error)
            for origin, one in limiter.origins(key).items()
        }
        total = limiter.minute(key)
    for origin, counts in found.items():
        print(origin, *counts)
    print("together", total.passed, total.blocked, total.success, total.error)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
