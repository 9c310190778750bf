"""What several processes have called, and the checks of it.

Each process writes its calls as JSON lines (`caller.py`), stamped with CLOCK_MONOTONIC, which all
processes of a machine share: so the lines of all make one history.

| | check | what must hold |
|---|---|---|
| C1 | `check_aligned_windows` | no window of the buckets holds more than the limit |
| C2 | `check_any_window` | nor does any window, wherever it begins (`strict`) |
| C3 | `check_counts` | charged = admitted + unknown + what is stranded in leases, within bounds |
| C4 | `check_deadlines` | no call ends after its deadline, but for a slack |
| C5 | `heal_ms` | how soon each process is answered by the store again |
| C6 | `check_echoes` | no process acted on the reply to another call |
| C7 | `check_resources` | threads, files and connections are as few at the end as before |
| C8 | `check_refusals` | each refusal is in the store's statistics, once |
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.attack.harness import Violation

AWAY = ("error", "policy", "share")
"""How calls are answered that the store has not decided: by an exception, by the policy, or by the
share of the process (`on_store_error="local"`).
"""

Span = tuple[float, float]
"""From when to when something happened, ms of CLOCK_MONOTONIC."""


@dataclass
class History:
    """The calls of all processes of a run, forked ones included."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """With `process`, `mode`, and `late_ms` less the time for which the process could not run."""
    ended: set[str] = field(default_factory=set)
    """Processes that have flushed all counts and ended in order."""
    started: set[str] = field(default_factory=set)
    unknown: int = 0
    """What the limiters of processes that ended say of calls whose outcome is unknown."""
    last: dict[str, list[Any]] = field(default_factory=dict)
    resources: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """By process: threads and files before its first call, and after its limiters were closed."""

    @property
    def dead(self) -> set[str]:
        """Processes that were killed."""
        return self.started - self.ended

    def of(self, window: str, *modes: str) -> list[dict[str, Any]]:
        """Return the calls of a window, by processes with these modes."""
        return [
            call
            for call in self.calls
            if call["window"] == window and (not modes or call["mode"] in modes)
        ]

    def admitted(self, window: str, *modes: str) -> list[Admitted]:
        """Return what was admitted by the store, or by what it had told before."""
        return [
            Admitted(call["key"], call["now"], call["cost"], call["process"], call["at"])
            for call in self.of(window, *modes)
            if call["ok"] and call["by"] not in AWAY
        ]

    def timed(self) -> list[Timed]:
        return [
            Timed(f"a call of {call['process']}", call["late_ms"], call["at"])
            for call in self.calls
        ]

    def sums(self, window: str) -> tuple[Counter[str], Counter[str]]:
        """Return by key the permits of calls that were admitted and counted, and those of calls
        that may have been charged besides: their outcome is unknown, or was answered by a policy.
        """
        certain: Counter[str] = Counter()
        unsure: Counter[str] = Counter()
        for call in self.of(window):
            certain[call["key"]] += call["cost"] if _is_counted(call) else 0
            maybe = call["ok"] is None or call["by"] in AWAY
            unsure[call["key"]] += call["cost"] if maybe else 0
        return certain, unsure

    def flushed(self, window: str) -> Counter[str]:
        """Return by key the permits that must have arrived: those that the store has admitted
        itself, and those that a process has counted which has flushed all counts.
        """
        certain: Counter[str] = Counter()
        for call in self.of(window):
            sent_later = call["by"] in ("local", "share")
            if _is_counted(call) and (not sent_later or call["process"] in self.ended):
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


def _is_counted(call: Mapping[str, Any]) -> bool:
    return bool(call["ok"]) and call["by"] != "policy"


def read_history(folder: Path, timeout_ms: int) -> History:
    """Read every log of the folder. An incomplete line is that of a call that has not returned."""
    history = History()
    for path in sorted(folder.iterdir()):
        process, pauses, calls = path.name, [], []
        modes: dict[str, str] = {}
        history.started.add(process)
        for line in path.read_bytes().split(b"\n")[:-1]:
            facts = json.loads(line)
            if "window" in facts:
                calls.append(facts | {"process": process, "mode": modes[facts["window"]]})
            elif "modes" in facts:
                modes = facts["modes"]
            elif "pause" in facts:
                pauses.append((facts["pause"], facts["lost"]))
            elif "fork" in facts:
                history.started.add(facts["fork"])
            elif facts.get("ended"):
                history.ended.add(process)
                history.unknown += facts["unknown"]
                if "resources" in facts:
                    history.resources[process] = facts["resources"]
            history.last.setdefault(process, []).append(facts)
            del history.last[process][:-10]
        for call in calls:
            call["late_ms"] = call["took"] - timeout_ms - _paused_ms(pauses, call)
        history.calls += calls
    wrong = [call for call in history.calls if "wrong" in call]
    if wrong:
        raise Violation(f"a call raised {wrong[0]['wrong']}", wrong[:5])
    return history


def _paused_ms(pauses: Iterable[tuple[int, int]], call: Mapping[str, Any]) -> int:
    """Return for how many ms of a call its process did not run."""
    if call["took"] < 100:
        return 0
    began, ended = call["at"] - 100, call["at"] + call["took"] + 100
    return sum(lost for at, lost in pauses if at + lost >= began and at <= ended)


# -- C1 and C2: windows ----------------------------------------------------------------------------


class Admitted(NamedTuple):
    """One admission: the key, the time on the server's clock, the permits, the process, and when
    the call began, ms of CLOCK_MONOTONIC.
    """

    key: str
    now_ms: int
    cost: int
    process: str = ""
    at: int = 0


def check_aligned_windows(
    calls: Iterable[Admitted],
    amount: int,
    bucket_ms: int,
    span: int,
    losses: Sequence[Span] = (),
) -> int:
    """Raise `Violation` if any `span` consecutive buckets of a key hold more than `amount`; return
    the largest sum. Each of `losses`, in which the server may have lost its counts or changed its
    clock, allows `amount` more in the windows with calls around it.
    """
    by_key: dict[str, dict[int, list[Admitted]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        by_key[call.key][call.now_ms // bucket_ms].append(call)
    fullest = 0
    for key, buckets in by_key.items():
        for last in buckets:
            first = last - span + 1
            inside = [c for number in range(first, last + 1) for c in buckets.get(number, ())]
            held = sum(call.cost for call in inside)
            fullest = max(fullest, held)
            if held > amount * (1 + _losses_amid(inside, losses)):
                raise Violation(
                    f"{held} of {amount} permits of {key!r} in the window of {span} buckets of "
                    f"{bucket_ms} ms that begins at {first * bucket_ms}",
                    [call._asdict() for call in inside],
                )
    return fullest


def _losses_amid(calls: Sequence[Admitted], losses: Sequence[Span]) -> int:
    if not losses:
        return 0
    first, last = min(call.at for call in calls), max(call.at for call in calls)
    return sum(began <= last and ended >= first for began, ended in losses)


def check_any_window(
    calls: Iterable[Admitted], amount: int, interval_ms: int, losses: Sequence[Span] = ()
) -> int:
    """Raise `Violation` if any window of `interval_ms` of a key, wherever it begins, holds more
    than `amount`; return the largest sum. `losses`: as in `check_aligned_windows`.
    """
    by_key: dict[str, list[Admitted]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    fullest = 0
    for key, admitted in by_key.items():
        admitted.sort(key=lambda call: call.now_ms)
        held = first = 0
        for last, call in enumerate(admitted):
            held += call.cost
            while call.now_ms - admitted[first].now_ms >= interval_ms:
                held -= admitted[first].cost
                first += 1
            fullest = max(fullest, held)
            if held <= amount:
                continue
            inside = admitted[first : last + 1]
            if held > amount * (1 + _losses_amid(inside, losses)):
                raise Violation(
                    f"{held} of {amount} permits of {key!r} in {interval_ms} ms from "
                    f"{call.now_ms - interval_ms + 1} on",
                    [call._asdict() for call in inside],
                )
    return fullest


# -- C3: conservation ------------------------------------------------------------------------------


def check_counts(
    what: str,
    stored: Mapping[str, int],
    history: History,
    window: str = "long",
    *,
    under_way: int = 0,
    stranded: int = 0,
    lost: bool = False,
) -> tuple[int, int]:
    """Raise `Violation` unless the server has counted what the calls have returned, over a window
    that is longer than the run.

    Counts that are sent later (`eventual`, and the share of a process) may be missing if their
    process was killed. `under_way`: permits of calls that killed processes may have been making.
    `stranded`: permits of leases that no process holds any more. `lost`: the server has lost counts
    (a failover), so they may be fewer. Return the surplus and the missing permits.
    """
    certain, unsure = history.sums(window)
    flushed = history.flushed(window)
    over = missing = 0
    by_key: dict[str, dict[str, int]] = defaultdict(dict)
    for key in {*stored, *certain, *unsure}:
        more = stored.get(key, 0) - certain[key] - unsure[key]
        fewer = flushed[key] - stored.get(key, 0)
        by_key[key] = {
            "stored": stored.get(key, 0),
            "returned": certain[key],
            "of them surely sent": flushed[key],
            "unknown": unsure[key],
        }
        over += max(0, more)
        missing += max(0, certain[key] - stored.get(key, 0))
        if fewer > 0 and not lost:
            raise Violation(
                f"{what}: {fewer} permits of {key!r} are lost",
                [by_key[key], *_events(history, window, key)],
            )
    if over > under_way + stranded:
        worst = max(by_key, key=lambda key: by_key[key]["stored"] - by_key[key]["returned"])
        raise Violation(
            f"{what}: {over} permits more are counted than calls were admitted or unknown; "
            f"{under_way + stranded} are explained",
            [{"key": key} | sums for key, sums in sorted(by_key.items())]
            + _events(history, window, worst),
        )
    return over, missing


def _events(history: History, window: str, key: str) -> list[Any]:
    """Return the last calls of a key."""
    calls = [call for call in history.of(window) if call["key"] == key]
    return sorted(calls, key=lambda call: int(call["at"]))[-12:]


# -- C4 and C5: times ------------------------------------------------------------------------------


class Timed(NamedTuple):
    """One call: what it was, by how many ms it ended after its deadline, and when it began."""

    what: str
    late_ms: int
    began_ms: int = 0


def check_deadlines(calls: Iterable[Timed], slack_ms: int) -> int:
    """Raise `Violation` if a call ended more than `slack_ms` after its deadline; return the largest
    delay.
    """
    latest = 0
    for call in calls:
        latest = max(latest, call.late_ms)
        if call.late_ms > slack_ms:
            raise Violation(
                f"{call.what} ended {call.late_ms} ms after its deadline (slack {slack_ms} ms)",
                [call._asdict()],
            )
    return latest


def heal_ms(calls: Iterable[Mapping[str, Any]], healthy_at: float) -> dict[str, int]:
    """Return for each process and window how many ms after `healthy_at` the last answer came that
    was not the store's: an error, or a policy. From then on the store has answered all calls.
    """
    healed: dict[str, int] = {}
    for call in calls:
        name = f"{call['process']} {call['window']}"
        late = call["at"] + call["took"] - healthy_at
        healed[name] = max(healed.get(name, 0), int(late) if call["by"] in AWAY else 0)
    return healed


# -- C6: echoes ------------------------------------------------------------------------------------


def check_echoes(calls: Iterable[Mapping[str, Any]], slack_ms: int = 5) -> int:
    """Raise `Violation` if a decision of the store was not made while its call was under way, by
    the server's clock, which is that of this machine: it was the reply to another call. Return how
    many calls were checked.
    """
    checked = 0
    for call in calls:
        if call["by"] != "store":
            continue
        checked += 1
        if not -slack_ms <= call["now"] - call["wall"] <= call["took"] + slack_ms:
            raise Violation(
                f"the reply to a call of {call['process']} is {call['now'] - call['wall']} ms off",
                [dict(call)],
            )
    return checked


# -- C7: resources ---------------------------------------------------------------------------------


def check_resources(history: History) -> None:
    """Raise `Violation` if a process had more threads or files after it closed its limiters than
    before it made them, or more files (connections) while it called than threads could use.
    """
    for process, resources in history.resources.items():
        for name, (before, after, allowed) in resources.items():
            if after > before + allowed:
                raise Violation(
                    f"{process} had {before} {name} before its calls, and {after} afterwards",
                    [resources],
                )


# -- C8: statistics --------------------------------------------------------------------------------


def check_refusals(
    what: str,
    blocked: Mapping[str, int],
    history: History,
    window: str,
    *,
    under_way: int = 0,
    lost: bool = False,
) -> None:
    """Raise `Violation` unless the server has counted each refusal once, over a window that is
    longer than the run: those of processes that have ended, and beyond them at most calls of
    unknown outcome, and of killed processes.
    """
    sure: Counter[str] = Counter()
    maybe: Counter[str] = Counter()
    for call in history.of(window):
        refused = call["ok"] is False and call["by"] not in AWAY
        if refused and call["process"] in history.ended:
            sure[call["key"]] += 1
        elif refused:
            maybe[call["key"]] += 1
        elif call["by"] in AWAY:
            maybe[call["key"]] += 2  # by the store, unknown; and by the share of its process
    for key in {*blocked, *sure, *maybe}:
        found, most = blocked.get(key, 0), sure[key] + maybe[key] + under_way
        if not (sure[key] <= found or lost) or found > most:
            raise Violation(
                f"{what}: {found} refusals of {key!r} are counted, not {sure[key]} to {most}",
                _events(history, window, key),
            )
