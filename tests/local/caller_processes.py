"""Processes that call one key without a break, and the most calls that were admitted in one window.

The times in the decisions are estimates, so windows are taken from the machine's clock, which the
server uses, too. A call is counted in a window only if it began and ended inside: so no call is
counted that may have been outside, and every excess that is found is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

from distwindow import Limit, Limiter

ROOT = Path(__file__).parents[2]
PROCESSES = 4

Span = tuple[float, float]
"""When an admitted call began and ended, ms since 1970."""


class CallerProcess:
    """A process that calls one key without a break, from two threads."""

    def __init__(self, url: str, key: str, options: dict[str, Any], pause: float) -> None:
        args = [url, key, json.dumps(options), f"{pause:g}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.local.caller_processes", *args],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def result(self, *, stop: bool = True) -> tuple[list[Span], Counter[str]]:
        """Return the admitted calls, and the number of decisions by source."""
        output, _ = self._process.communicate("\n" if stop else None, timeout=30)
        spans: list[Span] = []
        sources: Counter[str] = Counter()
        for line in output.splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have written half a line
                reports, counts = json.loads(line)
                spans += [(began, ended) for began, ended in reports]
                sources.update(counts)
        return spans, sources


def spend(url: str, key: str, options: dict[str, Any], pause: float) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    stop = threading.Event()
    limiter = Limiter(url, **options)
    reports: list[list[Any]] = []

    def work() -> None:
        spans: list[Span] = []
        sources: Counter[str] = Counter()
        since = time.monotonic()
        while not stop.is_set():
            began = time.time()
            decision = limiter.try_acquire(key)
            ended = time.time()
            sources[f"{decision.source} {decision.allowed}"] += 1
            if decision.allowed:
                spans.append((began * 1000, ended * 1000))
            if time.monotonic() - since > 0.05:
                since = time.monotonic()
                reports.append([spans, dict(sources)])
                spans, sources = [], Counter()
            time.sleep(pause)
        reports.append([spans, dict(sources)])

    def print_reports() -> None:
        while reports:
            print(json.dumps(reports.pop(0)), flush=True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()

    def wait_for_stop() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=wait_for_stop).start()
    while not stop.wait(0.02):
        print_reports()
    for thread in threads:
        thread.join()
    limiter.close()
    print_reports()


def call_in_processes(
    url: str,
    key: str,
    options: dict[str, Any],
    seconds: float,
    kill: int = 0,
    pause: float = 0.0003,
) -> tuple[list[Span], Counter[str]]:
    """Return what four processes are admitted in so many seconds; `kill` of them are killed
    meanwhile.
    """
    processes = [CallerProcess(url, key, options, pause) for _ in range(PROCESSES)]
    for process in processes:
        process.await_ready()
    for process in processes:
        process.go()
    time.sleep(seconds / 2)  # the processes call
    for process in processes[:kill]:
        process.kill()
    time.sleep(seconds / 2)  # the others go on
    spans: list[Span] = []
    sources: Counter[str] = Counter()
    for number, process in enumerate(processes):
        some, counts = process.result(stop=number >= kill)
        spans += some
        sources.update(counts)
    return spans, sources


def most_aligned(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted in one window of whole buckets."""
    width = limit.bucket_ms
    passed: Counter[int] = Counter()
    for began, ended in spans:
        if began // width == (ended + 1) // width:  # the server's clock shows whole ms
            passed[int(began // width)] += 1
    first, last = min(passed), max(passed)
    window = [sum(passed[n - i] for i in range(limit.buckets)) for n in range(first, last + 1)]
    return max(window)


def most_anywhere(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted within one interval, wherever it
    begins.
    """
    starts = sorted(began for began, _ in spans)
    ends = sorted(ended for _, ended in spans)
    return max(
        bisect_left(ends, began + limit.interval_ms - 1) - bisect_left(starts, began)
        for began in starts
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    url, key, options, pause = sys.argv[1:]
    spend(url, key, json.loads(options), float(pause))
