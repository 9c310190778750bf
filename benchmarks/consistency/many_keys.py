"""Many keys in one process: bytes per key, and a flood of keys that are called once."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from benchmarks import peers
from benchmarks.consistency.setup import KEY, MODES, ONE_PER_HOUR, open_limiter
from benchmarks.measure import log, percentile
from benchmarks.report import Section, Target
from benchmarks.server import running
from distwindow import Limiter

MEMORY_TARGET = Target(1.1)
LATENCY_TARGET = Target(1.5)


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Return a function that returns the bytes that Python has allocated since this call."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _call_each(limiter: Limiter, mode: str, keys: Iterable[str]) -> None:
    """Make the limiter keep a state for each key: a refusal, the demand for a lease, or counts."""
    acquire = limiter.try_acquire
    for key in keys:
        acquire(key)
        if mode == "direct":
            acquire(key)


def measure_memory(section: Section, quick: bool) -> None:
    """Measure bytes per key. The keys themselves are allocated before, so they do not count."""
    count = 2_000 if quick else 20_000
    for mode in MODES:
        log(f"consistency, memory: {mode}")
        keys = [f"user:{number}" for number in range(count)]
        with running() as server, open_limiter(server, mode, ONE_PER_HOUR) as limiter:
            limiter.try_acquire(KEY)
            with _traced() as allocated:
                _call_each(limiter, mode, keys)
                limiter.flush()
                size = allocated() / count
            section.add(
                f"bytes per key kept in the process: {mode}",
                size,
                detail=f"{count:,} keys, one limit, nothing pending; the cached command of the "
                "key included",
                unit="B",
            )


def measure_flood(section: Section, quick: bool) -> None:
    """Measure memory and latency where calls of a hot key alternate with keys called once."""
    for mode in ("leased",) if quick else MODES:
        # The cache of commands is full at 32,768 keys.
        max_local_keys, flood = (
            (10_000, 100_000) if mode == "leased" and not quick else (2_000, 50_000)
        )
        limit = ONE_PER_HOUR if mode == "direct" else peers.HIGH_QUOTA.limit()
        with (
            running() as server,
            open_limiter(server, mode, limit, max_local_keys=max_local_keys) as limiter,
        ):
            log(f"consistency, flood: {mode}, memory")
            sizes = []
            with _traced() as allocated:
                for part in range(10):
                    keys = range(part * flood // 10, (part + 1) * flood // 10)
                    _call_each(limiter, mode, (f"once:{number}" for number in keys))
                    limiter.flush()
                    sizes.append(allocated())
            section.add(
                f"a flood of keys: memory at its end, over the most in its first 70 %: {mode}",
                sizes[-1] / max(sizes[:7]),
                target=MEMORY_TARGET,
                detail=f"{sizes[-1] / 1e6:.1f} MB; {flood:,} keys, "
                f"max_local_keys={max_local_keys:,}",
            )
            log(f"consistency, flood: {mode}, latency")
            without, during = _hot_key_latencies_ns(limiter, mode, flood // 5)
        (p50, p99), (without_p50, without_p99) = (
            [percentile(sorted(latencies), share) / 1000 for share in (0.5, 0.99)]
            for latencies in (during, without)
        )
        section.add(
            f"a flood of keys: p99 of a hot key's calls, over that without it: {mode}",
            p99 / without_p99,
            target=LATENCY_TARGET,
            detail=f"p50 {p50:.1f}  p99 {p99:.1f} µs; without p50 {without_p50:.1f}  "
            f"p99 {without_p99:.1f}",
        )


def _hot_key_latencies_ns(limiter: Limiter, mode: str, count: int) -> tuple[list[int], list[int]]:
    """Return latencies of the hot key after calls on known keys, and after calls on new keys.

    The calls on known keys send as many commands to the store as those on new keys. The two kinds
    alternate in 20 parts, so that other load on the machine affects both.
    """
    clock, acquire = time.perf_counter_ns, limiter.try_acquire
    call_known: Callable[[str], object] = acquire if mode == "eventual" else limiter.stats
    latencies_ns: tuple[list[int], list[int]] = ([], [])
    for part in range(20):
        own = latencies_ns[part % 2]
        for number in range(count // 10):
            if part % 2:
                _call_each(limiter, mode, [f"new:{part}:{number}"])
            else:
                call_known(f"known:{number % 10}")
            start = clock()
            acquire(KEY)
            own.append(clock() - start)
    return latencies_ns
