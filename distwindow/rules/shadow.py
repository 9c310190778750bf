"""Limits in shadow: decided and counted as any other, and never enforced.

    the limit says             the caller gets
    admitted                   the same
    admitted, after a wait     admitted at once; reason "shadow"
    refused                    admitted, charged nothing; reason "shadow", with
                               `retry_after` and `remaining` of the refusal
    an error of the store,     admitted, as by `on_store_error="allow"`; the error is logged
    a mistake in its setup

The windows lie under `PREFIX:shadow`, since the name of a ring does not have the amount: one
limit may be enforced while another is tried on the same keys. They are what they would be if the
limit were enforced, as a refused call is counted as refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError, StoreError, StoreUnavailable, counted, short_repr
from ..ring.decision import Decision
from ..ring.key import AnyKey

_LOG = logging.getLogger("distwindow")
VARIABLE = "DISTWINDOW_SHADOW"
"""With "1" in it, all rate limits of a process are in shadow."""
_LOG_EVERY_S = 60.0
_SHOWN_KEYS = 5
_MAX_KEYS = 10_000
_announced = False


def is_in_shadow(shadow: Any) -> bool:
    """Return whether a limiter that was made with `shadow` is in shadow."""
    global _announced
    if not isinstance(shadow, bool):
        raise ConfigurationError(f"shadow={short_repr(shadow)} is neither True nor False")
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE}={short_repr(value)} in the environment is not 1 or 0")
    if value == "1" and not _announced:
        _announced = True
        _LOG.warning("%s=1: no rate limit of this process refuses anything", VARIABLE)
    return shadow or value == "1"


def shadow_prefix(prefix: Any) -> Any:
    """Return the prefix of what is in shadow beside what is enforced under `prefix`."""
    return f"{prefix}:shadow" if isinstance(prefix, str) and prefix else prefix


class ShadowStore:
    """A store whose mistakes are errors that `on_store_error` answers."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def decide(self, *arguments: Any) -> Any:
        """See `Store`."""
        return self._send(self._store.decide, arguments)

    def execute(self, *arguments: Any) -> Any:
        """See `Store`."""
        return self._send(self._store.execute, arguments)

    def _send(self, send: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return send(*arguments)
        except ConfigurationError as exc:
            raise answered_by_policy(exc) from exc


class AsyncShadowStore(ShadowStore):
    """`ShadowStore` for tasks."""

    async def _send(self, send: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return await send(*arguments)
        except ConfigurationError as exc:
            raise answered_by_policy(exc) from exc


_mistake_log_at = 0.0


def log_mistake(exc: Exception) -> None:
    """Log what a limit in shadow has failed with, once a minute."""
    global _mistake_log_at
    if time.monotonic() >= _mistake_log_at:
        _mistake_log_at = time.monotonic() + _LOG_EVERY_S
        _LOG.error("a limit in shadow cannot be decided, and admits all calls: %s", exc)


def answered_by_policy(exc: ConfigurationError) -> StoreUnavailable:
    """Return the error in whose place `exc` is answered, and log it."""
    log_mistake(exc)
    return StoreUnavailable(str(exc), charged=False)


class Shadow:
    """Lets the calls of one limiter pass, and says in the log what would have been refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._refused: Counter[AnyKey] = Counter()
        self._calls = 0
        self._log_at = 0.0

    def admit(self, decision: Decision) -> Decision:
        """Return `decision` as the caller gets it."""
        if decision.allowed and not decision.wait:
            return decision
        if not decision.allowed:
            self._note(decision)
        return decision._replace(allowed=True, wait=0.0, reason="shadow")

    def admitting(
        self, decide: Callable[[AnyKey, int], Decision | None], most: int,
        answer: Callable[[AnyKey, int, StoreError], Decision],
    ) -> Callable[[AnyKey, int], Decision | None]:  # fmt: skip
        """Return what decides calls in this process as `decide` does, and admits them. A cost above
        `most` counts as that. `answer` decides where `decide` cannot.
        """

        def decide_and_admit(key: AnyKey, cost: int) -> Decision | None:
            if cost.__class__ is int and cost > most:
                cost = most
            try:
                decision = decide(key, cost)
            except ConfigurationError as exc:  # `eventual`, whose flushes fail
                decision = answer(key, cost, answered_by_policy(exc))
            return None if decision is None else self.admit(decision)

        return decide_and_admit

    def _note(self, decision: Decision) -> None:
        self._calls += 1
        if len(self._refused) < _MAX_KEYS or decision.key in self._refused:
            self._refused[decision.key] += 1
        now = time.monotonic()
        if now >= self._log_at:
            refused, self._refused = self._refused, Counter()
            calls, self._calls = self._calls, 0
            self._log_at = now + _LOG_EVERY_S
            most = ", ".join(
                f"{short_repr(key)} ({calls})" for key, calls in refused.most_common(_SHOWN_KEYS)
            )
            _LOG.warning(
                "%s in shadow would have refused %s by %s since the last such line, most of: %s",
                self._name, counted(calls, "call"), decision.limit, most,
            )  # fmt: skip
