"""Mails to a customer, limited by distwindow: python examples/coming_from/limits/after.py [URL]"""

import sys
from collections import Counter

from distwindow import Limiter


def main(url: str = "redis://localhost:6379/0") -> Counter[str]:
    results = Counter[str]()
    with Limiter(url, "5/minute strict", prefix="mails") as limiter:
        limiter.reset("acme")
        for mails in (1, 3, 2, 1, 1):
            sent = limiter.try_acquire("acme", mails)
            results["sent" if sent else "refused"] += mails
        results["left"] = limiter.peek("acme").remaining
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
