"""Checks of the calls that circuit breakers let through, and of the changes that were heard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tests.attack.client_logs import ClientLogs
from tests.attack.harness import Violation


class Passed(NamedTuple):
    """A call that was let through; ms on the clock that all processes share."""

    process: str
    asked: float
    """Just before it asked the breaker."""
    began: float
    ended: float
    """When its block ended; when it began, if that is not known."""
    probe: str | None
    failed: bool | None
    """None if it was interrupted or cancelled."""


class Change(NamedTuple):
    """A change of state that a listener has heard."""

    process: str
    heard: float
    at_ms: int
    """When it happened, on the store's clock."""
    previous: str
    state: str


def read_passed(logs: ClientLogs) -> list[Passed]:
    """Return the calls that were let through, in order."""
    found = [
        Passed(
            process, line["asked"], line["began"], line["ended"], line["probe"], line["failed"]
        )
        for process, line in logs.having("asked")
    ]  # fmt: skip
    return sorted(found, key=lambda call: call.asked)


def read_changes(logs: ClientLogs) -> list[Change]:
    """Return what was heard: of each process in the order in which it heard it."""
    return [
        Change(process, line["heard"], line["at_ms"], line["previous"], line["state"])
        for process, line in logs.having("heard")
    ]


def check_heard(changes: Sequence[Change], logs: ClientLogs) -> int:
    """Raise `Violation` if a process has heard a change twice, out of order, or from another state
    than the one before. Where a listener was interrupted, there may be a gap. Return how many were
    heard.
    """
    interrupted = {process for process, _ in logs.having("interrupted_listener")}
    for process in logs.lines:
        own = [change for change in changes if change.process == process]
        history = [change._asdict() for change in own]
        for before, after in itertools.pairwise(own):
            skips = after.previous != before.state and process not in interrupted
            if after.at_ms <= before.at_ms or skips:
                raise Violation(
                    f"{process} has heard {after.previous} -> {after.state} of {after.at_ms} after "
                    f"{before.previous} -> {before.state} of {before.at_ms}",
                    history,
                )
    return len(changes)


def check_probes(
    calls: Iterable[Passed], probes: int, timeout_ms: float, changes: Iterable[Change] = ()
) -> None:
    """Raise `Violation` if more probes of the fleet ran at once, none of them for longer than
    `timeout_ms`.
    """
    running: list[Passed] = []
    for call in sorted(calls, key=lambda call: call.began):
        if call.probe is None:
            continue
        running = [
            one
            for one in running
            if min(one.ended, one.asked + timeout_ms) > call.began and one.probe != call.probe
        ]
        running.append(call)
        if len(running) > probes:
            raise Violation(
                f"{len(running)} probes of the fleet run at once, of {probes}",
                [*(c._asdict() for c in changes), *(c._asdict() for c in running)],
            )


def check_alone(
    probes: Iterable[Passed], calls: Sequence[Passed], bound_ms: float, logs: ClientLogs
) -> None:
    """Raise `Violation` if a call that was no probe was let through while one of these probes ran,
    later than `bound_ms` after its beginning: only its end may close the breaker.
    """
    for probe in probes:
        for call in calls:
            late = call.asked - probe.began - bound_ms
            if call.probe is not None or late <= 0 or call.asked >= probe.ended:
                continue
            if late > logs.paused_ms(call.process, probe.began, call.asked):
                raise Violation(
                    f"{call.process} let a call through beside a probe of the fleet",
                    [probe._asdict(), call._asdict()],
                )


def check_bound(
    calls: Sequence[Passed], changes: Sequence[Change], bound_ms: float, logs: ClientLogs
) -> int:
    """Raise `Violation` if a call that was no probe was let through later than `bound_ms` after the
    first process had heard that the breaker opened, and before any heard that it closed. Return how
    many times it was not closed.
    """
    ordered = sorted(changes, key=lambda change: change.heard)
    opened: float | None = None
    times: list[tuple[float, float]] = []
    for change in ordered:
        if change.state == "open" and opened is None:
            opened = change.heard
        elif change.state == "closed" and opened is not None:
            times.append((opened, change.heard))
            opened = None
    if opened is not None:
        times.append((opened, float("inf")))
    for opened, closed in times:
        for call in calls:
            late = call.asked - opened - bound_ms
            if call.probe is not None or late <= 0 or call.asked >= closed - bound_ms:
                continue
            if late > logs.paused_ms(call.process, opened, call.asked):
                raise Violation(
                    f"{call.process} let a call through {call.asked - opened:.0f} ms after the "
                    f"breaker had opened",
                    [*(c._asdict() for c in ordered if c.heard <= call.asked), call._asdict()],
                )
    return len(times)


def check_opens(
    calls: Iterable[Passed],
    changes: Iterable[Change],
    count: int,
    window_ms: float,
    bound_ms: float,
    history: Iterable[Any] = (),
) -> bool:
    """Raise `Violation` unless the breaker has opened for the first time within `bound_ms` of the
    moment at which `count` of these calls had failed within `window_ms`. Return whether so many
    did.
    """
    opened = min((change.heard for change in changes if change.state == "open"), default=None)
    failed = sorted(call.ended for call in calls if call.failed)
    for first, last in zip(failed, failed[count - 1 :], strict=False):
        if last - first <= window_ms:
            if opened is None or opened - last > bound_ms:
                raise Violation(
                    f"{count} calls had failed at {last:.0f} ms, and the first process heard that "
                    f"the breaker opened at {opened} ms",
                    history,
                )
            return True
    return False
