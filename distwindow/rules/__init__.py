"""The rules of a `Guard`, with Sentinel's names, and what each becomes for the fleet."""

from ..sentinel.rules import DegradeRule, FlowRule, Rule
from .authority import AuthorityRule
from .system import SystemRule

__all__ = ["AuthorityRule", "DegradeRule", "FlowRule", "Rule", "SystemRule"]
