"""The nodes of all resources (Sentinel `NodeSelectorSlot` and `ClusterBuilderSlot`)."""

from __future__ import annotations

from .call import Call, CallNodes
from .statistic_node import NodeConfig, StatisticNode


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
