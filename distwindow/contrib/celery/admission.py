"""What the gate asks the limiter, and what it does while the limiter's store fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ... import Decision, Limit
from ...core.errors import ConfigurationError, StoreError
from ...core.key import AnyKey
from .fleet_turns import FleetTurns
from .logger import logger
from .settings import OnStoreError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""For how long nothing is asked after a failure; doubled by each further one."""

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


RUN = Answer(True, 0.0)


class Admission:
    """Asks the limiter. After a failure it asks nothing for a while, so that a store which does not
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
        self._is_outage = False
        self.asks = 0
        self.refusals = 0
        self.failures = 0

    @property
    def store_is_up(self) -> bool:
        """False from a failed call to the next one that is answered."""
        return not self._pause_s

    def may_run(self, key: AnyKey, limits: tuple[Limit, ...], cost: int) -> Answer:
        """Ask for the permits of one task. A cost above the smallest limit, which would wait
        forever, asks for all its permits instead.
        """
        decision = self._decide(self._ask, key, limits, cost)
        if decision is None:
            return self._unknown(max(0.0, self._paused_until_s - self._monotonic()))
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
        decision = self._decide(self._fleet_turns.ask, key, limits, cost)
        return None if decision is None else Answer(decision.allowed, decision.retry_after)

    def _decide(
        self, ask: Ask, key: AnyKey, limits: tuple[Limit, ...], cost: int
    ) -> Decision | None:
        """Return the limiter's decision; None while it fails."""
        if self._paused_until_s > self._monotonic():
            return None
        self.asks += 1
        try:
            decision = ask(key, limits, min(cost, *(limit.amount for limit in limits)))
        except Exception as exc:  # a gate that raised would end the worker's event loop
            self.failures += 1
            self._pause(exc)
            return None
        if self._pause_s:
            logger.info("the store of the rate limits answers again")
            self._pause_s = 0.0
        self.refusals += not decision.allowed
        return decision

    def _unknown(self, wait_s: float) -> Answer:
        # A server that can never serve the limiter is no outage: a mistake opens no limit.
        runs = self._is_outage and self._on_store_error == "run"
        return RUN if runs else Answer(False, wait_s)

    def _pause(self, exc: Exception) -> None:
        was_outage, self._is_outage = self._is_outage, isinstance(exc, StoreError)
        if not self._pause_s or was_outage != self._is_outage:
            runs = self._is_outage and self._on_store_error == "run"
            what = "run without their limits" if runs else "wait"
            logger.log(
                logging.WARNING if self._is_outage else logging.ERROR,
                "asking for a rate limit failed (%s: %s); limited tasks %s until it answers",
                *(type(exc).__name__, exc, what),
                exc_info=None if isinstance(exc, (StoreError, ConfigurationError)) else exc,
            )
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._paused_until_s = self._monotonic() + self._pause_s
