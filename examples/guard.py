"""Rules around a service: python examples/guard.py [URL]

memory://                   rules of this process (the default)
redis://localhost:6379/0    all processes that run this share them
"""

import sys
import uuid
from collections import Counter

from distwindow import AuthorityRule, DegradeRule, FlowRule, Guard, guarded


def main(url: str = "memory://") -> Counter[str]:
    orders = f"examples:orders:{uuid.uuid4().hex}"  # so that each run has counts of its own
    stock = f"examples:stock:{uuid.uuid4().hex}"
    rules = [
        FlowRule(orders, count=1 / 60),  # one call a minute
        AuthorityRule(orders, limit_app="app-a"),
        DegradeRule(stock, count=1, grade="error_count", time_window_s=60, min_request_amount=1),
    ]
    results = Counter[str]()
    with Guard(url, rules, timeout=2.0) as guard:

        @guarded(guard, orders, origin=lambda app: app, on_block=lambda app: "refused")
        def list_orders(app: str) -> str:
            return "listed"

        @guarded(guard, stock, fallback=lambda: "from the cache")
        def count_stock() -> str:
            results["asked"] += 1
            raise OSError("the stock service is broken")

        for app in ("app-a", "app-a", "app-b"):
            results[list_orders(app)] += 1
        for _ in range(2):
            results[count_stock()] += 1
        guard.flush()  # the worker would do it within a quarter of a second
        for _ in range(3):
            results[count_stock()] += 1  # the breaker is open
    print(dict(results))
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
