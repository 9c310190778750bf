"""An API that admits ten calls in each second of its clock, and processes that call it.

    python -m tests.upstream.hidden_limit REDIS_URL

prints how many calls each kind of process had refused. The server is one thread and counts exactly.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PER_SECOND = 10
PROCESSES = 8
CALLS = 20
"""Of each process."""


class HiddenLimit(ThreadingHTTPServer):
    """Answers 200, or 429 with `Retry-After: 1` where a second has had its calls."""

    daemon_threads = True

    def __init__(self, *, says_what_is_left: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.statuses: Counter[int] = Counter()
        self.second, self.used = 0, 0
        self.says_what_is_left = says_what_is_left

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def decide(self) -> tuple[int, int]:
        """Return the status of a call, and how many more this second has."""
        with self.lock:
            second = int(time.time())
            if second != self.second:
                self.second, self.used = second, 0
            self.used += 1
            status = 200 if self.used <= PER_SECOND else 429
            self.statuses[status] += 1
            return status, max(0, PER_SECOND - self.used)

    def __enter__(self) -> HiddenLimit:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HiddenLimit

    def do_GET(self) -> None:
        status, left = self.server.decide()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        if self.server.says_what_is_left:
            self.send_header("RateLimit", f'"second";r={left};t=1')
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None: ...


def call_until_served(
    redis_url: str, url: str, prefix: str, limits: str | None, shared: bool
) -> None:
    """Call `url` until `CALLS` calls were served, as a process of the fleet does."""
    import requests

    from distwindow.contrib.requests import RateLimitAdapter, UpstreamLimits

    store = redis_url if shared else "memory://"
    with UpstreamLimits(store, limits, prefix=prefix, max_wait=60) as upstream:
        with requests.Session() as session:
            session.mount("http://", RateLimitAdapter(upstream))
            served = 0
            while served < CALLS:
                served += session.get(url).status_code == 200


def refused(redis_url: str, prefix: str, limits: str | None, *, shared: bool) -> tuple[int, float]:
    """Return how many calls of the fleet were refused, and its seconds."""
    context = multiprocessing.get_context("spawn")
    with HiddenLimit() as server:
        began = time.monotonic()
        arguments = redis_url, server.url, prefix, limits, shared
        processes = [
            context.Process(target=call_until_served, args=arguments) for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)
        assert server.statuses[200] == PROCESSES * CALLS
        return server.statuses[429], time.monotonic() - began


def main() -> None:
    (redis_url,) = sys.argv[1:]
    prefix = f"hidden-{time.time_ns()}"
    for title, limits, shared in (
        ("each process by itself, 10/second", "10/second", False),
        ("the fleet, 10/second", "10/second", True),
        ("the fleet, 10/second strict", "10/second strict", True),
        ("the fleet, no limit of its own", None, True),
    ):
        count, seconds = refused(
            redis_url, f"{prefix}-{shared:d}-{len(limits or '')}", limits, shared=shared
        )
        print(json.dumps({"what": title, "refused": count, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
