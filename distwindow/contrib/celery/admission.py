"""Questions of the gate to the limiter, and what follows when one fails.

the limiter raises       is asked again                   the tasks meanwhile
StoreError: an outage    for no line, until a pause ends  wait, or run with on_store_error="run"
                         or the limiter is back
anything else            for this line only after a       of this line wait: a mistake opens no
                         pause, for others as usual       limit; others are not affected

Failures of the second kind may be the server's (its password is wrong). So after some in a row, of
whichever lines, few are asked for until an ask succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ... import Decision, Health
from ...errors import ConfigurationError, StoreError, short_repr
from ...rules.shadow import is_in_shadow
from ...support.backoff import Backoff
from ..tasks import FailureLog, Item, WhileStoreIsAway, keys_of
from .lines import Permits
from .worker import logger

PAUSES = Backoff(0.25, 5.0)
"""For how long nothing is asked, or nothing for one line. The limiter probes a store that is away
off the path of its calls, and hears of its return within half a second: that ends a pause, but not
before the time of the first one is over.
"""
LOOK_EVERY_S = 0.1
"""How often a gate looks in a pause whether the limiter has heard of the return. A thread of its
own hears of it, which cannot wake an event loop of kombu.
"""
_FAILURES_OF_ALL = 3
"""After so many failures of single lines in a row, one ask is made in the first pause."""


class Answer(NamedTuple):
    """An answer to the first task of a line."""

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
    permits: Permits | None = None
    """What a limit refuses, or of which `left` are left; None where no limit decides."""
    failures: int = 0
    """How many asks for this line in a row have failed, though the store answers."""
    store_is_away: bool = False
    """True if it waits for the store, and not for permits."""
    in_shadow: Decision | None = None
    """What was decided, and is not enforced."""


RUN = Answer(True, 0.0)


class TaskAdmission:
    """Asks the limiter by `ask(items, enqueue)`, its `acquire_all`; with `enqueue` a refused task
    takes a place in the fleet's line. In an outage it asks nothing for a while, so that a store
    which does not answer costs the worker at most one timeout per pause.
    """

    def __init__(
        self,
        ask: Callable[..., Decision],
        monotonic: Callable[[], float],
        on_store_error: WhileStoreIsAway,
    ) -> None:
        self._ask = ask
        self.monotonic = monotonic
        self._in_shadow = is_in_shadow()
        # In shadow the limiter answers all that fails, but for a refund.
        self._on_store_error = "run" if self._in_shadow else on_store_error
        self._outage_failures = 0
        """How many asks in a row the store has not answered."""
        self._paused_until_s = 0.0
        self._failed_at_s = 0.0
        """When the store has failed to answer the last time."""
        self._is_back = False
        """True if the limiter has heard of the store's return since the last ask began."""
        self._line_failures = 0
        """How many asks in a row have failed, though the store answers."""
        self._ask_again_at_s = 0.0
        """When the next ask may be made after `_FAILURES_OF_ALL`."""
        self._failure_log = FailureLog(monotonic)
        self.asks = 0
        self.refusals = 0
        self.failures = 0

    @property
    def store_is_up(self) -> bool:
        """False from a failed call to the next one that is answered."""
        return not self._outage_failures

    @property
    def is_paused(self) -> bool:
        """True while nothing is asked, because the store did not answer."""
        return self._paused_until_s > self.monotonic()

    def on_health_change(self, health: Health) -> None:
        """Note whether the store is back: a listener of the limiter, called in any thread."""
        self._is_back = health.up

    def end_pause(self) -> bool:
        """End the pause if the limiter has heard of the store's return since the last ask. Return
        True if it did. The first pause is kept: a store may answer probes and no calls.
        """
        now_s = self.monotonic()
        ends = self._is_back and self._failed_at_s + PAUSES.first_s <= now_s < self._paused_until_s
        if ends:
            self._paused_until_s = now_s
        return ends

    def may_run(self, items: Sequence[Item], failures: int = 0) -> Answer:
        """Ask for the permits of one task. `failures`: those of the line's last answer."""
        decision = self._decide(items, failures)
        if isinstance(decision, Answer):
            return decision
        if self._in_shadow:
            return Answer(True, 0.0, in_shadow=decision)
        limit = decision.limit
        permits = Permits(decision.key, limit, decision.cost)
        if not decision.allowed:
            return Answer(False, decision.retry_after, permits=permits)
        if limit.is_shaped:
            return Answer(True, decision.wait)
        left_for_ms = limit.bucket_ms - decision.now_ms % limit.bucket_ms
        return Answer(True, 0.0, decision.remaining, left_for_ms / 1000, permits=permits)

    def take_turn(self, items: Sequence[Item]) -> Decision | None:
        """Ask for the permits of one task; if it is refused, take a place in the fleet's line,
        whose turn is then in `retry_after`. None where the turn is unknown: under a limit that is
        paced or warms up, and while the store is away.
        """
        if any(limit.is_shaped for _, limits, _ in items for limit in limits):
            return None
        decision = self._decide(items, 0, enqueue=True)
        return None if isinstance(decision, Answer) else decision

    def _decide(
        self, items: Sequence[Item], failures: int, enqueue: bool = False
    ) -> Decision | Answer:
        """Return the limiter's decision; an answer without one while it fails."""
        now_s = self.monotonic()
        if self._paused_until_s > now_s:
            return self._unknown(self._paused_until_s - now_s, failures)
        if self._line_failures >= _FAILURES_OF_ALL and self._ask_again_at_s > now_s:
            left_s = self._ask_again_at_s - now_s
            return Answer(False, max(left_s, PAUSES.delay_s(failures)), failures=failures)
        self.asks += 1
        self._is_back = False
        try:
            decision = self._ask(items, enqueue)
        except StoreError as exc:
            self.failures += 1
            return self._unknown(self._pause(exc), failures)
        except Exception as exc:  # a gate that raised would end the worker's event loop
            self.failures += 1
            self._has_answered()
            self._log_failure(items, exc, failures)
            if self._in_shadow:
                return RUN
            self._line_failures += 1
            self._ask_again_at_s = self.monotonic() + PAUSES.first_s
            return Answer(False, PAUSES.delay_s(failures + 1), failures=failures + 1)
        self._has_answered()
        self._line_failures = 0
        self.refusals += not decision.allowed
        return decision

    def _has_answered(self) -> None:
        if self._outage_failures:
            logger.info("the store of the rate limits answers again")
            self._outage_failures = 0

    def _unknown(self, wait_s: float, failures: int) -> Answer:
        runs = self._on_store_error == "run"
        return RUN if runs else Answer(False, wait_s, failures=failures, store_is_away=True)

    def _pause(self, exc: StoreError) -> float:
        if not self._outage_failures:
            logger.warning(
                "asking for a rate limit failed (%s: %s); limited tasks %s until it answers",
                *(type(exc).__name__, exc),
                "run without their limits" if self._on_store_error == "run" else "wait",
            )
        self._outage_failures += 1
        pause_s = PAUSES.delay_s(self._outage_failures)
        self._failed_at_s = self.monotonic()
        self._paused_until_s = self._failed_at_s + pause_s
        return pause_s

    def _log_failure(self, items: Sequence[Item], exc: Exception, failures: int) -> None:
        """Log the first failure of a line, and some of the others."""
        unlogged = self._failure_log.unlogged_before(type(exc).__name__)
        if unlogged is not None or not failures:
            logger.error(
                "the limit key %s cannot be asked for (%s: %s); its tasks wait%s",
                *(short_repr(keys_of(items)), type(exc).__name__, exc),
                f" ({unlogged} such failures were not logged)" if unlogged else "",
                exc_info=None if isinstance(exc, ConfigurationError) else exc,
            )
