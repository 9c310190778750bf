"""Scenario `tasks`: real Celery workers whose limited tasks wait, on a Redis broker.

`cuts`: the broker cannot be reached, again and again, while its visibility timeout is an hour: what
waited is given back at once, and runs once.
`frozen`: a worker stands still for longer than the visibility timeout: what waited in it runs in
another one, and not a second time when it goes on.

What a pool had been handed at that moment is Celery's own: it may be stranded, or run twice, with
and without limits.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from typing import Any

from tests.attack.harness import Run, check_between, derive_seed
from tests.celery.processes import Fleet, most_in_a_window, visible_again_after
from tests.servers import Proxy, Standalone
from tests.servers.faults import Pass, Refuse
from tests.servers.wait import until

VARIANTS = ["cuts", "frozen"]
POOLS = ["prefork", "threads", "gevent"]
PER_SECOND = 20
LIMITED = {"limits": f"{PER_SECOND}/second"}
WORKERS = 2
REDELIVERED_S = 140.0
"""How long to wait for what is delivered again: kombu before 5.7 looks for it each 100 s only."""


def tasks(run: Run) -> None:
    """Run one fleet of the variant `run.only`, or of one drawn by the seed; it takes 15 to 60 s."""
    rng = random.Random(derive_seed(run.seed, "tasks"))
    variant = run.only or rng.choice(VARIANTS)
    {"cuts": _cuts, "frozen": _frozen}[variant](run, rng)
    run.count("fleets")


def _cuts(run: Run, rng: random.Random) -> None:
    count, slots, cuts, pool = 200, rng.choice([2, 4]), rng.randint(1, 3), rng.choice(POOLS)
    # Celery itself strands what it has handed to its pool: one for each slot and cut.
    of_celery = WORKERS * slots * cuts
    with Standalone() as broker, Proxy(broker.port) as proxy:
        conf = {"task_ignore_result": True}
        with Fleet(options=LIMITED, broker=proxy.url, publisher=broker.url, conf=conf) as fleet:
            for _ in range(WORKERS):
                fleet.start(pool=pool, slots=slots, wait=False)
            fleet.wait_ready()
            for number in range(count):
                fleet.send("fetch", number, countdown=rng.choice([None, None, 3, 8]))

            def losses() -> list[int]:
                return [fleet.log(number).count("Cannot connect") for number in range(WORKERS)]

            for times in range(cuts):
                wanted = rng.randint(10, 30) + 40 * times
                until(lambda: len(fleet.started()) >= wanted, what="starts", timeout=30)  # noqa: B023
                before = losses()
                proxy.fault = Refuse()
                until(lambda: all(map(int.__lt__, before, losses())), what="losses", timeout=90)  # noqa: B023
                proxy.fault = Pass()
                run.count("cuts")
            client: Any = broker.client(db=0)
            until(
                lambda: not client.llen("celery") and client.hlen("unacked") <= of_celery,
                what="all that waited",
                timeout=60,
            )
            # kombu loses what it takes out of the queue while the connection ends: one a worker.
            _check(run, fleet, count, lost=of_celery + WORKERS * cuts, doubled=of_celery)
            ended = sum("Unrecoverable" in fleet.log(number) for number in range(WORKERS))
            check_between("workers that ended", ended, 0, 0, [])


def _frozen(run: Run, rng: random.Random) -> None:
    count, pool = 160, rng.choice(POOLS[:2])
    conf = {"broker_transport_options": visible_again_after(4)}
    with Fleet(options=LIMITED, conf=conf) as fleet:
        frozen = fleet.start(pool=pool, wait=False)
        fleet.start(pool=pool, wait=False)
        fleet.wait_ready()
        for number in range(count):
            fleet.send("fetch", number)
        wanted = rng.randint(5, 60)
        until(lambda: len(fleet.started()) >= wanted, what="starts", timeout=20)
        os.kill(frozen.pid, signal.SIGSTOP)
        run.count("freezes")
        try:
            # All but what it had begun, or handed to its two processes.
            until(lambda: len(set(fleet.started())) >= count - 4, what="all", timeout=REDELIVERED_S)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        until(lambda: len(set(fleet.started())) == count, what="all", timeout=REDELIVERED_S)
        until(lambda: fleet.messages_in_broker() == 0, what="an empty broker", timeout=30)
        lines = sum(worker["line count"] for worker in fleet.inspect().values())
        check_between("lines that are left", lines, 0, 0, [])
        _check(run, fleet, count, lost=0, doubled=4)


def _check(run: Run, fleet: Fleet, count: int, *, lost: int, doubled: int) -> None:
    """Raise `Violation` if more tasks were lost or ran twice, or if the limit did not hold."""
    started = Counter(fleet.started())
    twice = sorted(number for number, times in started.items() if times > 1)
    run.count("calls", sum(started.values()))
    run.maximum("ran twice", len(twice))
    check_between("tasks that started", len(started), count - lost, count, sorted(started))
    check_between("tasks that ran twice", len(twice), 0, doubled, twice)
    most = most_in_a_window([int(at_ms) for at_ms in fleet.recorded("admitted")])
    check_between("admitted in a second", most, 1, PER_SECOND, fleet.recorded("admitted"))
