"""Payments behind a breaker of pybreaker: python examples/coming_from/pybreaker/before.py [URL]"""

import sys
from collections import Counter

from pybreaker import CircuitBreaker, CircuitBreakerError, CircuitRedisStorage
from redis import Redis


class Declined(Exception):
    """The service works, and declines a payment."""


def main(url: str = "redis://localhost:6379/0") -> Counter[str]:
    results = Counter[str]()
    with Redis.from_url(url) as client:
        breaker = CircuitBreaker(
            fail_max=3,
            reset_timeout=60,
            exclude=[Declined],
            state_storage=CircuitRedisStorage("closed", client, namespace="payments"),
            throw_new_error_on_trip=False,
        )
        breaker.close()

        @breaker
        def pay(error: Exception | None = None) -> None:
            if error is not None:
                raise error

        for end in (None, Declined(), OSError(), OSError(), OSError(), None, None):
            try:
                pay(end)
                results["paid"] += 1
            except CircuitBreakerError:
                results["refused"] += 1
            except (Declined, OSError) as error:
                results[type(error).__name__] += 1
        results[breaker.current_state] += 1
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
