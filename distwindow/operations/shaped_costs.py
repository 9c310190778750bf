"""The check of the cost of a call under limits that warm up."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.charge import Charge
from ..core.shaping import shaping_of


def check_shaped_costs(charges: Iterable[Charge]) -> None:
    """Raise `ValueError` for a cost that a cold limit never admits: the limit would stay cold if
    all calls cost as much. A paced limit admits each cost, after a longer wait.
    """
    for charge in charges:
        limit, cost = charge.limit, charge.cost
        if limit.warmup_ms is not None and limit.max_wait_ms is None:
            most = math.floor(shaping_of(limit, None).coldest_rate())
            if cost > most:
                raise ValueError(
                    f"cost={cost} can never be admitted while {limit} is cold: the most is then "
                    f"{most}"
                )
