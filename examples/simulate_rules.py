"""What rules would have done to a minute of calls: a simulation without server and waiting.

python examples/simulate_rules.py [SEED]

A service is called 30 times a second. In the seconds 20 to 25 it fails. Calls of the app "batch"
are paced, all calls are limited, and a circuit breaker opens on errors. Because time is an argument
of `SlotChain`, the minute takes a moment, and the same seed gives the same outcome.
"""

import heapq
import random
import sys
from collections import Counter

from distwindow.sentinel import ChainEntry, DegradeRule, FlowRule, SlotChain

RULES = [
    FlowRule("orders", 20),
    FlowRule(
        "orders", 5, limit_app="batch", control_behavior="rate_limiter", max_queueing_time_ms=400
    ),
    DegradeRule("orders", 0.5, grade="error_ratio", time_window_s=2, min_request_amount=5),
]
MINUTE_MS = 60_000
FAILS = range(20_000, 25_000)
BLOCKED_BY = {FlowRule: "limited", DegradeRule: "breaker open"}


def main(seed: str = "1") -> dict[str, int]:
    """Return how many calls succeeded, failed, were limited, and met an open breaker."""
    rng = random.Random(seed)
    chain = SlotChain(RULES)
    outcomes: Counter[str] = Counter()
    # Each event: its time in ms, a number that makes it unique, and the call; None for a new one.
    events: list[tuple[int, int, ChainEntry | None]] = [
        (rng.randrange(MINUTE_MS), number, None) for number in range(30 * 60)
    ]
    heapq.heapify(events)
    while events:
        now, number, entry = heapq.heappop(events)
        if entry is None:
            entry = chain.enter(now, "orders", origin=rng.choice(["web", "web", "batch"]))
        elif entry.state == "waiting":
            entry.resume(now)
        else:
            fails = now in FAILS
            entry.exit(now, error=fails)
            outcomes["failed" if fails else "succeeded"] += 1
            continue
        if entry.blocked_by is not None:
            outcomes[BLOCKED_BY[type(entry.blocked_by)]] += 1
        elif entry.state == "waiting":
            heapq.heappush(events, (entry.resume_at, number, entry))
        else:
            heapq.heappush(events, (now + rng.randrange(5, 80), number, entry))
    return dict(outcomes)


if __name__ == "__main__":
    for outcome, calls in main(*sys.argv[1:2]).items():
        print(f"{outcome:<12} {calls}")
