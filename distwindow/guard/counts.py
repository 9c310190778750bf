"""What an observer is told of the slots of a guard that have nobody else decide: how often they
refuse, in the name of the guard. Its limiters and breakers tell the same observer of all others.

    slot            limit               reason        source
    AuthoritySlot   "allow app-a"       "authority"   "local"
    SystemSlot      "qps 100"           "system"      "local"
    RelateSlot      the related limit   of the decision that was looked at
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import AuthorityDenied, Blocked, RateLimitExceeded, SystemOverloaded
from ..observer import Tally

if TYPE_CHECKING:
    from .chain import GuardCall


def count_refused(tally: Tally, call: GuardCall, refused: Blocked) -> None:
    """Count a call that a slot has refused."""
    limit, reason, source = "", "", "local"
    if isinstance(refused, RateLimitExceeded):
        decision = refused.decision
        limit, reason, source = str(decision.limit), decision.reason, decision.source
    elif isinstance(refused, SystemOverloaded):
        limit, reason = f"{refused.field} {refused.threshold:g}", "system"
    elif isinstance(refused, AuthorityDenied):
        rule = refused.rule
        limit = f"{getattr(rule, 'strategy', '')} {getattr(rule, 'limit_app', '')}"
        reason = "authority"
    tally.counted(call.resource, limit, "refused", reason, source, 1, call.cost)
