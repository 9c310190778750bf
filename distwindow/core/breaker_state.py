"""The states of a circuit breaker, their changes, and the error of a refused call."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .errors import Blocked, short_repr
from .key import AnyKey

BreakerState = Literal["closed", "open", "half_open"]
"""`closed` lets calls through, `open` refuses them, `half_open` lets probes through only."""

STATES: tuple[BreakerState, ...] = ("closed", "open", "half_open")
"""The states by the number that scripts and replies use for them."""


class BreakerChange(NamedTuple):
    """A change of state, as listeners get it: between two looks of one process."""

    key: AnyKey
    previous: BreakerState
    state: BreakerState
    at_ms: int
    """When `state` began, by the store's clock: ms since the epoch; 0 if it does not know."""


class BreakerOpen(Blocked):  # the usual name for it, hence no "Error"
    """A call was refused by a circuit breaker.

    `.key` is the breaker's key, `.state` is `"open"` or `"half_open"` (probes are under way), or
    `"closed"` from an adaptive breaker, which has no states. `.retry_after` is in seconds: no call
    will be let through before. Of an adaptive breaker it is when one is let through at the latest.
    """

    def __init__(self, key: AnyKey, state: BreakerState, retry_after: float) -> None:
        super().__init__(key, state, retry_after)
        self.key = key
        self.state = state
        self.retry_after = retry_after

    def __str__(self) -> str:
        state = {"closed": "refusing", "open": "open", "half_open": "half-open"}[self.state]
        return (
            f"the circuit breaker of {short_repr(self.key)} is {state}; "
            f"retry in {self.retry_after:.3f} s{self._rule_text()}"
        )
