"""`distwindow bench`: the rate and latency of acquires on one store from this machine."""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Annotated

import typer

from .. import Limiter
from ..stores.redis.urls import masked_url
from .command import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption, report_errors

_LIMIT = "1000000000/second"
"""So high that nothing is refused."""
_TIMEOUT_S = 5.0


@report_errors
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration.")] = 3.0,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that call.")] = 1,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Call try_acquire on one new key from this process, as fast as it goes; nothing is refused.

    Latency is that of one call, as its caller sees it. Threads that call one key share round trips.
    """
    key = f"bench-{secrets.token_hex(6)}"
    latencies_s: list[list[float]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []
    with Limiter(url, _LIMIT, prefix=prefix, timeout=_TIMEOUT_S) as limiter:
        limiter.try_acquire(key)

        def call_repeatedly(latencies: list[float]) -> None:
            clock = time.perf_counter
            try:
                end = now = clock()
                end += seconds
                while now < end:
                    limiter.try_acquire(key)
                    before, now = now, clock()
                    latencies.append(now - before)
            except BaseException as exc:  # raised again by the command, in the main thread
                failures.append(exc)

        started_at = time.perf_counter()
        callers = [
            threading.Thread(target=call_repeatedly, args=(own,), daemon=True)
            for own in latencies_s
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        elapsed_s = time.perf_counter() - started_at
        limiter.reset(key)
    if failures:
        raise failures[0]
    all_ms = sorted(one * 1000 for own in latencies_s for one in own)
    rate = len(all_ms) / elapsed_s
    p50, p99 = all_ms[len(all_ms) // 2], all_ms[len(all_ms) * 99 // 100]
    if as_json:
        figures = {"threads": threads, "seconds": elapsed_s, "calls": len(all_ms)}
        print(json.dumps(figures | {"per_second": rate, "p50_ms": p50, "p99_ms": p99}))
    else:
        thread_count = f"{threads} thread{'s' if threads > 1 else ''}"
        print(
            f"{rate:,.0f} acquire/s, p50 {p50:.3f} ms, p99 {p99:.3f} ms "
            f"({thread_count} on one key, {elapsed_s:.1f} s, {masked_url(url)})"
        )
