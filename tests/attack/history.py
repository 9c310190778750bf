"""What several processes have logged, and the checks of it.

Each process writes JSON lines (`client.py`), stamped with CLOCK_MONOTONIC, which all processes of a
machine share: so the lines of all make one history.

| | check | what must hold |
|---|---|---|
| C1 | `check_aligned_windows` | no window of the buckets holds more than the limit |
| C2 | `check_any_window` | nor does any window, wherever it begins (`strict`) |
| C3 | `check_conserved` | charged = admitted + unknown + stranded in leases, within bounds |
| C4 | `check_deadlines` | no call ends after its deadline, but for a slack |
| C5 | `heal_ms` | how soon each process is answered by the store again |
| C6 | `check_echoes` | no process acted on the reply to another call |
| C7 | `check_resources` | threads, files and connections are as few at the end as before |
| C8 | `check_refusals` | each refusal is in the store's statistics, once |
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from distwindow.ring.key import ring_name, ring_name_prefix
from distwindow.ring.limit import Limit
from distwindow.ring.replies import ring_state
from tests.attack.harness import Run, Violation

AWAY = ("error", "policy", "share")
"""How calls are answered that the store has not decided: by an exception, by the policy, or by the
share of the process (`on_store_error="local"`).
"""

Span = tuple[float, float]
"""From when to when something happened, ms of CLOCK_MONOTONIC."""

Tally = Counter[str]
"""How many of what: permits, ends of calls; by names such as "passed k1"."""


@dataclass
class History:
    """What all processes of a run have logged, forked ones included."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls of `caller.py`, with `process`, and `late_ms` less the time for which the process
    could not run.
    """
    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Processes that have flushed all and ended in order."""
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By process, in order."""

    @property
    def dead(self) -> set[str]:
        """Processes that were killed, or that were forked by one and did not end."""
        return self.started - self.ended

    @property
    def unknown(self) -> int:
        """What the limiters of processes that ended say of calls whose outcome is unknown."""
        return sum(line["unknown"] for _, line in self.having("unknown"))

    def having(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the lines that have this name, each with its process."""
        for process, lines in self.lines.items():
            for line in lines:
                if name in line:
                    yield process, line

    def paused_ms(self, process: str, began: float, ended: float) -> float:
        """Return for how many ms a process did not run between these moments, or just before."""
        return float(
            sum(
                line["lost"]
                for line in self.lines.get(process, [])
                if "pause" in line
                and line["pause"] + line["lost"] >= began - 200
                and line["pause"] <= ended + 200
            )
        )

    def tallies(self, processes: set[str] | None = None) -> tuple[Tally, Tally]:
        """Return the sums of what is certain and of what is unsure, of all or these processes."""
        certain, unsure = Tally(), Tally()
        for process, line in self.having("sure"):
            if processes is None or process in processes:
                certain.update(line["sure"])
                unsure.update(line["unsure"])
        return certain, unsure

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

    def sums(self, window: str) -> tuple[Tally, Tally]:
        """Return by key the permits of calls that were admitted and counted, and those of calls
        that may have been charged besides: their outcome is unknown, or was answered by a policy.
        """
        certain, unsure = Tally(), Tally()
        for call in self.of(window):
            certain[call["key"]] += call["cost"] if _is_counted(call) else 0
            maybe = call["ok"] is None or call["by"] in AWAY
            unsure[call["key"]] += call["cost"] if maybe else 0
        return certain, unsure

    def flushed(self, window: str) -> Tally:
        """Return by key the permits that must have arrived: those that the store has admitted
        itself, and those that a process has counted which has flushed all counts.
        """
        certain = Tally()
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


def read_history(folder: Path, run: Run | None = None) -> History:
    """Read every log of the folder, and count the figures. An incomplete line is that of a call
    that has not returned. Raises `Violation` for what a client has found wrong itself.
    """
    history = History()
    for path in sorted(folder.iterdir()):
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        history.lines[path.name] = lines
        history.started |= {path.name, *(line["fork"] for line in lines if "fork" in line)}
        if any("closed" in line for line in lines):
            history.ended.add(path.name)
    for process, line in history.having("wrong"):
        raise Violation(f"{process}: {line['wrong']}", history.lines[process][-10:])
    for process, call in history.having("window"):
        call["process"] = process
        if call["took"] >= 100:
            call["late_ms"] -= history.paused_ms(process, call["at"], call["at"] + call["took"])
        history.calls.append(call)
    if run is not None:
        for _, line in history.having("interruptions"):
            run.count("interruptions", line["interruptions"])
    return history


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


# -- C3 and C8: what the store has counted ---------------------------------------------------------


class Counts(NamedTuple):
    """The sums of a ring's buckets."""

    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0


def read_counts(server: redis.Redis, prefix: str, key: str, limit: Limit) -> Counts:
    """Return what the ring of `key` holds. `server` must not decode replies."""
    fields: Any = server.hgetall(ring_name(ring_name_prefix(prefix, key), limit))
    # Only the buckets of the ring matter here, whatever other fields there are.
    state = ring_state(fields, limit.bucket_ms, limit.span)
    if state is None:
        return Counts()
    counts = Counts(
        *(sum(getattr(bucket, name) for bucket in state.buckets) for name in Counts._fields)
    )
    if counts.passed != state.used:
        raise Violation(
            f"the ring of {key!r} has used={state.used}, its buckets sum up to {counts.passed}",
            [repr(state)],
        )
    return counts


def read_all_counts(
    server: redis.Redis, prefix: str, keys: Iterable[str], limit: Limit
) -> dict[str, Counts]:
    """Return the counts of many keys."""
    return {key: read_counts(server, prefix, key, limit) for key in keys}


def read_named(
    server: redis.Redis, prefix: str, keys: Iterable[str], limit: Limit, name: str
) -> dict[str, int]:
    """Return one of the counts, such as "passed", of many keys."""
    return {key: getattr(read_counts(server, prefix, key, limit), name) for key in keys}


def read_breaker(server: redis.Redis, name: bytes) -> tuple[int, int]:
    """Return how many calls ended, and how many failed, that a breaker has counted."""
    fields: Any = server.hgetall(name)
    buckets = [value.split() for field, value in fields.items() if field.isdigit()]
    return sum(int(bucket[1]) for bucket in buckets), sum(int(bucket[2]) for bucket in buckets)


def check_conserved(
    what: str,
    stored: Mapping[str, int],
    certain: Mapping[str, int],
    unsure: Mapping[str, int] | None = None,
    *,
    sent: Mapping[str, int] | None = None,
    more: int = 0,
    history: Iterable[Any] = (),
    events: Callable[[str], Iterable[Any]] = lambda key: (),
) -> tuple[int, int]:
    """Raise `Violation` unless, for each key, the store has counted what calls that returned have
    counted (`certain`), and beyond that at most what calls of unknown outcome have (`unsure`).

    `sent`: of what is certain that which has surely arrived; all of it by default. `more` is
    allowed over all keys: permits of leases that no process holds any more, and calls of processes
    that were killed. `events` returns those of one key. Return how many were more, and missing.
    """
    unsure = unsure or {}
    sent = certain if sent is None else sent
    too_many, too_few, missing = Tally(), Tally(), 0
    for key in {*stored, *certain, *unsure}:
        found, returned = stored.get(key, 0), certain.get(key, 0)
        too_many[key] = max(0, found - returned - unsure.get(key, 0))
        too_few[key] = max(0, sent.get(key, 0) - found)
        missing += max(0, returned - found)
    for word, by_key, allowed in (("more than was called", too_many, more), ("lost", too_few, 0)):
        if by_key.total() > allowed:
            worst = [key for key, number in by_key.most_common(8) if number]
            sums = [
                {
                    "key": key, "stored": stored.get(key, 0), "returned": certain.get(key, 0),
                    "surely sent": sent.get(key, 0), "unknown": unsure.get(key, 0),
                }
                for key in worst
            ]  # fmt: skip
            raise Violation(
                f"{what}: {by_key.total()} {word}, over {len(worst)} of {len(certain)} keys; "
                f"{allowed} are explained",
                [*history, *events(worst[0]), *sums],
            )
    return too_many.total(), missing


def check_tallies(
    what: str,
    stored: Mapping[str, int],
    history: History,
    *,
    sent_later: bool,
    under_way: int,
) -> None:
    """Raise `Violation` unless the store has, of each name, what is certain, and beyond that at
    most what is unsure.

    `sent_later`: counts are flushed, so those of a process that was killed may be missing.
    `under_way`: how much of all names together the calls may be that dead processes were making.
    """
    sent = history.tallies(history.ended)[0] if sent_later else None
    check_conserved(what, stored, *history.tallies(), sent=sent, more=under_way)


def check_counts(
    what: str,
    stored: Mapping[str, int],
    history: History,
    window: str,
    *,
    more: int = 0,
    lost: bool = False,
) -> tuple[int, int]:
    """Raise `Violation` unless the server has counted what the calls have returned, over a window
    that is longer than the run.

    Counts that are sent later (`eventual`, and the share of a process) may be missing if their
    process was killed. `more`: permits of leases that no process holds any more, and of calls that
    killed processes may have been making. `lost`: the server has lost counts (a failover), so they
    may be fewer. Return the surplus and the missing permits.
    """
    return check_conserved(
        what, stored, *history.sums(window), more=more,
        sent={} if lost else history.flushed(window), events=_events_of(history, window),
    )  # fmt: skip


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
    sure, maybe = Tally(), Tally()
    for call in history.of(window):
        refused = call["ok"] is False and call["by"] not in AWAY
        if refused and call["process"] in history.ended:
            sure[call["key"]] += 1
        elif refused:
            maybe[call["key"]] += 1
        elif call["by"] in AWAY:
            maybe[call["key"]] += 2  # by the store, unknown; and by the share of its process
    check_conserved(
        what, blocked, sure, maybe, more=under_way, sent={} if lost else None,
        events=_events_of(history, window),
    )  # fmt: skip


def _events_of(history: History, window: str) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that returns the last calls of a key."""

    def events(key: str) -> list[dict[str, Any]]:
        calls = [call for call in history.of(window) if call["key"] == key]
        return sorted(calls, key=lambda call: int(call["at"]))[-12:]

    return events


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


def heal_ms(calls: Iterable[Mapping[str, Any]], healthy_at: float) -> dict[str, float]:
    """Return for each process and window how many ms after `healthy_at` the last answer came that
    was not the store's: an error, or a policy. From then on the store has answered all calls.
    """
    healed: dict[str, float] = {}
    for call in calls:
        name = f"{call['process']} {call['window']}"
        late = call["at"] + call["took"] - healthy_at
        healed[name] = max(healed.get(name, 0.0), late if call["by"] in AWAY else 0.0)
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
        off_ms = call["now"] - call["wall"]
        if not -slack_ms <= off_ms <= call["took"] + slack_ms:
            raise Violation(
                f"the reply to a call of {call['process']} is {off_ms:.0f} ms off", [dict(call)]
            )
    return checked


# -- C7: resources ---------------------------------------------------------------------------------


def check_resources(history: History) -> None:
    """Raise `Violation` if a process had more threads or files after it closed its limiters than
    before it made them, or more files (connections) while it called than threads could use.
    """
    for process, line in history.having("resources"):
        for name, (before, after, allowed) in line["resources"].items():
            if after > before + allowed:
                raise Violation(
                    f"{process} had {before} {name} before its calls, and {after} afterwards",
                    [line],
                )
