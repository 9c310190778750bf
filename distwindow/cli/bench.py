"""`distwindow bench`: how many admissions a second this store gives this machine, and how fast."""

from __future__ import annotations

import json
import threading
import time
from typing import Annotated

import typer

from distwindow import Limiter

from ..store.redis.urls import masked_url
from .errors import guarded
from .options import DEFAULT_PREFIX, DEFAULT_URL, Json, Prefix, Url, given_key
from .render import printable

_PLENTY = "1000000000/second"
_TIMEOUT = 5.0


@guarded
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long.")] = 3.0,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Callers at a time.")] = 1,
    key: Annotated[str, typer.Option(help="The key that all call.")] = "bench",
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Call try_acquire on one key from this process, as fast as it goes; nothing is refused.

    Latency is that of one call, as its caller sees it. Threads that call one key share round trips.
    """
    called = given_key(key)
    took: list[list[float]] = [[] for _ in range(threads)]
    troubles: list[BaseException] = []
    with Limiter(url, _PLENTY, prefix=prefix, timeout=_TIMEOUT) as limiter:
        limiter.try_acquire(called)

        def call(times: list[float]) -> None:
            clock = time.perf_counter
            try:
                end = now = clock()
                end += seconds
                while now < end:
                    limiter.try_acquire(called)
                    before, now = now, clock()
                    times.append(now - before)
            except BaseException as exc:  # it belongs to the command, not to this thread
                troubles.append(exc)

        begun = time.perf_counter()
        crew = [threading.Thread(target=call, args=(own,), daemon=True) for own in took]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        passed = time.perf_counter() - begun
        limiter.reset(called)
    if troubles:
        raise troubles[0]
    all_ms = sorted(one * 1000 for own in took for one in own)
    rate = len(all_ms) / passed
    p50, p99 = all_ms[len(all_ms) // 2], all_ms[len(all_ms) * 99 // 100]
    if as_json:
        figures = {"threads": threads, "seconds": passed, "calls": len(all_ms)}
        print(json.dumps(figures | {"per_second": rate, "p50_ms": p50, "p99_ms": p99}))
    else:
        crowd = f"{threads} thread{'s' if threads > 1 else ''}"
        print(
            f"{rate:,.0f} acquire/s, p50 {p50:.3f} ms, p99 {p99:.3f} ms "
            f"({crowd} on the key {printable(key)!r}, {passed:.1f} s, {masked_url(url)})"
        )
