"""Each scenario for seconds, with fixed seeds. `scripts/attack` runs them for minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from tests.attack import borrowing, breakers, guards, interruptions, process_exits, slots
from tests.attack.__main__ import scenario
from tests.attack.harness import MODES, Run


class Given(NamedTuple):
    """Runs of one scenario, one for each variant, and a figure that has to exceed `more_than`."""

    scenario: str
    seed: int
    seconds: float
    variants: Sequence[str | None] = (None,)
    figure: str = "calls"
    more_than: int = 0
    marks: tuple[pytest.MarkDecorator, ...] = ()


# A hang is recognised by the wall clock, so a machine that stands still fails this test without a
# fault of the library: it is tried again. `scripts/attack` tries nothing again.
AGAIN = (pytest.mark.flaky(reruns=2),)
LONG = (pytest.mark.timeout(400),)
# `direct` keeps no permits and sends the fewest counts; `scripts/attack` has it as well.
EXITS = [one for one in process_exits.VARIANTS if not one.startswith("direct")]

GIVEN = (
    Given("model", 1, 2, more_than=1000),
    Given("interruptions", 3, 2, interruptions.CALLING, "interruptions", 50, AGAIN),
    Given("interruptions", 3, 2, interruptions.CONNECTING, "interruptions", 2, AGAIN),
    Given("nemesis", 4, 3, MODES, more_than=500),
    Given("process_exits", 7, 0, EXITS),
    Given("timeouts", 5, 0, ["4000"], "cancelled", 10),
    Given("cold_start", 6, 0),
    Given("slots", 8, 3, slots.VARIANTS, more_than=30),
    Given("breakers", 9, 4, breakers.VARIANTS, more_than=100),
    Given("borrowing", 10, 3, borrowing.VARIANTS, "calls that borrowed", 20),
    Given("entries", 11, 3, MODES, "ends checked", 100),
    Given("guards", 12, 4, guards.VARIANTS, more_than=100),
    # The seed draws what is refused: a right (8), the password (1; 3 from the start), a type (4).
    Given("refused_rights", 8, 0, ["direct"], more_than=100),
    Given("refused_rights", 1, 0, ["leased"], more_than=100),
    Given("refused_rights", 3, 0, ["eventual"], more_than=100),
    Given("refused_rights", 4, 0, ["breaker"], more_than=100),
    Given("tasks", 1, 0, ["cuts", "frozen"], more_than=100, marks=LONG),
)


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.parametrize(
    ("given", "variant"),
    [
        pytest.param(given, variant, marks=given.marks, id=f"{given.scenario}, {variant or 'all'}")
        for given in GIVEN
        for variant in given.variants
    ],
)
def test_an_attack_finds_no_violation(given: Given, variant: str | None) -> None:
    run = Run(given.seed, given.seconds, variant)
    for _ in range(5):
        scenario(given.scenario)(run)
        run.seconds *= 2  # processes on a busy machine may take all of them to start
        if run.figures[given.figure] > given.more_than:
            break
    assert run.figures[given.figure] > given.more_than
