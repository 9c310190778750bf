"""One process of the circuit breaker benchmark: calls a service that the parent breaks.

Prints a line of JSON for each call that is let through and for the first refusal after one, stamped
with the machine's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from distwindow import BreakerOpen, CircuitBreaker, ErrorCount, ErrorRatio
from distwindow.breaker.rules import BreakerRule

PERIOD_S = 0.02
"""Between two calls of one process."""
OPEN_FOR_S = 2.0
MIN_CALLS = 20


Breaker = tuple[Callable[[], AbstractContextManager[Any]], type[Exception]]
"""What makes a call inside a breaker, and the error of a refusal."""


def of_fleet(rule: BreakerRule) -> Callable[[str], Breaker]:
    """Return what opens the fleet's breaker at a URL."""

    def opened(url: str) -> Breaker:
        breaker = CircuitBreaker(url, rule, prefix="benchmark", timeout=2.0)
        return lambda: breaker.call("service"), BreakerOpen

    return opened


def of_process(url: str) -> Breaker:
    """Return a breaker of this process: it opens at `MIN_CALLS` failures in a row."""
    import pybreaker

    breaker = pybreaker.CircuitBreaker(
        fail_max=MIN_CALLS, reset_timeout=OPEN_FOR_S, throw_new_error_on_trip=False
    )
    return breaker.calling, pybreaker.CircuitBreakerError


CALLS = {
    f"distwindow ErrorCount({MIN_CALLS})": of_fleet(ErrorCount(MIN_CALLS, open_for=OPEN_FOR_S)),
    # The successes before the fault count in it.
    "distwindow ErrorRatio(0.5, window=2)": of_fleet(
        ErrorRatio(0.5, window=2.0, min_calls=MIN_CALLS, open_for=OPEN_FOR_S)
    ),
    f"pybreaker fail_max={MIN_CALLS}": of_process,
}


def main() -> None:
    kind, url, broken, stop = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    call, refused = CALLS[kind](url)
    next_at = time.monotonic()
    while not stop.exists():
        is_broken, outcome = broken.exists(), "call"
        at = time.monotonic()
        try:
            with call():
                if is_broken:
                    raise OSError
        except refused:
            outcome = "refused"
        except OSError:
            pass  # the service is broken
        print(json.dumps({"outcome": outcome, "broken": is_broken, "at": at}), flush=True)
        next_at += PERIOD_S
        time.sleep(max(0.0, next_at - time.monotonic()))


if __name__ == "__main__":
    main()
