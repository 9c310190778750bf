"""Scenario `refused_rights`: a server that answers, and refuses, while a fleet runs.

A right is taken from the user, its password is changed, or a key gets another type; a moment later
all is as before. With every consistency, and with circuit breakers.

No process alone admits more than the limit, with `direct` and `leased` all together do not, each
count arrives afterwards, once, and each process logs one line when it begins.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from distwindow import Limit
from distwindow.breaker.commands import breaker_name
from distwindow.ring.key import ring_name, ring_name_prefix
from tests.attack.children import Child
from tests.attack.cold_child import COUNTED
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.history import check_conserved, read_breaker, read_named
from tests.servers import Standalone, until

VARIANTS = ["direct", "leased", "eventual", "breaker"]
CAUSES = ["right", "password", "type"]
LIMIT = Limit("300/hour")
KEYS, PROCESSES = 4, 2
REFUSED_S = 1.5
"""Several flushes: faults of one refused flush show, and those of the one after it."""
_USER = "app on >{password} ~* &* +@all"


def refused_rights(run: Run) -> None:
    """Run fleets of some seconds each: of the variant `run.only`, or of one drawn by the seed."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        if turn and time.monotonic() >= stop:
            return
        rng = random.Random(derive_seed(run.seed, "refused_rights", turn))
        variant, cause = run.only or rng.choice(VARIANTS), rng.choice(CAUSES)
        with Standalone(users=[_USER.format(password="right")]) as server:
            _play(run, rng, server, variant, cause)
        run.count("fleets")
        run.count(f"refusals, {cause}")


def _play(run: Run, rng: random.Random, server: Standalone, variant: str, cause: str) -> None:
    plan: dict[str, Any] = {
        "url": f"redis://app:right@{server.host}:{server.port}/0", "prefix": "refused",
        "limit": str(LIMIT), "keys": KEYS, "threads": 2, "mode": variant, "pause": 0.002,
        "seconds": REFUSED_S + 1.5,
    }  # fmt: skip
    what = f"{variant}, {cause}"
    with ExitStack() as stack, server.client(decode_responses=False) as client:
        refuse = partial(_refuse, client, cause, _names(variant))
        restore = refuse() if (is_cold := rng.random() < 0.3) else None
        fleet = [
            stack.enter_context(Child("cold_child", {**plan, "seed": derive_seed(run.seed, n)}))
            for n in range(PROCESSES)
        ]
        until(lambda: all(child.reports() for child in fleet), 60, what="all processes call")
        if restore is None:
            time.sleep(rng.uniform(0.3, 0.8))
            restore = refuse()
        time.sleep(REFUSED_S)
        restore()
        run.count("fleets that started while refused", is_cold)
        reports = [child.facts(60) for child in fleet]
        for facts in reports:
            run.count("calls", facts["calls"])
            run.count("calls that were refused by the server", facts["failed"])
            check_lines(what, facts["lines"])
        if variant == "breaker":
            names = _names(variant)
            stored = {key: read_breaker(client, name)[0] for key, name in names.items()}
            check_conserved(what, stored, _sum(reports, "allowed"))
            return
        check_limit(what, reports, shared=variant != "eventual")
        unknown = _sum(reports, "unknown")
        # The refund of a lease may be refused; its permits then count as used, within the limit.
        stranded = LIMIT.amount * KEYS if variant == "leased" else 0
        for name, count in (("allowed", "passed"), ("refused", "blocked")):
            stored = read_named(client, plan["prefix"], _names(variant), LIMIT, count)
            returned = _sum(reports, name)
            check_conserved(f"{what}, {name}", stored, returned, unknown, more=stranded)


def check_limit(what: str, reports: list[dict[str, Any]], *, shared: bool) -> None:
    """Raise `Violation` if one process, or with `shared` all together, admitted too many."""
    of_processes = [facts["allowed"] for facts in reports]
    for admitted in [*of_processes, _sum(reports, "allowed")] if shared else of_processes:
        for key, permits in admitted.items():
            if permits > LIMIT.amount:
                raise Violation(f"{what}: {permits} of {LIMIT} were admitted on {key}", [admitted])


def check_lines(what: str, lines: list[str]) -> None:
    """Raise `Violation` if one process has logged that flushes fail more than once, or that they
    work again more often than that they fail.
    """
    failed = sum(" failed" in line for line in lines)
    again = sum(" again" in line and " failed" not in line for line in lines)
    if failed > 1 or again > failed:
        raise Violation(f"{what}: {failed} lines of a failure, {again} of its end", lines)


def _names(variant: str) -> dict[str, bytes]:
    """Return the names in the store, by key."""
    keys = [f"k{number}" for number in range(KEYS)]
    if variant == "breaker":
        return {key: breaker_name("refused", key, COUNTED) for key in keys}
    return {key: ring_name(ring_name_prefix("refused", key), LIMIT) for key in keys}


def _refuse(client: Any, cause: str, names: dict[str, bytes]) -> Callable[[], object]:
    """Have the server refuse from now on. Return the function that ends it."""
    if cause == "right":
        client.execute_command("ACL", "SETUSER", "app", "-evalsha", "-eval")
        return lambda: client.execute_command("ACL", "SETUSER", "app", "+evalsha", "+eval")
    if cause == "password":
        client.execute_command("ACL", "SETUSER", "app", "resetpass", ">wrong")
        client.execute_command("CLIENT", "KILL", "USER", "app")
        return lambda: client.execute_command("ACL", "SETUSER", "app", "resetpass", ">right")
    name = next(iter(names.values()))
    existed = client.exists(name)
    with client.pipeline() as steps:
        if existed:
            steps.rename(name, name + b"-aside")
        steps.set(name, "another type")
        steps.execute()

    def restore() -> None:
        with client.pipeline() as steps:
            if existed:
                steps.rename(name + b"-aside", name)
            else:
                steps.delete(name)
            steps.execute()

    return restore


def _sum(reports: list[dict[str, Any]], name: str) -> Counter[str]:
    return sum((Counter(facts[name]) for facts in reports), Counter())
