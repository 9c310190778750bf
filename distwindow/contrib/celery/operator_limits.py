"""Limits that change while the worker runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from .effective_limits import EffectiveLimits
from .gate import Gate
from .logger import logger
from .stored_limits import READ_EVERY_S, StoredLimits
from .task_limits import parse_operator_limits


class Timers(Protocol):
    def call_after(self, seconds: float, callback: Callable[[], None]) -> Any: ...

    def cancel(self, timer: Any) -> None: ...


class OperatorLimits:
    """Keeps this worker's limits as those that are stored."""

    def __init__(
        self, stored: StoredLimits, effective: EffectiveLimits, gate: Gate, timers: Timers
    ) -> None:
        self._stored = stored
        self._effective = effective
        self._gate = gate
        self._timers = timers
        self._timer: Any = None

    def start(self) -> None:
        """Read the stored limits, now and from time to time. May be called again: the timer of the
        call before is replaced.
        """
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None
        # Not while the store fails: each attempt may take a whole timeout.
        if self._gate.admission.store_is_up:
            self.read()
        # At another moment in each worker, so that they do not all read at the same time.
        delay_s = READ_EVERY_S * random.uniform(0.8, 1.2)
        self._timer = self._timers.call_after(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None  # it must not cancel itself: under gevent it is a greenlet
        self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
        self._stored.close()

    def read(self) -> None:
        """Take over what is stored; log it if the store does not answer."""
        try:
            stored = self._stored.read()
        except Exception as exc:  # whatever the client raises: the limits stay as they are
            logger.warning(
                "reading the limits that operators have set failed (%s: %s); those of the "
                "configuration hold, or those that were read last",
                *(type(exc).__name__, exc),
            )
            return
        changed = self._effective.set_operator_limits(stored)
        if changed:
            logger.info("limits set by an operator hold now for %s", ", ".join(sorted(changed)))
            self._gate.limits_changed(changed)

    def set(self, task: str, limits: str) -> None:
        """Store the limits of a task and take them over: "none" for no limit, "default" for the
        configured ones. Raises `ConfigurationError` for what is no limit, and whatever the client
        raises.
        """
        if limits.strip().lower() == "default":
            self._stored.set(task, None)
        else:
            self._effective.check_pace(task, parse_operator_limits(limits))
            self._stored.set(task, limits)
        self.read()
