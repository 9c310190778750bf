"""What a worker works for, and for how long it is waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ..core.clock import SYSTEM
from ..flow.near import Near
from ..local.cell import FAR

LOG = logging.getLogger("distwindow")

PATIENCE = 3.0
"""Seconds that an exit waits for what is left to be carried."""
AGAIN = 0.05
"""Seconds until it is tried again then."""

monotonic = SYSTEM.monotonic


class Agent:
    """One limiter's business: `work(last)` carries what is due, or with `last` everything."""

    __slots__ = ("at_work", "failing", "near", "tried", "work")

    def __init__(self, near: Near, work: Callable[[bool], Any]) -> None:
        self.near = near
        self.work = work
        self.failing = False
        self.at_work: Any = None
        """What is there to wait on until the worker has done with it."""
        self.tried = False
        """An end has been waited for, and not everything was carried in time."""

    def went(self, failure: Exception | None) -> None:
        """Say when the store begins not to take what is told, and when it takes it again."""
        if failure is not None and not self.failing:
            LOG.warning("the store does not take what is counted here: %s", failure)
        elif failure is None and self.failing:
            LOG.warning("the store takes what is counted here again")
        self.failing = failure is not None


def own_up(agents: Iterable[Agent], *, again: bool = False) -> None:
    """Say so, where not everything was carried; once."""
    left = [agent for agent in agents if agent.near.next_at < FAR]
    if any(not agent.tried for agent in left) or (left and again):
        LOG.warning("the store did not take what was still to be told, and it is lost")
    for agent in left:
        agent.tried = True
