"""Starts a Redis and both services, and sends each the requests of two customers at once:
python -m examples.shop [--serve]

`--serve` goes on until Ctrl-C. REDIS_URL names a Redis that is running already.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from distwindow import Limiter
from distwindow.cli.demo import demo_server

from .limits import NAME, PER_CUSTOMER

SERVICES = {
    "catalog": (["uvicorn", "examples.shop.catalog:app", "--workers", "2"], "--port", "/items/1"),
    "orders": (
        ["gunicorn", "examples.shop.orders:app", "-w", "2", "--threads", "4"],
        "-b",
        "/orders/1",
    ),
}
CUSTOMERS = ("ada", "bob")
REQUESTS = 30
"""Of each customer to each service."""


def status_of(url: str, customer: str = "") -> int:
    request = urllib.request.Request(url, headers={"x-customer": customer})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            status: int = response.status
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code
    return status


@contextmanager
def service(name: str, redis_url: str) -> Iterator[str]:
    """Run a service; yields its URL."""
    command, option, _ = SERVICES[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    place = address if option == "-b" else address.rpartition(":")[2]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, option, place, "--log-level", "warning"],
        env=os.environ | {"REDIS_URL": redis_url},
    )
    try:
        until = time.monotonic() + 30
        while True:
            try:
                status_of(f"http://{address}/health")
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{name} does not answer; its output is above") from None
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def burst(urls: dict[str, str]) -> dict[tuple[str, str], Counter[int]]:
    """Send all requests at once; return the number of each status, by customer and service."""
    calls = [(who, name) for _ in range(REQUESTS) for who in CUSTOMERS for name in urls]
    with ThreadPoolExecutor(16) as threads:
        statuses = threads.map(lambda call: status_of(urls[call[1]], call[0]), calls)
        found: dict[tuple[str, str], Counter[int]] = {call: Counter() for call in calls}
        for call, status in zip(calls, statuses, strict=True):
            found[call][status] += 1
    return found


def main(redis_url: str | None = None, serve: bool = False) -> dict[str, int]:
    """Return how many requests of each customer were served, by both services together."""
    with ExitStack() as stack:
        server = stack.enter_context(demo_server(redis_url))
        bases = {name: stack.enter_context(service(name, server.url)) for name in SERVICES}
        with Limiter(server.url, PER_CUSTOMER) as limiter:
            for who in CUSTOMERS:
                limiter.reset(f"{NAME}:{who}")
        found = burst({name: base + SERVICES[name][2] for name, base in bases.items()})
        print(f"{PER_CUSTOMER} for each customer, over both services; {REQUESTS} requests to each:")
        for (who, name), statuses in found.items():
            print(f"  {who}  {name:8} {statuses[200]:3} served, {statuses[429]:3} refused")
        served = {who: sum(found[who, name][200] for name in bases) for who in CUSTOMERS}
        for who, count in served.items():
            print(f"  {who}  together {count:3} served")
        if serve:
            for name, base in bases.items():
                print(f"{name}: curl -i -H 'x-customer: ada' {base}{SERVICES[name][2]}")
            print("Ctrl-C ends it")
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                print()
    return served


if __name__ == "__main__":
    main(os.environ.get("REDIS_URL"), serve="--serve" in sys.argv[1:])
