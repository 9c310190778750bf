"""Scenario `borrowing`: calls with and without priority, refunds and waits, over a faulty link.

With borrowed permits in the bucket in which their call proceeds, no window holds more than the
limit, nor more borrowed permits than the share; every permit, borrowed or not, is counted once.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from distwindow import Limit
from distwindow.ring.key import ring_name, ring_name_prefix
from distwindow.ring.replies import ring_state
from tests.attack.client_logs import ClientLogs, check_tallies, read_client_logs
from tests.attack.faulty_fleet import FaultyFleet
from tests.attack.harness import Run, Violation, derive_seed
from tests.faults.history import Admitted, check_aligned_windows, check_any_window
from tests.servers import Standalone

MODES = ["direct", "leased"]
SHORT = [
    "40/second", "30/second strict 10 buckets", "100/2s 10 buckets", "12/500ms 5 buckets",
    "30/500ms strict 10 buckets",
]  # fmt: skip
LONG = Limit("200/day 1 buckets")
"""Each key is full after some calls, and then lends permits of tomorrow."""
RUN_S = 8.0
MAX_COST = 3


def borrowing(run: Run) -> None:
    """Run fleets of some seconds each. The seed draws the consistency, the limit and the faults."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 4:
            return
        rng = random.Random(derive_seed(run.seed, "borrowing", turn))
        mode = run.only or rng.choice(["direct", "direct", "leased"])
        with Standalone() as server:
            _play(run, rng, server, mode, min(RUN_S, max(2.0, left - 2)))
        run.count("fleets")


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    limit, share = Limit(rng.choice(SHORT)), rng.choice([0.3, 0.5, 1.0])
    plan = {
        "prefix": "borrowing", "mode": mode, "short": str(limit), "long": str(LONG),
        "share": share, "timeout": 0.5,
    }  # fmt: skip
    with FaultyFleet(rng, server, "borrowing_child", plan) as fleet:
        fleet.run_for(seconds, ["sync", "async", "sync"][: rng.randint(2, 3)])
        try:
            logs = read_client_logs(fleet.folder, run)
            _check_windows(run, logs, limit, share)
            if mode == "direct":  # with `leased`, a lost lease is counted as well
                keys = {line["key"] for _, line in logs.having("call") if line["call"] == "long"}
                # Three threads of each process, and each may be in a call of the greatest cost.
                under_way = len(logs.dead) * 4 * MAX_COST
                stored = {f"permits {key}": _stored(server, key) for key in keys}
                check_tallies("permits", stored, logs, sent_later=False, under_way=under_way)
                run.count("keys checked", len(keys))
        except Violation as violation:
            raise Violation(
                f"borrowing {mode} {limit} share {share}: {violation.what}",
                [*fleet.notes[-20:], *violation.history[-20:]],
            ) from None


def _check_windows(run: Run, logs: ClientLogs, limit: Limit, share: float) -> None:
    calls = [line for _, line in logs.having("call") if line["call"] == "short" and line["now"]]
    run.count("calls", len(calls))
    admitted = [_admitted(line) for line in calls]
    borrowed = [_admitted(line) for line in calls if line["reason"] == "borrowed"]
    of_all_windows = [line.get("reason") for _, line in logs.having("call")]
    run.count("calls that borrowed", of_all_windows.count("borrowed"))
    run.count("refunds", sum(line["left"] < line["cost"] for line in calls))
    check_aligned_windows(admitted, limit.amount, limit.bucket_ms, limit.span)
    check_aligned_windows(borrowed, int(limit.amount * share), limit.bucket_ms, limit.span)
    if limit.bound == "strict":
        check_any_window(admitted, limit.amount, limit.interval_ms)


def _admitted(line: dict[str, Any]) -> Admitted:
    """Return the call at the moment at which it may proceed."""
    return Admitted(line["key"], line["now"] + round(line["wait"] * 1000), line["left"])


def _stored(server: Standalone, key: str) -> int:
    """Return all permits of a ring, those of coming buckets included."""
    name = ring_name(ring_name_prefix("borrowing-long", key), LONG)
    with server.client(decode_responses=False) as client:
        state = ring_state(client.hgetall(name), LONG.bucket_ms, LONG.span)
    if state is None:
        return 0
    return sum(bucket.passed for bucket in state.buckets) + sum(b.borrowed for b in state.coming)
