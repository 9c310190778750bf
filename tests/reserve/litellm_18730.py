"""`python -m tests.reserve.litellm_18730 [URL]`: BerriAI/litellm#18730, and the same calls with
reservations. Five calls at once under a limit of 100 tokens in a minute.

    counted afterwards   each call takes one permit, and counts its tokens when it ends
    reserved             each call reserves its estimate, at most the limit, and commits its tokens
    with true maxima     the same, and the model writes no more than was reserved (`max_tokens`)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from distwindow import Limiter
from tests.clock_and_stores import fresh_key

LIMIT = 100
TOKENS = (58, 80, 175, 175, 175)
"""What the calls use."""
Call = Callable[[Limiter, str, int, threading.Barrier], tuple[int, int]]


def count_afterwards(
    limiter: Limiter, key: str, tokens: int, together: threading.Barrier
) -> tuple[int, int]:
    reservation = limiter.try_reserve(key, 1)
    together.wait()
    if not reservation:
        return 0, 0
    reservation.commit(tokens)
    return tokens, tokens - 1


def reserve(
    limiter: Limiter, key: str, tokens: int, together: threading.Barrier
) -> tuple[int, int]:
    return _reserve(limiter, key, tokens, together, is_capped=False)


def reserve_maximum(
    limiter: Limiter, key: str, tokens: int, together: threading.Barrier
) -> tuple[int, int]:
    return _reserve(limiter, key, tokens, together, is_capped=True)


def _reserve(
    limiter: Limiter, key: str, tokens: int, together: threading.Barrier, *, is_capped: bool
) -> tuple[int, int]:
    together.wait()
    reservation = limiter.try_reserve(key, tokens, clamp=True)
    if not reservation:
        return 0, 0
    used = min(tokens, reservation.estimate) if is_capped else tokens
    reservation.commit(used)
    return used, max(0, used - reservation.estimate)


CALLS: dict[str, Call] = {
    "counted afterwards": count_afterwards,
    "reserved": reserve,
    "with true maxima": reserve_maximum,
}


def run(url: str, name: str) -> tuple[int, int, int]:
    """Return the tokens that were used, the debt, and what the window holds."""
    key, together = fresh_key("tokens"), threading.Barrier(len(TOKENS))
    # Longer than a minute, so that no window ends during the run.
    with Limiter(url, f"{LIMIT}/hour", timeout=10) as limiter:
        with ThreadPoolExecutor(len(TOKENS)) as threads:
            calls = [
                threads.submit(CALLS[name], limiter, key, tokens, together) for tokens in TOKENS
            ]
            ended = [call.result() for call in calls]
        limiter.flush()
        held = limiter.stats(key).passed
    return sum(used for used, _ in ended), sum(debt for _, debt in ended), held


def main(url: str = "memory://") -> None:
    print(f"{'':20} {'tokens':>7} {'debt':>5} {'in the window':>14}   limit {LIMIT}")
    for name in CALLS:
        used, debt, held = run(url, name)
        print(f"{name:20} {used:7} {debt:5} {held:14}")


if __name__ == "__main__":
    main(*sys.argv[1:])
