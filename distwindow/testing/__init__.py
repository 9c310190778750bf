"""For the tests of applications and of other stores: a clock that a test moves, and the checks that
every store has to pass. Needs nothing but distwindow itself; pytest is not imported.
"""

from __future__ import annotations

from .conformance import StoreTests, store_conformance
from .histories import HistoryStep, commands_of, random_history
from .manual_clock import ManualClock

__all__ = [
    "HistoryStep",
    "ManualClock",
    "StoreTests",
    "commands_of",
    "random_history",
    "store_conformance",
]
