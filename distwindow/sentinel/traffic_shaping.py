"""What a flow controller is asked and answers (Sentinel `TrafficShapingController`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from .statistic_node import StatisticNode


class PassResult(NamedTuple):
    """A controller's answer, true if the call may pass.

    The caller has to wait for `wait_ms` ms before it goes on. `borrowed` is true if the pass was
    borrowed from a window to come (Sentinel's `PriorityWaitException`): the node has counted it
    already, and the caller must not count it again.
    """

    passed: bool
    wait_ms: int = 0
    borrowed: bool = False

    def __bool__(self) -> bool:
        return self.passed


PASS = PassResult(True)
BLOCK = PassResult(False)


class TrafficShapingController(ABC):
    """Decides whether a call may pass, by the statistics of its node.

    It records neither passes nor refusals: its caller does, as Sentinel's `StatisticSlot`.
    Not locked.
    """

    __slots__ = ()

    @abstractmethod
    def can_pass(
        self, now: int, node: StatisticNode, acquire_count: int = 1, prioritized: bool = False
    ) -> PassResult:
        """Decide at `now` (ms) about a call that takes `acquire_count` permits."""
