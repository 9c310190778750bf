"""Scenario `fleet`: processes, threads and tasks that call shared keys, over a faulty link.

Afterwards the logs of all processes and the rings of the server are checked: no window is above its
limit (direct, leased), each admitted call is counted once and none is lost except with a killed
process, and no call ends after its deadline.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from distwindow import Limit
from tests.attack.faulty_fleet import FaultyFleet
from tests.attack.harness import FOREVER, Run, Violation, derive_seed
from tests.attack.server_counts import read_all_counts
from tests.faults.history import (
    History,
    check_aligned_windows,
    check_any_window,
    check_counts,
    check_deadlines,
    check_echoes,
    check_resources,
    read_history,
)
from tests.servers import Standalone

MODES = ["direct", "leased", "eventual"]
SHORT = [
    "40/second", "100/second 5 buckets", "30/second strict 10 buckets", "300/2s strict 20 buckets",
    "7/500ms",
]  # fmt: skip
LONG_KEYS = ["c", "d", *(f"{{name}}-{number}" for number in range(3))]
"""Two of all processes, and three of each."""
RUN_S = 8.0
TIMEOUT_S = 0.8
SLACK_MS = 600


def fleet(run: Run) -> None:
    """Run fleets of some seconds each. The seed draws the consistency, the limit and the faults."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 3:
            return
        Fleet(run, derive_seed(run.seed, "fleet", turn)).run_for(min(RUN_S, max(1.0, left - 1)))
        run.count("fleets")


class Fleet:
    """One fleet: what the seed draws, and the checks."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.rng = random.Random(seed)
        self.seed = seed
        self.mode = run.only or self.rng.choice(MODES)
        self.limit = Limit(self.rng.choice(SHORT))
        self.faults: list[str] = []

    def run_for(self, seconds: float) -> None:
        plan = {
            "windows": {
                "short": self._limiter("fleet-short", str(self.limit)),
                "long": self._limiter("fleet-long", FOREVER),
            },
            "calls": [
                {"window": "short", "weight": 6, "keys": ["a", "b"], "costs": [1, 1, 1, 2]},
                {"window": "long", "weight": 4, "keys": LONG_KEYS, "costs": [1, 1, 3]},
            ],
        }
        kinds = ["sync", "sync", "async"][: self.rng.randint(2, 3)]
        with (
            Standalone() as server,
            FaultyFleet(self.rng, server, "tests.faults.caller", plan) as clients,
        ):
            clients.run_for(seconds, kinds)
            self.faults = clients.notes
            self._check(server, read_history(clients.folder, int(TIMEOUT_S * 1000)))

    def _limiter(self, prefix: str, limits: str) -> dict[str, Any]:
        return {
            "limits": limits, "prefix": prefix, "consistency": self.mode, "timeout": TIMEOUT_S,
        }  # fmt: skip

    def _check(self, server: Standalone, logs: History) -> None:
        self.run.count("calls", len(logs.calls))
        self.run.count("faults", len(self.faults))
        what = f"fleet {self.mode} {self.limit}"
        try:
            if self.mode != "eventual":
                limit, admitted = self.limit, logs.admitted("short")
                check_aligned_windows(admitted, limit.amount, limit.bucket_ms, limit.span)
                if limit.bound == "strict":
                    check_any_window(admitted, limit.amount, limit.interval_ms)
                self.run.count("admissions checked", len(admitted))
            names = {call["key"] for call in logs.calls if call["window"] == "long"}
            with server.client(decode_responses=False) as client:
                found = read_all_counts(client, "fleet-long", names, Limit(FOREVER))
            dead = logs.dead
            over, missing = check_counts(
                what,
                {key: count.passed for key, count in found.items()},
                logs,
                under_way=len(dead) * 3 * 3,
                stranded=self._stranded(logs, dead),
            )
            self.run.count(f"permits stranded, {self.mode}", over)
            self.run.count("permits that killed processes had not sent", missing)
            latest = check_deadlines(logs.timed(), SLACK_MS)
            self.run.maximum("ms after the deadline", latest)
            self.run.count("echoes checked", check_echoes(logs.calls))
            check_resources(logs)
        except Violation as violation:
            raise Violation(
                f"{what}: {violation.what}", [*self.faults[-25:], *violation.history[-15:]]
            ) from None

    def _stranded(self, logs: History, dead: set[str]) -> int:
        """Return the permits of leases whose reply was lost, and of those that killed processes
        held: at most one lease of each key at a time.
        """
        if self.mode != "leased":
            return 0
        lost = (len(self.faults) + len(dead)) * len(logs.started) * 5
        return lost * logs.lease()
