"""Rules that one guard can have together: each can work, and no two count in the same place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.errors import ConfigurationError, short_repr
from ..protocol.breaker_commands import breaker_name
from ..sentinel.rules import DegradeRule, FlowRule, Rule
from .authority import AuthorityRule
from .fleet import breaker_rule_of, check_authority, limit_of, name_of, slots_of
from .system import SystemRule


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """Return the rules. Raises `ConfigurationError` for one that cannot work for the fleet, and for
    two that count in the same place.
    """
    if isinstance(rules, (str, bytes, Rule)) or not isinstance(rules, Iterable):
        raise ConfigurationError(
            f"rules={short_repr(rules)} is not a list of rules; for a file, use from_file"
        )
    checked = tuple(rules)
    seen: dict[object, Rule] = {}
    for rule in checked:
        place = place_of(rule)
        if place in seen:
            raise ConfigurationError(_clash(seen[place], rule))
        seen[place] = rule
    return checked


def place_of(rule: Any) -> object:
    """Return what is equal for rules that cannot be together. Raises `ConfigurationError` for a
    rule that cannot work for the fleet.
    """
    if isinstance(rule, FlowRule):
        _ = slots_of(rule) if rule.grade == "thread" else limit_of(rule)
        counted = () if rule.strategy == "direct" else (rule.strategy, rule.ref_resource)
        return ("flow", rule.resource, rule.limit_app, rule.grade, *counted)
    if isinstance(rule, DegradeRule):
        return breaker_name("", rule.resource, breaker_rule_of(rule))
    if isinstance(rule, AuthorityRule):
        check_authority(rule)
        return ("authority", rule.resource)
    if isinstance(rule, SystemRule):
        return "system"
    raise ConfigurationError(
        f"{short_repr(rule)} is no rule of a guard; give FlowRule, DegradeRule, AuthorityRule or "
        "SystemRule"
    )


def _clash(first: Rule, second: Rule) -> str:
    """Return why two rules of one place cannot be together, and what to do."""
    if isinstance(first, FlowRule) and isinstance(second, FlowRule):
        return (
            f"{name_of(first)}: one with count={first.count!r} and one with count={second.count!r} "
            f"(limit_app {short_repr(first.limit_app)}, grade {first.grade!r}) would count the "
            "same calls in the same place; leave one out"
        )
    if isinstance(first, DegradeRule) and isinstance(second, DegradeRule):
        return (
            f"{name_of(first)}: there are two with the same terms (grade {first.grade!r}, "
            f"count={first.count!r}), which would count each call twice; leave one out"
        )
    if isinstance(first, AuthorityRule):
        return f"{name_of(first)}: there are two; list all its origins in the limit_app of one"
    return "SystemRule: there are two; give all thresholds in one"
