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


def error_count_call(url: str) -> tuple[Callable[[], AbstractContextManager[Any]], type[Exception]]:
    """Return what makes a call under the fleet's breaker, and the error of a refusal."""
    return _distwindow_call(url, ErrorCount(MIN_CALLS, open_for=OPEN_FOR_S))


def error_ratio_call(url: str) -> tuple[Callable[[], AbstractContextManager[Any]], type[Exception]]:
    """Return the same of a rule that the successes before the fault count in."""
    return _distwindow_call(
        url, ErrorRatio(0.5, window=2.0, min_calls=MIN_CALLS, open_for=OPEN_FOR_S)
    )


def _distwindow_call(
    url: str, rule: BreakerRule
) -> tuple[Callable[[], AbstractContextManager[Any]], type[Exception]]:
    breaker = CircuitBreaker(url, rule, prefix="benchmark", timeout=2.0)
    return lambda: breaker.call("service"), BreakerOpen


def pybreaker_call(url: str) -> tuple[Callable[[], AbstractContextManager[Any]], type[Exception]]:
    """Return the same of a breaker of this process: it opens at `MIN_CALLS` failures in a row."""
    import pybreaker

    breaker = pybreaker.CircuitBreaker(
        fail_max=MIN_CALLS, reset_timeout=OPEN_FOR_S, throw_new_error_on_trip=False
    )
    return breaker.calling, pybreaker.CircuitBreakerError


CALLS = {
    f"distwindow ErrorCount({MIN_CALLS})": error_count_call,
    "distwindow ErrorRatio(0.5, window=2)": error_ratio_call,
    f"pybreaker fail_max={MIN_CALLS}": pybreaker_call,
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
