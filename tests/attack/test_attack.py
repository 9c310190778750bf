"""Each scenario for seconds, with fixed seeds. `scripts/attack` runs them for minutes."""

from __future__ import annotations

import pytest

from tests.attack.cold_start import cold_start
from tests.attack.fleet import MODES, fleet
from tests.attack.harness import Run
from tests.attack.interruptions import VARIANTS as INTERRUPTIONS
from tests.attack.interruptions import interruptions
from tests.attack.model import model
from tests.attack.process_exits import VARIANTS as EXITS
from tests.attack.process_exits import process_exits
from tests.attack.timeouts import timeouts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 2])
def test_scripts_answer_as_the_model_does(seed: int) -> None:
    run = Run(seed, 3)
    model(run)
    assert run.figures["calls"] > 1000


# A hang is recognised by the wall clock, so a machine that stands still fails this test without a
# fault of the library: it is tried again. `scripts/attack` tries nothing again.
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("variant", INTERRUPTIONS)
def test_interruptions_arrive_unchanged(variant: str) -> None:
    """And no call hangs, and the server has counted what was called."""
    run = Run(3, 2 if variant.startswith("connecting") else 4, variant)
    interruptions(run)
    assert run.figures["interruptions"] > (10 if variant.startswith("connecting") else 200)


@pytest.mark.parametrize("mode", MODES)
def test_a_fleet_over_a_faulty_link(mode: str) -> None:
    run = Run(4, 5, mode)
    fleet(run)
    assert run.figures["calls"] > 500


@pytest.mark.parametrize("variant", EXITS)
def test_all_ways_in_which_a_process_ends(variant: str) -> None:
    run = Run(7, 0, variant)
    process_exits(run)
    assert run.figures["calls"] > 0


def test_tiny_timeouts_strand_no_more_than_a_lease() -> None:
    run = Run(5, 0, "4000")
    timeouts(run)
    assert run.figures["cancelled"] > 10


def test_a_cold_start_counts_everything() -> None:
    run = Run(6, 3)
    cold_start(run)
    assert run.figures["starts"] >= 2
