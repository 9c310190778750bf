"""Scenario `slots`: processes, threads and tasks that hold the slots of a concurrency limit.

`shared`: over a faulty link, with kills, freezes, forks, interruptions and cancellations: never
more slots are held than the limit, and none stays held.
`taken`: an operator takes all slots of a key away now and then: each holder is told.
`order`: callers wait in processes that are frozen, killed and forked: nobody is overtaken by those
who came more than `BOUND_MS` later.
"""

from __future__ import annotations

import itertools
import random
import time

from distwindow import Concurrency
from distwindow.ring.key import slots_name
from tests.attack.client import now_ms
from tests.attack.client_logs import ClientLogs, read_client_logs
from tests.attack.faulty_fleet import ALL_FAULTS, PROCESS_FAULTS, FaultyFleet
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.slot_checks import check_at_most, check_order, check_told, held_spans
from tests.servers import Standalone

VARIANTS = ["shared", "taken", "order"]
RUN_S = 8.0
TTL_S, TIMEOUT_S = 1.0, 0.2
SLACK_MS = 500
"""What a busy machine may add to a time, beyond the pauses that a process has noticed."""
BOUND_MS = SLACK_MS
"""By how much later those may have come who overtake a process that did not pause."""
WAITS_S = 5.0


def slots(run: Run) -> None:
    """Run fleets of some seconds each: of the variant `run.only`, or of one drawn by the seed."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 4:
            return
        rng = random.Random(derive_seed(run.seed, "slots", turn))
        variant = run.only or rng.choice([*VARIANTS, "shared"])
        seconds = min(RUN_S, max(4.0 if variant == "order" else 2.0, left - 2))
        with Standalone() as server:
            _play(run, rng, server, variant, seconds)
        run.count("fleets")


def _play(run: Run, rng: random.Random, server: Standalone, variant: str, seconds: float) -> None:
    taken, order = variant == "taken", variant == "order"
    limit, keys = rng.randint(1, 4), ["a", "b"][: rng.randint(1, 2)]
    if order:
        limit, keys = 1, ["a"]
    plan = {
        "prefix": "slots", "limit": limit, "keys": keys, "ttl": TTL_S, "timeout": TIMEOUT_S,
        "long_share": 0.3 if taken else 0.0 if order else 0.05,
        "waits_s": WAITS_S if order else 0.0,
    }  # fmt: skip
    faults = PROCESS_FAULTS if taken or order else ALL_FAULTS
    taken_at: list[tuple[str, float]] = []
    with FaultyFleet(rng, server, "slots_child", plan, faults) as fleet:

        def take() -> None:
            if taken and rng.random() < 0.7:
                key = rng.choice(keys)
                with server.client() as client:
                    client.delete(slots_name("slots", key))
                taken_at.append((key, now_ms()))
                fleet.note(f"slots of {key} deleted")

        kinds = ["sync", "async", "sync", "async"][: 4 if order else rng.randint(2, 3)]
        fleet.run_for(seconds, kinds, take)
        history = [f"plan {plan}", *fleet.notes[-25:]]
        try:
            logs = read_client_logs(fleet.folder, run)
        except Violation as violation:
            raise Violation(violation.what, [*history, *violation.history]) from None
        spans = held_spans(logs)
        run.count("calls", len(spans))
        run.count("slots lost", sum(span.told for span in spans))
        if taken:
            bound_ms = TTL_S * 1000 / 3 + 2 * TIMEOUT_S * 1000 + SLACK_MS
            run.count("holders told", check_told(spans, taken_at, bound_ms, logs, history))
        else:
            run.maximum("held at once", check_at_most(spans, limit, history))
        if order:
            later_ms = check_order(spans, BOUND_MS, logs, history)
            run.maximum("ms that an overtaker came later", round(later_ms))
        _check_free(server, keys, logs, history)


def _check_free(server: Standalone, keys: list[str], logs: ClientLogs, history: list[str]) -> None:
    """Raise `Violation` unless only killed processes still hold slots, and these end."""
    with Concurrency(server.url, 1, prefix="slots", timeout=5, ttl=10) as reader:
        for key in keys:
            holders = [holder.name for holder in reader.stats(key).holders]
            if not logs.dead.issuperset(holders):
                raise Violation(f"slots: {holders} hold {key!r}; dead are {logs.dead}", history)
        until = time.monotonic() + TTL_S + SLACK_MS / 1000
        while any(reader.stats(key).held for key in keys):
            if time.monotonic() > until:
                raise Violation("slots: those of a dead process do not end", history)
            time.sleep(0.02)  # between two polls
