"""Scenario `guards`: guarded entries that a later slot refuses, that fail, and that are interrupted
or cancelled anywhere on their way through the chain, over a faulty link.

What a call took is given back or counted: its permits and its end once; never more calls run at
once than the rule says, and no place stays taken; when the service works, all are let through.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from distwindow import Concurrency
from distwindow.guard.rules import limit_of
from tests.attack.client import now_ms
from tests.attack.client_logs import ClientLogs, check_tallies, read_client_logs
from tests.attack.faulty_fleet import ALL_FAULTS, FaultyFleet
from tests.attack.guards_child import rules_of
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.server_counts import read_counts
from tests.attack.slot_checks import Held, check_at_most
from tests.servers import Standalone

VARIANTS = ["direct", "leased"]
RUN_S = 8.0
SOUND_S = 2.0
"""The service works for so long at the end."""


def guards(run: Run) -> None:
    """Run fleets of some seconds each. The seed draws the consistency and the faults."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 5:
            return
        rng = random.Random(derive_seed(run.seed, "guards", turn))
        mode = run.only or rng.choice(["direct", "direct", "leased"])
        with Standalone() as server:
            _play(run, rng, server, mode, min(RUN_S, max(2.0, left - 3)))
        run.count("fleets")


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    began = now_ms() + 1500
    plan = {
        "prefix": "guards", "mode": mode, "at_once": rng.randint(1, 4), "timeout": 0.3,
        "broken": [[began, began + 1000 * (seconds - SOUND_S) / 2]],
    }  # fmt: skip
    # A frozen process does not renew its places, and those of a forked child whose link was broken
    # at its end are taken for half a minute; `slots` has both.
    faults = {name: n for name, n in ALL_FAULTS.items() if name not in ("freeze", "fork")}
    with FaultyFleet(rng, server, "guards_child", plan, faults) as fleet:
        fleet.run_for(seconds, ["sync", "async", "sync"][: rng.randint(2, 3)])
        try:
            logs = read_client_logs(fleet.folder, run)
            _check(run, server, logs, plan)
        except Violation as violation:
            raise Violation(
                f"guards {mode}: {violation.what}", [*fleet.notes[-20:], *violation.history[-20:]]
            ) from None


def _check(run: Run, server: Standalone, logs: ClientLogs, plan: dict[str, Any]) -> None:
    flow = rules_of(plan["at_once"])[0]
    stored: dict[str, int] = {}
    with server.client(decode_responses=False) as client:
        counts = read_counts(client, plan["prefix"], flow.resource, limit_of(flow))
    stored |= {"success": counts.success, "error": counts.error}
    for _, line in logs.having("outcome"):
        run.count("calls")
        run.count(f"calls, {line['outcome']}")
    if plan["mode"] == "direct":
        stored["permits"] = counts.passed
    else:  # a lost lease is counted as well
        stored["permits"] = logs.tallies()[0]["permits"]
    under_way = len(logs.dead) * 4 * 2
    # Ends are flushed, and permits are charged at once; a refund comes after its charge.
    check_tallies("guards", stored, logs, sent_later=True, under_way=under_way)
    spans = [
        Held(line["key"], line["began"], line["ended"], process, False)
        for process, line in logs.having("inside")
    ]
    run.maximum("inside at once", check_at_most(spans, plan["at_once"]))
    with Concurrency(server.url, 1, prefix=plan["prefix"], timeout=5) as reader:
        holders = [holder.name for holder in reader.stats(flow.resource).holders]
    if not logs.dead.issuperset(holders):
        raise Violation(f"{holders} hold {flow.resource!r}; dead are {logs.dead}")
