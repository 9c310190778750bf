"""The slots of a guard's rules, which ask the fleet: one object for each rule.

    AuthoritySlot      AuthorityRule                     takes nothing
    RateSlot           FlowRule, grade "qps"             permits of a Limiter; refunded
    RelateSlot         FlowRule, strategy "relate"       takes nothing
    ConcurrencySlot    FlowRule, grade "thread"          a slot of a Concurrency
    BreakerSlot        DegradeRule                       a call of a CircuitBreaker, maybe its probe

A `RateSlot` is the statistics slot, too: how the call ended is recorded in the ring in which it
was counted. Its limiter may be of either world, and so of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from ..errors import AuthorityDenied, RateLimitExceeded
from ..ring.key import ring_name, ring_name_prefix
from ..ring.limit import MAX_AMOUNT, Limit
from ..sentinel.rules import LIMIT_APP_DEFAULT, LIMIT_APP_OTHER, DegradeRule, FlowRule, Rule
from .chain import ChainSlot, GuardCall, Outcome, Steps, count_refused
from .rules import AuthorityRule, limit_of


def key_of(resource: str, origin: str = "") -> str:
    """Return the key of `resource`, or of what `origin` calls of it: `GET:/orders@app-a`.

    A % or @ in the names is written as in a URL, so that two pairs never have one key.
    """
    key = resource.replace("%", "%25").replace("@", "%40")
    return f"{key}@{quote(origin, safe='')}" if origin else key


def key_of_context(resource: str, context: str) -> str:
    """Return the key of what is called of `resource` in `context`: `GET:/orders@context:web`. No
    origin has such a key, as the : in its name is escaped.
    """
    return f"{key_of(resource)}@context:{quote(context, safe='')}"


class AuthoritySlot(ChainSlot):
    """Refuses the origins that an `AuthorityRule` does not let call."""

    order = 100

    def __init__(self, rule: AuthorityRule) -> None:
        self.rule: AuthorityRule = rule

    def enter(self, call: GuardCall) -> None:
        if not self.rule.allows(call.origin):
            raise AuthorityDenied(call.resource, call.origin)


class FlowRuleSlot(ChainSlot):
    """Base class of the slots of flow rules: which calls a rule is about."""

    order = 300

    def __init__(self, rule: FlowRule, named_origins: frozenset[str], limit: Any) -> None:
        self.rule: FlowRule = rule
        self._limit = limit
        """The limiter, or the concurrency limit, that is asked."""
        self._named_origins = named_origins
        """The origins that have rules of their own, for `"other"`."""
        origin = "" if rule.limit_app == LIMIT_APP_DEFAULT else rule.limit_app
        self._key = key_of(rule.resource, origin)
        """The key of all calls that the rule is about. Of `"other"` each origin has a key."""
        if rule.strategy == "chain":
            self._key = key_of_context(rule.resource, rule.ref_resource or "")

    def key_for(self, call: GuardCall) -> str | None:
        """Return the key that counts `call`; None if the rule is not about it (Sentinel
        `FlowRuleChecker.selectNodeByRequesterAndStrategy`).
        """
        app = self.rule.limit_app
        if self.rule.strategy == "chain":
            return self._key if call.context == self.rule.ref_resource else None
        if app == LIMIT_APP_DEFAULT:
            return self._key
        if not call.origin:
            return None
        if app == LIMIT_APP_OTHER:
            is_named = call.origin in self._named_origins
            return None if is_named else key_of(call.resource, call.origin)
        return self._key if app == call.origin else None


class RateSlot(FlowRuleSlot):
    """Takes the permits of a call, and records how it ended."""

    def enter(self, call: GuardCall) -> Any:
        key = self.key_for(call)
        return None if key is None else self._limit.try_acquire(key, call.cost)

    def _settle(self, call: GuardCall, decision: Any) -> Any:
        if decision is not None:
            if not decision.allowed:
                raise RateLimitExceeded(decision)
            call.wait = decision.wait
        return decision

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> Any:
        if token is None:
            return None
        if not outcome.admitted:
            return self._limit.refund(token)
        if outcome.failed is None:
            return None
        return self._limit.decider.record(token, outcome.failed, round(outcome.rt * 1000))


class ConcurrencySlot(FlowRuleSlot):
    """Holds one of the places that the fleet has for running calls, whatever the call's cost.

    It comes after the other flow rules, so that no place is held while these have a call wait.
    """

    order = 310

    def enter(self, call: GuardCall) -> Steps:
        key = self.key_for(call)
        if key is None:
            return None
        slot = yield self._limit.try_hold(key)
        if slot.refusal is not None:
            raise slot.refusal
        return slot

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> Steps:
        if token is not None:
            yield token.release()


class BreakerSlot(ChainSlot):
    """Asks a circuit breaker, tells it how the call ended, and gives back probes not admitted."""

    order = 400

    def __init__(self, rule: DegradeRule, breaker: Any) -> None:
        self.rule: DegradeRule = rule
        self._breaker = breaker
        self._key = key_of(rule.resource)

    def enter(self, call: GuardCall) -> Steps:
        return (yield self._breaker.admit(self._key))

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> Steps:
        yield self._breaker.finish(token, outcome.failed)


class RelateSlot(FlowRuleSlot):
    """Refuses a call while another resource has used the rule's permits (Sentinel
    `RuleConstant.STRATEGY_RELATE`). Takes nothing.

        FlowRule("read", 100, strategy="relate", ref_resource="write")

    "read" is refused while "write" has passed 100 times in its last second: a call of "read" looks
    into the window of "write", and counts nothing there. So each call of "write" has to be in a
    window of the store: in that of a flow rule of its own, if there is one that counts all its
    calls in the same interval; else in one made for it (`rules_that_count`). The limiter decides by
    the store alone: what was counted elsewhere is not known here.
    """

    def __init__(self, rule: FlowRule, named_origins: frozenset[str], limit: Any) -> None:
        super().__init__(rule, named_origins, limit)
        self._related_key = key_of(rule.ref_resource or "")

    def enter(self, call: GuardCall) -> Steps:
        if self.key_for(call) is None:
            return
        decision = yield self._limit.decider.peek(self._related_key, call.cost)
        if not decision.allowed:
            raise RateLimitExceeded(decision)
        if decision.reason == "shadow" and self.tally is not None:
            count_refused(self.tally, call, RateLimitExceeded(decision), shadow=True)


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
