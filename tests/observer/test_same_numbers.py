"""What `stats` says, what observers are told and what the application has seen is the same, over
four processes, of which two are killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distwindow import Limiter


def totals(lines: list[str]) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return the permits that were seen, admitted and refused; what had been seen each time before
    the observer was told; and what it had been told then.
    """
    seen, before, told = [0, 0], [], []
    for line in lines:
        kind, *words = line.split()
        if kind == "seen":
            seen[words[0] == "refused"] += int(words[1])
        else:
            before.append([*seen])
            told.append([int(word) for word in words])
    return seen, before, told


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("killed", [0, 2])
def test_the_same_numbers_are_everywhere(
    redis_url: str, prefix: str, tmp_path: Path, consistency: Any, killed: int
) -> None:
    files, processes = [tmp_path / str(number) for number in range(4)], []
    for number, file in enumerate(files):
        calls = "1000000" if number < killed else "500"
        with file.open("w") as out:
            program = ["tests.observer.counting_process", redis_url, prefix, consistency, calls]
            processes.append(subprocess.Popen([sys.executable, "-m", *program], stdout=out))
    for number, (process, file) in enumerate(zip(processes, files, strict=True)):
        if number < killed:
            while file.read_text().count("told") < 3:
                time.sleep(0.01)
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if number < killed else 0)
    found = [totals(file.read_text().splitlines()) for file in files]
    for seen, _, told in found[killed:]:
        assert told[-1] == seen
    for _, before, told in found[:killed]:
        for earlier, later in zip(before, told[1:], strict=False):
            assert later[0] >= earlier[0]
            assert later[1] >= earlier[1]
    with Limiter(redis_url, "300/hour", prefix=prefix) as limiter:
        stored = [limiter.stats(f"key {number}") for number in range(2)]
    admitted = sum(seen[0] for seen, _, _ in found)
    refused = sum(seen[1] for seen, _, _ in found)
    passed = sum(stats.windows[0].passed for stats in stored)
    blocked = sum(stats.windows[0].blocked for stats in stored)
    if not killed:
        assert (passed, blocked) == (admitted, refused)
    else:  # of a call that was under way, or of a lease, nobody has seen the answer
        assert passed >= admitted - sum(seen[0] for seen, _, _ in found[:killed])
        assert blocked >= sum(seen[1] for seen, _, _ in found[killed:])
