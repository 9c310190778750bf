"""Processes that reserve and commit, two of which are killed: what the ring holds meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distwindow import Limit, Limiter
from tests.attack.harness import ROOT
from tests.harness import TIMEOUT_S

PROCESSES = 8
LIMIT = Limit(6000, per=6.0, buckets=6)
NEVER = float("inf")


@dataclass
class Reserved:
    """One reservation, as its process has logged it. Times are monotonic seconds."""

    estimate: int
    asked_at: float
    bucket: int | None = None
    """None where the process was killed before it was told."""
    reserved_at: float = NEVER
    actual: int | None = None
    settled_at: float = NEVER

    def least(self, at: float) -> int:
        """Return the least that it may have charged at this time."""
        if at < self.reserved_at:
            return 0
        return self.estimate if self.actual is None else self.actual

    def most(self, at: float) -> int:
        """Return the most that it may have charged at this time."""
        if at < self.asked_at:
            return 0
        if self.actual is not None and at >= self.settled_at:
            return self.actual
        return self.estimate


@dataclass
class Sample:
    """What the ring held at some moment between two times."""

    began: float
    ended: float
    held: dict[int, int] = field(default_factory=dict)


def logged(log: Path) -> list[Reserved]:
    """Return what one process has reserved. A close settles what is committed."""
    by_number: dict[int, Reserved] = {}
    lines = log.read_text().split("\n")
    for line in lines[:-1]:  # the last one is empty, or a killed process has not ended it
        entry: dict[str, Any] = json.loads(line)
        number, event, at = entry["number"], entry["event"], entry["at"]
        if event == "ask":
            by_number[number] = Reserved(entry["estimate"], at)
        elif event == "refused":
            del by_number[number]
        elif event == "reserved":
            by_number[number].reserved_at = at
            by_number[number].bucket = entry["now_ms"] - entry["now_ms"] % LIMIT.bucket_ms
        elif event == "commit":
            by_number[number].actual = entry["actual"]
        elif event == "settled":
            by_number[number].settled_at = at
        else:
            for each in by_number.values():
                each.settled_at = min(each.settled_at, at)
    return list(by_number.values())


def check(sample: Sample, reservations: list[Reserved]) -> None:
    """Check each bucket of the ring that this sample has seen."""
    assert sum(sample.held.values()) <= LIMIT.amount
    untold = sum(each.most(sample.ended) for each in reservations if each.bucket is None)
    for start, held in sample.held.items():
        of_bucket = [each for each in reservations if each.bucket == start]
        least = sum(each.least(sample.began) for each in of_bucket)
        # What was given back while the sample was taken counts as before.
        most = sum(max(each.most(sample.began), each.most(sample.ended)) for each in of_bucket)
        assert least <= held <= most + untold, (start, least, held, most, untold)


@pytest.mark.fleet
def test_a_fleet_that_loses_two_processes_holds_what_it_reserved(
    redis_url: str, prefix: str, tmp_path: Path
) -> None:
    logs = [tmp_path / str(number) for number in range(PROCESSES)]
    arguments = [sys.executable, "-m", "tests.reserve.reserver", redis_url, prefix, str(LIMIT)]
    workers = [
        subprocess.Popen([*arguments, str(number), str(log)], cwd=ROOT)
        for number, log in enumerate(logs)
    ]
    samples: list[Sample] = []
    with Limiter(redis_url, LIMIT, prefix=prefix, timeout=TIMEOUT_S) as reader:

        def take_sample() -> Sample:
            began = time.monotonic()
            stats = reader.stats("k")
            held = {bucket.start: bucket.passed for bucket in stats.buckets}
            samples.append(Sample(began, time.monotonic(), held))
            return samples[-1]

        try:
            while any(worker.poll() is None for worker in workers):
                take_sample()
                time.sleep(0.005)
                for worker, log in zip(workers[:2], logs, strict=False):
                    commits = log.read_text().count("commit") if log.exists() else 0
                    if commits > 40 and worker.poll() is None:
                        worker.kill()
            assert [worker.wait() for worker in workers] == [-signal.SIGKILL] * 2 + [0] * 6
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        take_sample()
        while take_sample().held:  # for one window, as nobody reserves any more
            time.sleep(0.05)
        assert reader.stats("k").passed == 0
    reservations = [each for log in logs for each in logged(log)]
    assert len(reservations) > 200
    assert len(samples) > 50
    for sample in samples:
        check(sample, reservations)
