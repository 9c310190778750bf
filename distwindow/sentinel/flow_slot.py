"""The slot that limits flow (Sentinel `FlowSlot`, `FlowRuleChecker`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from .call import Call, CallNodes
from .rules import LIMIT_APP_DEFAULT, LIMIT_APP_OTHER, FlowRule, controller_of
from .statistic_node import StatisticNode
from .traffic_shaping import TrafficShapingController


class FlowCheck(NamedTuple):
    """How the check of a call ended, at `now` (ms): the rule that refused it, or None.

    `borrowed` is true if its pass was borrowed. That ends the whole chain, as Sentinel's
    `PriorityWaitException` does: no further rule or slot is asked.
    """

    refused_by: FlowRule | None
    borrowed: bool
    now: int


class FlowSlot:
    """The flow rules of all resources, each with its controller.

    Of several rules of a resource those with the `limit_app` `"default"` are asked last, the others
    in the given order. The first that refuses ends the check.
    """

    __slots__ = ("_cluster_nodes", "_named_origins", "_rules")

    def __init__(
        self, rules: Iterable[FlowRule], cluster_nodes: Mapping[str, StatisticNode]
    ) -> None:
        self._cluster_nodes = cluster_nodes
        self._rules: dict[str, list[tuple[FlowRule, TrafficShapingController]]] = {}
        for rule in sorted(rules, key=lambda rule: rule.limit_app == LIMIT_APP_DEFAULT):
            self._rules.setdefault(rule.resource, []).append((rule, controller_of(rule)))
        # Rules for `"other"` are about the origins that are not among these.
        self._named_origins = {
            resource: frozenset(rule.limit_app for rule, _ in of)
            for resource, of in self._rules.items()
        }

    def check(self, call: Call, nodes: CallNodes, now: int) -> Generator[int, int, FlowCheck]:
        """Yield each wait of `call` in ms, and be sent the time (ms) after it."""
        for rule, controller in self._rules.get(call.resource, ()):
            node = self._node_of(rule, call, nodes)
            if node is None:
                continue
            result = controller.can_pass(now, node, call.count, call.prioritized)
            if not result:
                return FlowCheck(rule, False, now)
            if result.wait_ms:
                now = yield result.wait_ms
            if result.borrowed:
                return FlowCheck(None, True, now)
        return FlowCheck(None, False, now)

    def _node_of(self, rule: FlowRule, call: Call, nodes: CallNodes) -> StatisticNode | None:
        """Return the node by which `rule` decides about `call`; None if it is not about it."""
        app = rule.limit_app
        if app == LIMIT_APP_DEFAULT:
            own: StatisticNode | None = nodes.cluster
        elif app == LIMIT_APP_OTHER:
            own = None if call.origin in self._named_origins[call.resource] else nodes.origin
        elif app == call.origin:
            own = nodes.origin
        else:
            return None
        if own is None or rule.strategy == "direct":
            return own
        if rule.strategy == "relate":
            return self._cluster_nodes.get(rule.ref_resource or "")
        return nodes.default if rule.ref_resource == call.context else None
