"""Limited tasks and tasks without limits share the slots of real workers' pools. What is counted is
the order of the starts, and not their times: a busy machine slows both kinds down.
"""

from __future__ import annotations

import pytest

from tests.celery.processes import Fleet
from tests.servers.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(180)]

SLOTS = {"prefork": 2, "threads": 2, "solo": 1, "gevent": 8}
BURST = 20


def start_behind_a_backlog(
    fleet: Fleet, pool: str, *, backlog: int, seconds: float, limited: int
) -> None:
    """Have a worker begin with a backlog of tasks without limits, and then send limited ones."""
    fleet.send_all(backlog, "free", seconds, queue="free")
    fleet.start(pool=pool, slots=SLOTS[pool], queues="free,limited", wait=False)
    until(lambda: fleet.records.llen("free") >= 20, what="a worker at work", timeout=40)
    fleet.send_all(limited, "fetch", 0.01, queue="limited")


def kinds_of_starts(fleet: Fleet) -> list[str]:
    """Return the kinds of all starts in their order, from the first limited one on."""
    starts = [(at_s, "free") for _, at_s in fleet.recorded("free")]
    starts += [(at_s, "limited") for _, at_s, *_ in fleet.recorded("starts")]
    kinds = [kind for _, kind in sorted(starts)]
    return kinds[kinds.index("limited") :]


@pytest.mark.parametrize("pool", SLOTS)
def test_limited_tasks_with_permits_do_not_wait_behind_a_backlog(pool: str) -> None:
    """Whoever waits takes turns, so of the permits of a burst nearly all are used in twice as many
    starts; what the pool was given before the first of them came runs earlier.
    """
    with Fleet(options={"limits": f"{BURST}/minute"}) as fleet:
        start_behind_a_backlog(fleet, pool, backlog=500, seconds=0.01, limited=BURST)
        until(lambda: fleet.records.llen("starts") == BURST, what="limited tasks", timeout=40)
        # Before 5.7 Celery starts 5 a second in two threads once no limited task waits.
        until(lambda: fleet.records.llen("free") >= 100, what="others", timeout=60)
        first = kinds_of_starts(fleet)[: 4 * BURST]
        assert first.count("limited") >= BURST - 5
        assert first[: 3 * BURST].count("free") >= BURST


@pytest.mark.parametrize(
    ("pool", "backlog", "seconds", "least"),
    [
        # Slots for 20 starts in a second: 80 until the last limited task starts.
        ("prefork", 200, 0.1, 40),
        # For 200 in a second. The 32 that were fetched at once are run in a fraction of one.
        ("gevent", 1000, 0.04, 100),
    ],
)
def test_tasks_without_limits_are_not_held_up_by_lines(
    pool: str, backlog: int, seconds: float, least: int
) -> None:
    """20 limited tasks at 4/s need 4 s at least, and the others go on meanwhile. The bounds are far
    below what the slots can do, so that a busy machine keeps them.
    """
    with Fleet(options={"limits": "4/second"}) as fleet:
        start_behind_a_backlog(fleet, pool, backlog=backlog, seconds=seconds, limited=20)
        until(lambda: fleet.records.llen("starts") == 20, what="limited tasks", timeout=60)
        kinds = kinds_of_starts(fleet)
        last = max(n for n, kind in enumerate(kinds) if kind == "limited")
        assert kinds[:last].count("free") >= least
