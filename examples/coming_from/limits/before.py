"""Mails to a customer, limited by limits: python examples/coming_from/limits/before.py [URL]"""

import sys
from collections import Counter

from limits import parse
from limits.storage import storage_from_string
from limits.strategies import MovingWindowRateLimiter


def main(url: str = "redis://localhost:6379/0") -> Counter[str]:
    limiter = MovingWindowRateLimiter(storage_from_string(url))
    limit, results = parse("5/minute"), Counter[str]()
    limiter.clear(limit, "mails", "acme")
    for mails in (1, 3, 2, 1, 1):
        sent = limiter.hit(limit, "mails", "acme", cost=mails)
        results["sent" if sent else "refused"] += mails
    results["left"] = limiter.get_window_stats(limit, "mails", "acme").remaining
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
