"""A call under way, and the nodes that it counts in (Sentinel `Context`, `ClusterNode`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .nodes import NodeConfig, StatisticNode

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
    """One call: `count` permits of `resource`, and who asks, where."""

    resource: str
    context: str
    origin: str
    entry_type: EntryType
    count: int
    prioritized: bool


class NodeRegistry:
    """Makes each node at the first call that needs it, with the same settings. Not locked."""

    __slots__ = ("_config", "cluster", "default", "entry", "origin")

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self.entry = self._new()
        """Of all calls of type `"IN"`."""
        self.cluster: dict[str, StatisticNode] = {}
        """By resource."""
        self.default: dict[tuple[str, str], StatisticNode] = {}
        """By context and resource."""
        self.origin: dict[tuple[str, str], StatisticNode] = {}
        """By resource and origin."""

    def nodes_of(self, call: Call) -> CallNodes:
        """Return the nodes that count `call`; an empty origin has none."""
        default = self._node(self.default, (call.context, call.resource))
        cluster = self.cluster.get(call.resource)
        if cluster is None:
            cluster = self.cluster[call.resource] = self._new()
        origin = self._node(self.origin, (call.resource, call.origin)) if call.origin else None
        entry = self.entry if call.entry_type == "IN" else None
        return CallNodes(default, cluster, origin, entry)

    def _node(
        self, nodes: dict[tuple[str, str], StatisticNode], key: tuple[str, str]
    ) -> StatisticNode:
        node = nodes.get(key)
        if node is None:
            node = nodes[key] = self._new()
        return node

    def _new(self) -> StatisticNode:
        config = self._config
        return StatisticNode(
            config.sample_count,
            config.interval_ms,
            occupy_timeout_ms=config.occupy_timeout_ms,
            statistic_max_rt=config.statistic_max_rt,
        )
