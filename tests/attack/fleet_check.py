"""What the logs of a fleet say, and the checks of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attack.frame import Violation
from tests.attack.windows import Admitted, Timed


@dataclass
class Logs:
    """All processes of a run, forked ones too."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """With `who` and `late_ms`, what the process could not run taken out."""
    ended: set[str] = field(default_factory=set)
    """Processes that have told everything and said so."""
    started: set[str] = field(default_factory=set)
    unknown: int = 0
    last: dict[str, list[Any]] = field(default_factory=dict)

    def admitted(self, window: str) -> list[Admitted]:
        return [
            Admitted(call["key"], call["now"], call["cost"], call["who"])
            for call in self.calls
            if call["ok"] and call["window"] == window
        ]

    def timed(self) -> list[Timed]:
        return [
            Timed(f"a call of {call['who']}", call["late_ms"], call["at"]) for call in self.calls
        ]

    def sums(self, window: str) -> tuple[Counter[str], Counter[str]]:
        """By key: permits of calls that returned admitted, and of those of unknown outcome."""
        certain: Counter[str] = Counter()
        unsure: Counter[str] = Counter()
        for call in self.calls:
            if call["window"] == window:
                certain[call["key"]] += call["cost"] if call["ok"] else 0
                unsure[call["key"]] += call["cost"] if call["ok"] is None else 0
        return certain, unsure

    def told(self, window: str) -> Counter[str]:
        """By key: permits that processes have admitted which have told everything."""
        certain: Counter[str] = Counter()
        for call in self.calls:
            if call["window"] == window and call["ok"] and call["who"] in self.ended:
                certain[call["key"]] += call["cost"]
        return certain

    def lease(self) -> int:
        """What one lease can hold: the demand of a quarter of a second of one process on a key;
        twice that, as a demand is estimated.
        """
        demand: Counter[tuple[str, str, str, int]] = Counter()
        for call in self.calls:
            demand[call["who"], call["window"], call["key"], call["at"] // 250] += call["cost"]
        return 2 * max(demand.values(), default=0) + 4


def read_logs(folder: Path, timeout_ms: int) -> Logs:
    """Every log of the folder. A line that is cut off is that of a call that has not returned."""
    logs = Logs()
    for path in sorted(folder.iterdir()):
        who, hiccups, calls = path.name, [], []
        logs.started.add(who)
        for line in path.read_bytes().split(b"\n")[:-1]:
            facts = json.loads(line)
            if "window" in facts:
                calls.append(facts | {"who": who})
            elif "hiccup" in facts:
                hiccups.append((facts["hiccup"], facts["lost"]))
            elif "fork" in facts:
                logs.started.add(facts["fork"])
            elif facts.get("ended"):
                logs.ended.add(who)
                logs.unknown += facts["unknown"]
            logs.last.setdefault(who, []).append(facts)
            del logs.last[who][:-10]
        for call in calls:
            call["late_ms"] = call["took"] - timeout_ms - _lost(hiccups, call)
        logs.calls += calls
    wrong = [call for call in logs.calls if "wrong" in call]
    if wrong:
        raise Violation(f"fleet: a call raised {wrong[0]['wrong']}", wrong[:5])
    return logs


def _lost(hiccups: Iterable[tuple[int, int]], call: Mapping[str, Any]) -> int:
    """Milliseconds of a call in which its process did not run."""
    if call["took"] < 100:
        return 0
    began, ended = call["at"] - 100, call["at"] + call["took"] + 100
    return sum(lost for at, lost in hiccups if at + lost >= began and at <= ended)


def counted(
    what: str,
    stored: Mapping[str, int],
    logs: Logs,
    *,
    by_process: bool,
    under_way: int,
    stranded: int,
) -> tuple[int, int]:
    """Conservation over the long window.

    `by_process`: counts are told later (`eventual`), so those of a process that was killed may be
    missing. `under_way`: permits that calls of killed processes may have been counted for.
    `stranded`: permits that leases may have left behind. Returns what was left over and missing.
    """
    certain, unsure = logs.sums("long")
    least = logs.told("long") if by_process else certain
    over = missing = 0
    by_key: dict[str, dict[str, int]] = defaultdict(dict)
    for key in {*stored, *certain, *unsure}:
        more = stored.get(key, 0) - certain[key] - unsure[key]
        fewer = least[key] - stored.get(key, 0)
        by_key[key] = {
            "stored": stored.get(key, 0),
            "returned": certain[key],
            "of them by processes that ended in order": logs.told("long")[key],
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
    """The last calls of a key."""
    calls = [call for call in logs.calls if call["key"] == key and call["window"] == "long"]
    return sorted(calls, key=lambda call: int(call["at"]))[-12:]
