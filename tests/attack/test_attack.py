"""Each scenario for seconds, with fixed seeds. `scripts/attack` runs them for minutes."""

from __future__ import annotations

import pytest

from tests.attack.borrowing import MODES as BORROWING
from tests.attack.borrowing import borrowing
from tests.attack.breakers import VARIANTS as BREAKERS
from tests.attack.breakers import breakers
from tests.attack.cold_start import cold_start
from tests.attack.entries import MODES as ENTRIES
from tests.attack.entries import entries
from tests.attack.fleet import MODES, fleet
from tests.attack.guards import VARIANTS as GUARDS
from tests.attack.guards import guards
from tests.attack.harness import Run
from tests.attack.interruptions import VARIANTS as INTERRUPTIONS
from tests.attack.interruptions import interruptions
from tests.attack.model import model
from tests.attack.process_exits import VARIANTS as EXITS
from tests.attack.process_exits import process_exits
from tests.attack.refused_rights import refused_rights
from tests.attack.slots import VARIANTS as SLOTS
from tests.attack.slots import slots
from tests.attack.tasks import tasks
from tests.attack.timeouts import timeouts

pytestmark = [pytest.mark.slow, pytest.mark.fleet]


def test_scripts_answer_as_the_model_does() -> None:
    run = Run(1, 3)
    model(run)
    assert run.figures["calls"] > 1000


# A hang is recognised by the wall clock, so a machine that stands still fails this test without a
# fault of the library: it is tried again. `scripts/attack` tries nothing again.
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("variant", INTERRUPTIONS)
def test_interruptions_arrive_unchanged(variant: str) -> None:
    """And no call hangs, and the server has counted what was called."""
    run = Run(3, 2, variant)
    interruptions(run)
    assert run.figures["interruptions"] > (2 if variant.startswith("connecting") else 50)


@pytest.mark.parametrize("mode", MODES)
def test_a_fleet_over_a_faulty_link(mode: str) -> None:
    run = Run(4, 5, mode)
    fleet(run)
    assert run.figures["calls"] > 500


# `direct` keeps no permits and sends the fewest counts; `scripts/attack` has it as well.
@pytest.mark.parametrize("variant", [one for one in EXITS if not one.startswith("direct")])
def test_all_ways_in_which_a_process_ends(variant: str) -> None:
    run = Run(7, 0, variant)
    process_exits(run)
    assert run.figures["calls"] > 0


def test_tiny_timeouts_strand_no_more_than_a_lease() -> None:
    run = Run(5, 0, "4000")
    timeouts(run)
    assert run.figures["cancelled"] > 10


def test_a_cold_start_counts_everything() -> None:
    run = Run(6, 0)
    cold_start(run)
    assert run.figures["calls"] > 0


@pytest.mark.parametrize("variant", SLOTS)
def test_slots_are_held_by_no_more_than_the_limit(variant: str) -> None:
    run = Run(8, 5, variant)
    slots(run)
    assert run.figures["calls"] > 30


@pytest.mark.parametrize("variant", BREAKERS)
def test_breakers_open_for_the_fleet(variant: str) -> None:
    run = Run(9, 7, variant)
    breakers(run)
    assert run.figures["calls"] > 100


@pytest.mark.parametrize("mode", BORROWING)
def test_borrowed_permits_are_within_the_limit(mode: str) -> None:
    run = Run(10, 5, mode)
    borrowing(run)
    assert run.figures["calls that borrowed"] > 20


@pytest.mark.parametrize("mode", ENTRIES)
def test_each_end_of_an_entry_is_counted_once(mode: str) -> None:
    run = Run(11, 4, mode)
    entries(run)
    assert run.figures["ends checked"] > 100


@pytest.mark.parametrize("mode", GUARDS)
def test_a_guard_gives_back_what_it_took(mode: str) -> None:
    run = Run(12, 6, mode)
    guards(run)
    assert run.figures["calls"] > 100


@pytest.mark.parametrize(
    ("variant", "seed"),
    # The seed draws what is refused: a right (8), the password (1; 3 from the start), a type (4).
    [
        ("direct", 8),
        ("leased", 1),
        ("eventual", 3),
        ("breaker", 4),
    ],
)
def test_a_server_that_refuses_loses_no_count_and_no_limit(variant: str, seed: int) -> None:
    run = Run(seed, 0, variant)
    refused_rights(run)
    assert run.figures["calls"] > 100


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("variant", "seed"), [("cuts", 1), ("frozen", 1)])
def test_what_waits_in_workers_outlasts_the_broker_and_runs_once(variant: str, seed: int) -> None:
    run = Run(seed, 0, variant)
    tasks(run)
    assert run.figures["calls"] > 100
