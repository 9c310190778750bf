"""Scenario `entries`: entries with origins that succeed, fail, and are interrupted, cancelled or
killed, over a faulty link, with every consistency.

Each end is counted exactly once in the ring and in the minute view, and the views by origin sum up
to that of all entries.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

from distwindow import Limit, Limiter
from tests.attack.client_logs import ClientLogs, check_tallies, read_client_logs
from tests.attack.faulty_fleet import FaultyFleet
from tests.attack.harness import FOREVER, Run, Violation, derive_seed
from tests.attack.server_counts import read_all_counts
from tests.servers import Standalone

MODES = ["direct", "leased", "eventual"]
WIDE, TIGHT = FOREVER, "5/day"
RUN_S = 8.0
"""Much less than a minute, so that the minute view has everything."""
KEYS = ["a", "b", "c"]


def entries(run: Run) -> None:
    """Run fleets of some seconds each. The seed draws the consistency and the faults."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 4:
            return
        rng = random.Random(derive_seed(run.seed, "entries", turn))
        mode = run.only or rng.choice(MODES)
        with Standalone() as server:
            _play(run, rng, server, mode, min(RUN_S, max(2.0, left - 2)))
        run.count("fleets")


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    plan = {
        "prefix": "entries", "mode": mode, "wide": WIDE, "tight": TIGHT, "keys": KEYS,
        "timeout": 0.5, "max_origins": 3,
    }  # fmt: skip
    with FaultyFleet(rng, server, "entries_child", plan) as fleet:
        fleet.run_for(seconds, ["sync", "async", "sync"][: rng.randint(2, 3)])
        try:
            logs = read_client_logs(fleet.folder, run)
            _check(run, server, logs, mode)
        except Violation as violation:
            raise Violation(
                f"entries {mode}: {violation.what}", [*fleet.notes[-20:], *violation.history[-20:]]
            ) from None


def _check(run: Run, server: Standalone, logs: ClientLogs, mode: str) -> None:
    stored: Counter[str] = Counter()
    for window, limit in (("wide", WIDE), ("tight", TIGHT)):
        prefix = f"entries-{window}"
        with server.client(decode_responses=False) as client:
            for key, counts in read_all_counts(client, prefix, KEYS, Limit(limit)).items():
                stored[f"ring success {window} {key}"] += counts.success
                stored[f"ring error {window} {key}"] += counts.error
                stored[f"ring blocked {window} {key}"] += counts.blocked
        with Limiter(server.url, limit, prefix=prefix, timeout=5) as limiter:
            for key in KEYS:
                view, by_origin = limiter.minute(key), limiter.origins(key)
                for name in ("passed", "blocked", "success", "error"):
                    stored[f"view {name} {window} {key}"] += getattr(view, name)
                    of_origins = sum(getattr(origin, name) for origin in by_origin.values())
                    if of_origins != getattr(view, name):
                        raise Violation(
                            f"{name} of {key!r}: {getattr(view, name)} in the view of all entries, "
                            f"{of_origins} in those of origins",
                            [f"{name}: {stats}" for name, stats in by_origin.items()],
                        )
    # Four calls may be under way in a process that is killed. Each counts a pass in the view, and
    # its end in the view and the ring, or a block in both.
    under_way = len(logs.dead) * 4 * 3
    check_tallies("entries", stored, logs, sent_later=True, under_way=under_way)
    certain, _ = logs.tallies()
    run.count("calls", sum(n for name, n in certain.items() if name.startswith("view")))
    run.count("ends checked", sum(n for name, n in certain.items() if "success" in name))
