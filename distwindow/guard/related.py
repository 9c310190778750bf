"""Flow rules that count calls of another resource (Sentinel `RuleConstant.STRATEGY_RELATE`).

    FlowRule("read", 100, strategy="relate", ref_resource="write")

    "read" is refused while "write" has passed 100 times in its last second: a call of "read" looks
    into the window of "write", and counts nothing there

Therefore each call of "write" has to be in a window of the store: in that of a flow rule of its
own, if there is one that counts all its calls in the same interval; else in one made for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.errors import RateLimitExceeded
from ..core.limit import MAX_AMOUNT, Limit
from ..protocol.keys import ring_name, ring_name_prefix
from ..rules import FlowRule, Rule
from ..rules.fleet import limit_of
from ..sentinel.rules import LIMIT_APP_DEFAULT
from .chain import GuardCall, Steps
from .slots import FlowRuleSlot, key_of


class RelateSlot(FlowRuleSlot):
    """Refuses a call while another resource has used the rule's permits. Takes nothing.

    The limiter decides by the store alone: what was counted elsewhere is not known here.
    """

    def __init__(self, rule: FlowRule, named_origins: frozenset[str], limiter: Any) -> None:
        super().__init__(rule, named_origins)
        self._limiter = limiter
        self._related_key = key_of(rule.ref_resource or "")

    def enter(self, call: GuardCall) -> Steps:
        """See `ChainSlot.enter`."""
        if self.key_for(call) is None:
            return
        decision = yield self._limiter._peek(self._related_key, call.cost)
        if not decision.allowed:
            raise RateLimitExceeded(decision)


def rules_that_count(rules: Iterable[Rule], prefix: str) -> list[tuple[FlowRule, Limit]]:
    """Return a rule that refuses nothing, and its limit, for each resource and interval that a rule
    relates to and that no other flow rule counts.
    """
    flow_rules = [rule for rule in rules if isinstance(rule, FlowRule) and rule.grade == "qps"]
    counted = {
        _ring_of(rule.resource, limit_of(rule), prefix)
        for rule in flow_rules
        if rule.strategy == "direct" and rule.limit_app == LIMIT_APP_DEFAULT
    }
    found = []
    for rule in flow_rules:
        if rule.strategy == "relate":
            resource, limit = rule.ref_resource or "", limit_of(rule)
            ring = _ring_of(resource, limit, prefix)
            if ring not in counted:
                counted.add(ring)
                unlimited = FlowRule(resource, MAX_AMOUNT)
                found.append((unlimited, Limit(MAX_AMOUNT, per=limit.per, buckets=limit.buckets)))
    return found


def _ring_of(resource: str, limit: Limit, prefix: str) -> bytes:
    return ring_name(ring_name_prefix(prefix, key_of(resource)), limit)
