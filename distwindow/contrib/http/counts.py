"""What an observer is told of limits of requests: by their names, as several have one limiter.

a limit has               is counted as
admitted a request        allowed, at once; taken back where a later limit refuses the request,
                          and the charge is given back
refused it                refused; what was asked with it in one round trip is not counted
raised a `StoreError`     an error
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...observer import Tally
from ...ring.decision import Decision
from ...ring.key import AnyKey, Key
from ...ring.limit import Limit
from ...rules.shadow import as_enforced

if TYPE_CHECKING:
    from .request_limit import Question, RequestLimit


def count_one(
    tally: Tally,
    of: RequestLimit,
    decision: Decision,
    name: str,
    limit: Limit,
    cost: int,
    calls: int,
) -> None:
    """Count the answer of one limit; with -1 `calls`, take it back."""
    # By index, as a name takes three times as long: 1 is `key`, 3 `limit`, 4 `remaining`,
    # 9 `source`.
    allowed, reason = as_enforced(decision)
    is_near = allowed and limit is decision[3] and decision[4] * 5 < limit.amount
    tally.counted(
        decision[1], limit, "allowed" if allowed else "refused", reason, decision[9], calls,
        calls * cost, (), calls if is_near else 0, name, bool(of.shadow),
    )  # fmt: skip


def count_failed(question: Question) -> None:
    """Count a request that nobody has decided."""
    tally = question.limit.rate_limits.opened.tally
    if tally is not None:
        tally.failed(question.key, question.cost, question.limits, question.policies.given[0])


def label_of_request(key_label: Callable[[AnyKey], str]) -> Callable[[AnyKey], str]:
    """Return `key_label` for keys of windows, which begin with the name of the limit and ":"."""
    return lambda key: key_label(_key_of_request(key))


def _key_of_request(key: AnyKey) -> AnyKey:
    if isinstance(key, Key):
        return Key(_key_of_request(key.resource), key.tag)  # type: ignore[arg-type]  # of no Key
    return key.partition(":")[2] if isinstance(key, str) else key.partition(b":")[2]
