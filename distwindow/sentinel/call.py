"""One call of a resource, as the slots of a chain see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .statistic_node import StatisticNode

EntryType = Literal["IN", "OUT"]


class CallNodes(NamedTuple):
    """The nodes that count a call, None where it has no such node.

    `default` is that of its context and resource, `cluster` that of the resource, `origin` that of
    the resource and the caller, `entry` that of all calls of type `"IN"`.
    """

    default: StatisticNode
    cluster: StatisticNode
    origin: StatisticNode | None
    entry: StatisticNode | None

    def present(self) -> list[StatisticNode]:
        """Return the nodes that are there."""
        return [node for node in self if node is not None]


@dataclass(frozen=True, slots=True)
class Call:
    """What a caller asks for: `count` permits of `resource`, and who asks, where."""

    resource: str
    context: str
    origin: str
    entry_type: EntryType
    count: int
    prioritized: bool
