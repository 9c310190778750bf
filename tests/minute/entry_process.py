"""One process of a fleet that enters a key under its own origin, and prints what it did.

python -m tests.minute.entry_process URL PREFIX ORIGIN ENTRIES
"""

from __future__ import annotations

import sys
from contextlib import suppress

from distwindow import Limiter, RateLimitExceeded


def main() -> None:
    url, prefix, origin, entries = sys.argv[1:]
    passed = blocked = errors = 0
    with Limiter(url, "150/hour", prefix=prefix, flush_interval=0.01, timeout=5.0) as limiter:
        for number in range(int(entries)):
            try:
                with suppress(OSError), limiter.entry("k", origin=origin):
                    passed += 1
                    if number % 3 == 0:
                        errors += 1
                        raise OSError
            except RateLimitExceeded:
                blocked += 1
    print(passed, blocked, errors)


if __name__ == "__main__":
    main()
