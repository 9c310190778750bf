"""Limits of Celery tasks: python examples/celery_limits.py [URL]

A worker with four threads runs in this process, on a broker in memory. Nine tasks of two tenants
are sent at once, and three of a kind that has no limit. The tasks over the limit wait in the
worker, take no thread, and let the others pass. With a `redis://` URL all workers that run this
program share the limits.
"""

import sys
import threading
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker

from distwindow.contrib.celery import RateLimits


def main(url: str = "memory://") -> dict[str, int]:
    app = Celery("example", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.distwindow_prefix = f"example-{time.time_ns()}"  # so that each run starts anew
    RateLimits(app, url)
    done: list[tuple[str, float]] = []
    finished = threading.Event()

    def note(what: str) -> None:
        done.append((what, time.monotonic()))
        print(f"{done[-1][1] - began:5.2f} s  {what}")
        if len(done) == 12:
            finished.set()

    @app.task(limits=["3/500ms", "1000/hour"], limit_key="tenant:{tenant}", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def fetch(tenant: str, number: int) -> None:
        note(f"{tenant} {number}")

    @app.task(shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def ping() -> None:
        note("ping")

    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        began = time.monotonic()
        for number in range(6):
            fetch.delay("acme", number)
        for number in range(3):
            fetch.delay("initech", number)
        for _ in range(3):
            ping.delay()
        finished.wait(30)
    order = [what for what, _ in done]
    return {
        "done": len(done),
        "before the last of acme": order.index("acme 5"),
        "pings": order.count("ping"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
