"""The logs of the clients of the scenarios on features, and what the checks of them share."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attack.harness import Run, Violation

Tally = Counter[str]
"""How many of what: permits, ends of calls; by names such as "passed k1"."""


@dataclass
class ClientLogs:
    """What all processes have logged, forked ones included."""

    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By process, in order."""
    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Processes that have flushed all and ended in order."""

    @property
    def dead(self) -> set[str]:
        """Processes that were killed, or that were forked by one and did not end."""
        return self.started - self.ended

    def having(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the lines that have this name, each with its process."""
        for process, lines in self.lines.items():
            for line in lines:
                if name in line:
                    yield process, line

    def paused_ms(self, process: str, began: float, ended: float) -> float:
        """Return for how many ms a process did not run between these moments, or just before."""
        lines = self.lines.get(process, [])
        pauses = [(line["pause"], line["lost"]) for line in lines if "pause" in line]
        return float(
            sum(lost for at, lost in pauses if at + lost >= began - 200 and at <= ended + 200)
        )

    def tallies(self, processes: set[str] | None = None) -> tuple[Tally, Tally]:
        """Return the sums of what is certain and of what is unsure, of all or these processes."""
        certain, unsure = Tally(), Tally()
        for process, line in self.having("sure"):
            if processes is None or process in processes:
                certain.update(line["sure"])
                unsure.update(line["unsure"])
        return certain, unsure


def read_client_logs(folder: Path, run: Run) -> ClientLogs:
    """Read every log of the folder, and count their figures. An incomplete line is that of a call
    that has not returned. Raises `Violation` for what a client has found wrong itself.
    """
    logs = ClientLogs()
    for path in sorted(folder.iterdir()):
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        logs.lines[path.name] = lines
        logs.started.add(path.name)
        logs.started.update(line["fork"] for line in lines if "fork" in line)
        if any("closed" in line for line in lines):
            logs.ended.add(path.name)
    for process, line in logs.having("wrong"):
        raise Violation(f"{process}: {line['wrong']}", logs.lines[process][-10:])
    for _, line in logs.having("interruptions"):
        run.count("interruptions", line["interruptions"])
    return logs


def check_tallies(
    what: str,
    stored: Mapping[str, int],
    logs: ClientLogs,
    *,
    sent_later: bool,
    under_way: int,
) -> None:
    """Raise `Violation` unless the store has, of each name, what is certain, and beyond that at
    most what is unsure.

    `sent_later`: counts are flushed, so those of a process that was killed may be missing.
    `under_way`: how much of all names together the calls may be that dead processes were making.
    """
    certain, unsure = logs.tallies()
    least = logs.tallies(logs.ended)[0] if sent_later else certain
    over: dict[str, int] = defaultdict(int)
    for name in sorted({*stored, *certain, *unsure}):
        facts = {
            "what": name, "stored": stored.get(name, 0), "certain": certain[name],
            "certain, of processes that ended in order": least[name], "unsure": unsure[name],
        }  # fmt: skip
        if stored.get(name, 0) < least[name]:
            raise Violation(f"{what}: {least[name] - stored.get(name, 0)} lost of {name}", [facts])
        over[name] = max(0, stored.get(name, 0) - certain[name] - unsure[name])
        if sum(over.values()) > under_way:
            raise Violation(
                f"{what}: {sum(over.values())} more than was called; {under_way} are explained",
                [dict(over), facts],
            )
