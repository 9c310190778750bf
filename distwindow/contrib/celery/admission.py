"""What the gate asks the limiter, and what it does while that fails.

the limiter raises       is asked again                   the tasks meanwhile
StoreError: an outage    for no line, until a pause ends  wait, or run with on_store_error="run"
anything else            for this line only after a       of this line wait: a mistake opens no
                         pause, for others as usual       limit; others are not affected
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ... import Decision, Limit
from ...core.errors import ConfigurationError, StoreError, short_repr
from ...core.key import AnyKey
from ..failure_log import FailureLog
from .fleet_turns import FleetTurns
from .logger import logger
from .settings import OnStoreError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""For how long nothing is asked after a failure; doubled by each further one."""
_LOG_EVERY_S = 60.0
"""How often a kind of failure of single lines is logged."""

Ask = Callable[[AnyKey, tuple[Limit, ...], int], Decision]


class Answer(NamedTuple):
    """What becomes of the first task of a line."""

    admitted: bool
    wait_s: float
    """If admitted: how long it waits before it may start (a paced limit). Otherwise: when to ask
    again, in seconds from now.
    """
    left: int | None = None
    """If admitted: how many permits are left, where that is certain for the next `left_for_s`
    seconds: permits come back only when a bucket ends.
    """
    left_for_s: float = 0.0
    failed: bool = False
    """True if nothing can be asked for this line: its key cannot be served."""


RUN = Answer(True, 0.0)


class Admission:
    """Asks the limiter. In an outage it asks nothing for a while, so that a store which does not
    answer costs the worker at most one timeout per pause.
    """

    def __init__(
        self,
        ask: Ask,
        fleet_turns: FleetTurns,
        monotonic: Callable[[], float],
        on_store_error: OnStoreError,
    ) -> None:
        self._ask = ask
        self._fleet_turns = fleet_turns
        self._monotonic = monotonic
        self._on_store_error = on_store_error
        self._pause_s = 0.0
        self._paused_until_s = 0.0
        self._failure_log = FailureLog(_LOG_EVERY_S, monotonic)
        self.asks = 0
        self.refusals = 0
        self.failures = 0

    @property
    def store_is_up(self) -> bool:
        """False from a failed call to the next one that is answered."""
        return not self._pause_s

    def may_run(
        self, key: AnyKey, limits: tuple[Limit, ...], cost: int, failures: int = 0
    ) -> Answer:
        """Ask for the permits of one task. A cost above the smallest limit, which would wait
        forever, asks for all its permits instead. `failures`: how many of the line's last answers
        were `failed`.
        """
        decision = self._decide(self._ask, key, limits, cost, failures)
        if isinstance(decision, Answer):
            return decision
        if decision.allowed:
            limit = decision.limit
            if limit.is_shaped:
                return Answer(True, decision.wait)
            left_for_ms = limit.bucket_ms - decision.now_ms % limit.bucket_ms
            return Answer(True, 0.0, decision.remaining, left_for_ms / 1000)
        return Answer(False, decision.retry_after)

    def take_turn(self, key: AnyKey, limits: tuple[Limit, ...], cost: int) -> Answer | None:
        """Ask for a task that is to be sent back, and that takes a place in the fleet's line if it
        is refused; its turn is then in `wait_s`. None where no turn can be told.
        """
        if not limits or not self._fleet_turns.serve(limits):
            return None
        decision = self._decide(self._fleet_turns.ask, key, limits, cost, 0)
        if isinstance(decision, Answer):
            return None
        return Answer(decision.allowed, decision.retry_after)

    def _decide(
        self, ask: Ask, key: AnyKey, limits: tuple[Limit, ...], cost: int, failures: int
    ) -> Decision | Answer:
        """Return the limiter's decision; an answer while it fails."""
        left_s = self._paused_until_s - self._monotonic()
        if left_s > 0:
            return self._unknown(left_s)
        self.asks += 1
        try:
            decision = ask(key, limits, min(cost, *(limit.amount for limit in limits)))
        except StoreError as exc:
            self.failures += 1
            return self._unknown(self._pause(exc))
        except Exception as exc:  # a gate that raised would end the worker's event loop
            self.failures += 1
            self._log_failure(key, exc)
            return Answer(
                False, min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S), failed=True
            )
        if self._pause_s:
            logger.info("the store of the rate limits answers again")
            self._pause_s = 0.0
        self.refusals += not decision.allowed
        return decision

    def _unknown(self, wait_s: float) -> Answer:
        return RUN if self._on_store_error == "run" else Answer(False, wait_s)

    def _pause(self, exc: StoreError) -> float:
        if not self._pause_s:
            logger.warning(
                "asking for a rate limit failed (%s: %s); limited tasks %s until it answers",
                *(type(exc).__name__, exc),
                "run without their limits" if self._on_store_error == "run" else "wait",
            )
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._paused_until_s = self._monotonic() + self._pause_s
        return self._pause_s

    def _log_failure(self, key: AnyKey, exc: Exception) -> None:
        unlogged = self._failure_log.unlogged_before(type(exc).__name__)
        if unlogged is not None:
            logger.error(
                "the limit key %s cannot be asked for (%s: %s); its tasks wait%s",
                *(short_repr(key), type(exc).__name__, exc),
                f" ({unlogged} such failures were not logged)" if unlogged else "",
                exc_info=None if isinstance(exc, ConfigurationError) else exc,
            )
