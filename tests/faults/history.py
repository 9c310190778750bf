"""The logs of a fleet, and the checks of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attack.harness import Violation
from tests.attack.window_checks import Admitted, Timed


@dataclass
class Logs:
    """The logs of all processes of a run, forked ones included."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """With `process`, and `late_ms` less the time for which the process could not run."""
    ended: set[str] = field(default_factory=set)
    """Processes that have flushed all counts and ended in order."""
    started: set[str] = field(default_factory=set)
    unknown: int = 0
    last: dict[str, list[Any]] = field(default_factory=dict)

    def admitted(self, window: str) -> list[Admitted]:
        return [
            Admitted(call["key"], call["now"], call["cost"], call["process"])
            for call in self.calls
            if call["ok"] and call["window"] == window
        ]

    def timed(self) -> list[Timed]:
        return [
            Timed(f"a call of {call['process']}", call["late_ms"], call["at"])
            for call in self.calls
        ]

    def sums(self, window: str) -> tuple[Counter[str], Counter[str]]:
        """Return by key the permits of admitted calls, and those of calls of unknown outcome."""
        certain: Counter[str] = Counter()
        unsure: Counter[str] = Counter()
        for call in self.calls:
            if call["window"] == window:
                certain[call["key"]] += call["cost"] if call["ok"] else 0
                unsure[call["key"]] += call["cost"] if call["ok"] is None else 0
        return certain, unsure

    def flushed(self, window: str) -> Counter[str]:
        """Return by key the permits of admitted calls of processes that have flushed all counts."""
        certain: Counter[str] = Counter()
        for call in self.calls:
            if call["window"] == window and call["ok"] and call["process"] in self.ended:
                certain[call["key"]] += call["cost"]
        return certain

    def lease(self) -> int:
        """Return what one lease can hold: the demand of one process for a key in a quarter of a
        second, and twice that, because the demand is estimated.
        """
        demand: Counter[tuple[str, str, str, int]] = Counter()
        for call in self.calls:
            demand[call["process"], call["window"], call["key"], call["at"] // 250] += call["cost"]
        return 2 * max(demand.values(), default=0) + 4


def read_logs(folder: Path, timeout_ms: int) -> Logs:
    """Read every log of the folder. An incomplete line is that of a call that has not returned."""
    logs = Logs()
    for path in sorted(folder.iterdir()):
        process, pauses, calls = path.name, [], []
        logs.started.add(process)
        for line in path.read_bytes().split(b"\n")[:-1]:
            facts = json.loads(line)
            if "window" in facts:
                calls.append(facts | {"process": process})
            elif "pause" in facts:
                pauses.append((facts["pause"], facts["lost"]))
            elif "fork" in facts:
                logs.started.add(facts["fork"])
            elif facts.get("ended"):
                logs.ended.add(process)
                logs.unknown += facts["unknown"]
            logs.last.setdefault(process, []).append(facts)
            del logs.last[process][:-10]
        for call in calls:
            call["late_ms"] = call["took"] - timeout_ms - _paused_ms(pauses, call)
        logs.calls += calls
    wrong = [call for call in logs.calls if "wrong" in call]
    if wrong:
        raise Violation(f"fleet: a call raised {wrong[0]['wrong']}", wrong[:5])
    return logs


def _paused_ms(pauses: Iterable[tuple[int, int]], call: Mapping[str, Any]) -> int:
    """Return for how many ms of a call its process did not run."""
    if call["took"] < 100:
        return 0
    began, ended = call["at"] - 100, call["at"] + call["took"] + 100
    return sum(lost for at, lost in pauses if at + lost >= began and at <= ended)


def check_counts(
    what: str,
    stored: Mapping[str, int],
    logs: Logs,
    *,
    by_process: bool,
    under_way: int,
    stranded: int,
) -> tuple[int, int]:
    """Raise `Violation` unless the server has counted what the calls have returned, over the long
    window.

    `by_process`: counts are sent later (`eventual`), so those of a killed process may be missing.
    `under_way`: permits of calls that killed processes may have been making. `stranded`: permits of
    leases that no process holds any more. Return the surplus and the missing permits.
    """
    certain, unsure = logs.sums("long")
    least = logs.flushed("long") if by_process else certain
    over = missing = 0
    by_key: dict[str, dict[str, int]] = defaultdict(dict)
    for key in {*stored, *certain, *unsure}:
        more = stored.get(key, 0) - certain[key] - unsure[key]
        fewer = least[key] - stored.get(key, 0)
        by_key[key] = {
            "stored": stored.get(key, 0),
            "returned": certain[key],
            "of them by processes that ended in order": logs.flushed("long")[key],
            "unknown": unsure[key],
        }
        over += max(0, more)
        missing += max(0, certain[key] - stored.get(key, 0))
        if fewer > 0:
            raise Violation(
                f"{what}: {fewer} permits of {key!r} are lost",
                [by_key[key], *_events(logs, key)],
            )
    if over > under_way + stranded:
        worst = max(by_key, key=lambda key: by_key[key]["stored"] - by_key[key]["returned"])
        raise Violation(
            f"{what}: {over} permits more are counted than calls were admitted or unknown; "
            f"{under_way + stranded} are explained",
            [{"key": key} | sums for key, sums in sorted(by_key.items())] + _events(logs, worst),
        )
    return over, missing


def _events(logs: Logs, key: str) -> list[Any]:
    """Return the last calls of a key."""
    calls = [call for call in logs.calls if call["key"] == key and call["window"] == "long"]
    return sorted(calls, key=lambda call: int(call["at"]))[-12:]
