"""Processes of two versions on one Redis, as in a rolling deployment (`scripts/test-upgrade`).

Four of each, `old` and `new`, call everything at once (`upgrade_child.py`), without faults, but
that two others, one of each version, are killed with all slots of a key and with a probe. What must
hold is what holds of one version: no limit is exceeded, each count is in the store once, and nobody
waits for what nobody has.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from distwindow import Limit
from distwindow.breaker.commands import breaker_name
from tests.attack.breakers import check_heard, read_changes
from tests.attack.cold_child import COUNTED
from tests.attack.fleet import Fleet
from tests.attack.harness import FOREVER, MODES, ROOT, Violation
from tests.attack.history import (
    Admitted,
    History,
    check_aligned_windows,
    check_conserved,
    check_counts,
    check_refusals,
    read_breaker,
    read_counts,
    read_history,
)
from tests.attack.slots import Held, check_at_most, held_spans
from tests.attack.upgrade_child import BACK_S, PREFIX, RULE, SERVICE, SHARED, SLOTS
from tests.servers import Standalone, until

SHORT = Limit("20/500ms 5 buckets")
FULL = Limit("150/day 1 buckets")
"""Full after some calls: then it counts refusals."""
_LIMITS = {"short": SHORT, "full": FULL, "all": Limit(FOREVER)}
_EXACT = ("direct", "leased")
CALLS = 300
"""So many calls of limiters each process makes at least."""
SOUND_MS = 1000
"""After this time all processes know what one has counted, also on a busy machine."""
KINDS = ["sync", "async", "sync", "async"]
"""Those of the processes of each version."""
VERSIONS = ("old", "new")
HOLDERS = [f"{version}-holder" for version in VERSIONS]


def plan(broken: Path) -> dict[str, Any]:
    """Return the plan of all processes. `broken`: the file that breaks the service."""
    limits = {f"{name} {mode}": limit for mode in MODES for name, limit in _LIMITS.items()}
    del limits["short eventual"]  # counts of others arrive later than its window lasts
    limits["waits"] = SHORT
    return {
        "windows": {
            name: {
                "limits": str(limit), "prefix": prefix(name), "timeout": 2.0,
                "consistency": name.rpartition(" ")[2] if name != "waits" else "direct",
            }
            for name, limit in limits.items()
        },
        "calls": [
            {"window": name, "weight": 1, "keys": ["k"], "costs": [1]}
            | ({"waits": BACK_S} if name == "waits" else {})
            for name in limits
        ],
        "broken": str(broken), "holders": HOLDERS, "threads": 2, "pause_s": 0.03,
    }  # fmt: skip


def prefix(window: str) -> str:
    """Return the prefix of the limiters of a window."""
    return f"{PREFIX}-{window.replace(' ', '-')}"


def start_holders(fleet: Fleet, python: str) -> None:
    """Start the holders; `python` is that of the old version."""
    for name in HOLDERS:
        fleet.start("sync", name=name, **_environment(name, python))
    _until_logged(fleet, HOLDERS, "the probe of", "took all slots, and the probe of its breaker")


def play(fleet: Fleet, python: str) -> None:
    """Run the other processes until each has called often, and the service was broken once."""
    names = [f"{version}-{n}-{kind}" for n, kind in enumerate(KINDS) for version in VERSIONS]
    for name in names:
        fleet.start(name.rpartition("-")[2], name=name, **_environment(name, python))
    _until_logged(fleet, names, '"window"', "made its calls", CALLS)
    for name in HOLDERS:
        fleet.kill(name)
    broken = Path(fleet.plan["broken"])
    broken.touch()
    _until_logged(fleet, names, '"state": "open"', "heard that the breaker opened")
    time.sleep(2.5 * SOUND_MS / 1000)  # probes fail meanwhile
    broken.unlink()
    _until_logged(fleet, names, '"state": "closed"', "heard that the breaker closed")
    try:
        fleet.end()
    except Violation:
        read_history(fleet.folder)  # raises what a process has found wrong itself
        raise


def _environment(name: str, python: str) -> dict[str, str]:
    return {"python": python} if version_of(name) == "old" else {}


def _until_logged(fleet: Fleet, names: Iterable[str], text: str, what: str, times: int = 1) -> None:
    """Wait until each of these processes has logged `text` so many times."""
    missing: list[str] = []

    def is_logged() -> bool:
        missing[:] = [name for name in names if fleet.clients[name].process.poll() is not None]
        if missing:
            return True
        missing[:] = names
        logs = {name: (fleet.folder / name).read_text() for name in names}
        if any('"wrong"' in log for log in logs.values()):
            read_history(fleet.folder)  # raises it
        missing[:] = [name for name, log in logs.items() if log.count(text) < times]
        return not missing

    with suppress(TimeoutError):
        until(is_logged, 40, every=0.1)
    if missing:
        errors = [fleet.clients[name].stderr()[-3000:] for name in missing]
        raise Violation(f"{', '.join(missing)} never {what}", errors)


def version_of(process: str) -> str:
    """Return "old" or "new"."""
    return process.partition("-")[0]


def read_written(server: Standalone) -> dict[str, dict[str, str]]:
    """Return what the holders, each alone with its keys, have written: by key and version."""
    written: dict[str, dict[str, str]] = defaultdict(dict)
    with server.client(decode_responses=True) as client:
        for name in sorted(client.scan_iter("*-holder*")):
            is_hash = client.type(name) == "hash"
            found = client.hgetall(name) if is_hash else client.zrange(name, 0, -1, withscores=True)
            content = str(sorted(found.items()) if is_hash else found)
            version = "old" if "old-" in name else "new"
            written[name.replace(f"{version}-", "")][version] = content.replace(f"{version}-", "")
    return written


def different(written: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what differs in the names of fields, the form of values, the digits of times."""
    return [
        "\n".join([key, *(f"  {version} writes {by.get(version)}" for version in VERSIONS)])
        for key, by in written.items()
        if len({_form(by.get(version, "")) for version in VERSIONS}) > 1
    ]


def _form(content: str) -> str:
    """Return a text with the number of digits in place of each number, and without ids."""
    content = re.sub(r"\b([0-9a-f]{10}|[0-9a-f]{12}(\.\d+)?)\b", "id", content)
    return re.sub(r"\d+", lambda found: str(len(found[0])), content)


def check(history: History, server: Standalone) -> None:
    """Raise `Violation` for what does not hold."""
    for window, limit in [(f"{n} {m}", _LIMITS[n]) for m in _EXACT for n in ("short", "full")]:
        with told(f"limit {window!r}"):
            check_shared(history.admitted(window), limit)
    with told("waiting"):
        check_shared(history.admitted("waits"), SHORT)
    for window, limit in (("short direct", SHORT), ("full direct", FULL)):
        with told(f"limit {window!r}"):
            check_room(history.of(window), limit)
    with told("limit 'full eventual'"):
        check_known(history.admitted("full eventual"), FULL.amount, history)
    with server.client(decode_responses=False) as client:
        for window, limit in [(f"{n} {m}", _LIMITS[n]) for m in MODES for n in ("all", "full")]:
            counts = read_counts(client, prefix(window), "k", limit)
            check_counts(f"permits of {window!r}", {"k": counts.passed}, history, window)
            check_refusals(f"refusals of {window!r}", {"k": counts.blocked}, history, window)
        stored = {"reserved": read_counts(client, PREFIX, SHARED, _LIMITS["all"]).passed}
        ends, failed = read_breaker(client, breaker_name(PREFIX, SERVICE, COUNTED))
    stored |= {"ends of calls": ends, "failed calls": failed}
    check_conserved("reservations, and calls in breakers", stored, *history.tallies())
    with told("slots and probes"):
        check_holders(history)
    with told("breakers"):
        check_probed(history)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Add to a violation `what` it is of, and how much of it is of each version."""
    try:
        yield
    except Violation as violation:
        events = [event for event in violation.history if isinstance(event, dict)]
        of = Counter(version_of(event["process"]) for event in events if "process" in event)
        by = ", ".join(f"{number} by {version}" for version, number in sorted(of.items()))
        raise Violation(f"{what}: {violation.what} ({by})", violation.history) from None


def check_shared(admitted: Sequence[Admitted], limit: Limit) -> None:
    """Raise `Violation` if a window holds more than the limit, or a version never got a permit."""
    check_aligned_windows(admitted, limit.amount, limit.bucket_ms, limit.span)
    for version in VERSIONS:
        if not any(call.process.startswith(version) for call in admitted):
            raise Violation(f"{version} never got a permit", [c._asdict() for c in admitted])


def check_room(calls: Sequence[Mapping[str, Any]], limit: Limit) -> None:
    """Raise `Violation` if the store has refused a call although there was room in the window."""
    for call in calls:
        if call["ok"] is not False or call["by"] != "store":
            continue
        oldest = call["now"] // limit.bucket_ms - limit.span + 1
        before = [
            other
            for other in calls
            if other["ok"] and oldest <= other["now"] // limit.bucket_ms
            if other["now"] <= call["now"]
        ]
        if sum(other["cost"] for other in before) + call["cost"] <= limit.amount:
            raise Violation(
                f"a call of {call['process']} was refused, and {len(before)} of {limit.amount} "
                "permits were taken",
                [*before, call],
            )


def check_known(admitted: Sequence[Admitted], amount: int, history: History) -> None:
    """Raise `Violation` if a process admits a call although the fleet has used up the window, and
    all have had the time to learn of it.
    """
    ordered = sorted(admitted, key=lambda call: call.at)
    if len(ordered) < amount:
        raise Violation(f"only {len(ordered)} of {amount} permits were ever admitted")
    full_at = ordered[amount - 1].at
    late = [
        call
        for call in ordered
        if call.at - full_at > SOUND_MS + history.paused_ms(call.process, full_at, call.at)
    ]
    if late:
        raise Violation(
            f"{len(late)} calls were admitted more than {SOUND_MS} ms after the fleet had used up "
            f"the {amount} permits",
            [call._asdict() for call in late],
        )


def check_holders(history: History) -> None:
    """Raise `Violation` if slots or probes were given to somebody while others had them."""
    spans = held_spans(history)
    for span in spans:
        if span.told:
            raise Violation(f"{span.process} has lost a slot of {span.key!r}", [span._asdict()])
    probes = {span.key: span for span in spans if span.key.startswith("the probe of")}
    check_at_most([span for span in spans if span.key not in probes], SLOTS)
    for process, line in history.having("passed"):
        key = f"the probe of {line['passed']}"
        if key in probes and line["began"] < probes[key].ended:
            check_at_most([probes[key], Held(key, line["began"], line["ended"], process, False)], 1)


def check_probed(history: History) -> None:
    """Raise `Violation` if more than one call was let through while the service was broken and all
    have had the time to learn of it, if a probe went too early, or if a process has heard changes
    out of order.
    """
    changes = read_changes(history)
    check_heard(changes, history)
    for before, after in pairwise(sorted(changes, key=lambda change: change.at_ms)):
        open_ms = after.at_ms - before.at_ms
        if before.state == "open" and 0 < open_ms < RULE.open_ms:
            raise Violation(
                f"it opened for {RULE.open_ms} ms, and was {after.state} after {open_ms} ms",
                [before._asdict(), after._asdict()],
            )
    opened = min(change.heard for change in changes if change.state == "open")
    closed = min(change.heard for change in changes if change.state == "closed")
    probes = [
        Held(SERVICE, line["began"], line["ended"], process, False)
        for process, line in history.having("passed")
        if line["passed"] == SERVICE
        if line["asked"] > opened + SOUND_MS and line["began"] < closed - SOUND_MS / 2
    ]
    check_at_most(probes, RULE.probes)


def main(python: str, old: str) -> int:
    """Return the exit status; `python` is that of an environment with the version `old`."""
    print(f"four processes of {old} (old) and four of this checkout (new) on one Redis", flush=True)
    began = time.monotonic()
    with (
        Standalone() as server,
        tempfile.TemporaryDirectory() as folder,
        Fleet(random.Random(1), server.url, "upgrade_child", plan(Path(folder, "broken"))) as fleet,
    ):
        written: dict[str, dict[str, str]] = {}
        try:
            start_holders(fleet, python)
            written = read_written(server)
            play(fleet, python)
            history = read_history(fleet.folder)
            check_packages(history, python)
            check(history, server)
        except Violation as violation:
            print(f"{old} (old) and this checkout (new) cannot share a Redis: {violation}")
            print("what each writes otherwise where it is alone:", *different(written), sep="\n")
            return 1
    print(f"{len(history.calls)} calls of limiters, {time.monotonic() - began:.0f} s: all holds")
    return 0


def check_packages(history: History, python: str) -> None:
    """Raise `Violation` unless each process has used the version that it was to use."""
    homes = {"old": Path(python).parents[1], "new": ROOT / "distwindow"}
    for process, line in history.having("package"):
        if homes[version_of(process)] not in Path(line["package"]).parents:
            raise Violation(f"{process} has used {line['package']}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
