"""Scenario `breakers`: processes that share a circuit breaker, and a service that breaks and works
again; with kills, freezes, forks, interruptions and cancellations.

`bound`: over a sound link: soon after it has opened, no process lets a call through but the probes
of the fleet. `faulty`: the same over a faulty link, without that bound. `counts`: a breaker that
never opens has counted each end once, over a faulty link. `probes`: inside another breaker of its
kind and window, and entered again inside itself, with probes that take longer than their timeout
and are left by forked children, too: while a probe runs, nothing else does.
In all of them no more probes run at once than the rule says, each process hears of each change
once and in order, and calls are let through again when the service works.
"""

from __future__ import annotations

import itertools
import math
import random
import time

from distwindow.breaker.commands import breaker_name
from tests.attack.breaker_checks import (
    check_alone,
    check_bound,
    check_heard,
    check_opens,
    check_probes,
    read_changes,
    read_passed,
)
from tests.attack.breakers_child import COUNTED, FLUSH_S, KEY, PROBED, RULE, SYNC_S
from tests.attack.client import now_ms
from tests.attack.client_logs import ClientLogs, check_tallies, read_client_logs
from tests.attack.faulty_fleet import ALL_FAULTS, PROCESS_FAULTS, FaultyFleet
from tests.attack.harness import Run, Violation, derive_seed
from tests.servers import Standalone

VARIANTS = ["bound", "faulty", "counts", "probes"]
RUN_S = 9.0
START_S, SOUND_S = 1.5, 1.5
"""The service works for so long at the beginning and at the end."""
WINDOW_MS = RULE.window_ms - 2 * RULE.bucket_ms
"""Calls that ended within this time are surely in one window of the store."""
SLACK_MS = 500
"""What a busy machine may add to a bound, beyond the pauses that a process has noticed."""


def breakers(run: Run) -> None:
    """Run fleets of some seconds each: of the variant `run.only`, or of one drawn by the seed."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 7:
            return
        rng = random.Random(derive_seed(run.seed, "breakers", turn))
        variant = run.only or rng.choice(VARIANTS)
        with Standalone() as server:
            _play(run, rng, server, variant, min(RUN_S, max(5.0, left - 2)))
        run.count("fleets")


def _play(run: Run, rng: random.Random, server: Standalone, variant: str, seconds: float) -> None:
    plan = {
        "prefix": "breakers", "counts": variant == "counts", "probed": variant == "probes",
        "broken": _broken_times(rng, seconds),
    }  # fmt: skip
    faults = PROCESS_FAULTS if variant in ("bound", "probes") else ALL_FAULTS
    with FaultyFleet(rng, server, "breakers_child", plan, faults) as fleet:
        fleet.run_for(seconds, ["sync", "async", "sync"][: rng.randint(2, 3)])
        try:
            logs = read_client_logs(fleet.folder, run)
            if variant == "counts":
                _check_counts(run, server, logs)
            elif variant == "probes":
                _check_probed(run, logs, fleet.froze)
            else:
                _check_states(run, logs, fleet.froze, is_bound=variant == "bound")
        except Violation as violation:
            raise Violation(
                f"breakers {variant}: {violation.what}",
                [*fleet.notes[-20:], *violation.history[-30:]],
            ) from None


def _broken_times(rng: random.Random, seconds: float) -> list[list[float]]:
    """Return when the service is broken, in ms on the clock that all processes share."""
    began, ended = now_ms() + START_S * 1000, now_ms() + (seconds - SOUND_S) * 1000
    times = []
    while began < ended:
        broken_ms = rng.choice([600, 1500, 3000])
        times.append([began, min(ended, began + broken_ms)])
        began += broken_ms + rng.choice([300, 1200])
    return times


def _check_states(run: Run, logs: ClientLogs, froze: set[str], *, is_bound: bool) -> None:
    calls, changes = read_passed(logs), read_changes(logs)
    run.count("calls", len(calls))
    opened = {change.at_ms for change in changes if change.state == "open"}
    run.count("times that it opened", len(opened))
    run.count("probes", sum(call.probe is not None for call in calls))
    if is_bound and not opened:
        raise Violation("the service was broken, and the breaker has not opened", calls[-5:])
    check_probes(calls, RULE.probes, RULE.probe_timeout * 1000, changes)
    run.count("changes heard", check_heard(changes, logs))
    if is_bound:
        bound_ms = SYNC_S * 1000 + SLACK_MS
        # What frozen and killed processes have counted may come late, or never.
        sound = [call for call in calls if call.process in logs.ended - froze]
        paused_ms = max(logs.paused_ms(name, 0, float("inf")) for name in logs.ended - froze)
        check_opens(
            sound, changes, RULE.count, WINDOW_MS, FLUSH_S * 1000 + bound_ms + paused_ms,
            [change._asdict() for change in changes],
        )  # fmt: skip
        run.count("refusing times checked", check_bound(calls, changes, bound_ms, logs))


def _check_probed(run: Run, logs: ClientLogs, froze: set[str]) -> None:
    calls, changes = read_passed(logs), read_changes(logs)
    run.count("calls", len(calls))
    probes = [call for call in calls if call.probe is not None]
    run.count("probes", len(probes))
    run.count("slow probes", sum(call.ended - call.began > PROBED.probe_ms for call in probes))
    opened = {change.at_ms for change in changes if change.state == "open"}
    # A killed process may have had the probe in between, and has not logged it.
    if len(opened) > 2 and not probes:
        raise Violation(f"it opened {len(opened)} times, and there was no probe", calls[-5:])
    # The probe of a process that did not run for a part of its timeout may be another's by now.
    silent_ms = PROBED.probe_ms / 2
    steady = [
        call for call in probes if logs.paused_ms(call.process, call.asked, call.ended) < silent_ms
    ]
    check_probes(steady, PROBED.probes, math.inf, changes)
    check_alone(steady, calls, SYNC_S * 1000 + SLACK_MS, logs)
    check_heard(changes, logs)


def _check_counts(run: Run, server: Standalone, logs: ClientLogs) -> None:
    with server.client(decode_responses=False) as client:
        fields: dict[bytes, bytes] = client.hgetall(breaker_name("breakers", KEY, COUNTED))
    buckets = [value.split() for name, value in fields.items() if name.isdigit()]
    stored = {
        "calls": sum(int(bucket[1]) for bucket in buckets),
        "failures": sum(int(bucket[2]) for bucket in buckets),
    }
    check_tallies("ends", stored, logs, sent_later=True, under_way=len(logs.dead) * 4 * 2)
    run.count("calls", stored["calls"])
