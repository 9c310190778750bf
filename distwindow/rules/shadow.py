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
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError, StoreError, StoreUnavailable, counted, short_repr
from ..ring.clock import NEVER
from ..ring.decision import Decision
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..runtime.flush import FlushSchedule, OutgoingCommand, ScheduledSource
from ..support.fork import register_after_fork

_LOG = logging.getLogger("distwindow")
VARIABLE = "DISTWINDOW_SHADOW"
"""With "1" in it, all rate limits of a process are in shadow."""
_LOG_EVERY_S = 60.0
_SHOWN_KEYS = 5
_MAX_KEYS = 10_000
_OTHERS = "(others)"
_MAX_MISTAKES = 100
_announced = False


def is_in_shadow(shadow: Any = False) -> str:
    """Return "limit" for what is made with `shadow`, "process" where the whole process is in
    shadow, and else an empty text.
    """
    global _announced
    if not isinstance(shadow, bool):
        raise ConfigurationError(f"shadow={short_repr(shadow)} is neither True nor False")
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE}={short_repr(value)} in the environment is not 1 or 0")
    if value == "1" and not _announced:
        _announced = True
        _LOG.warning("%s=1: no rate limit of this process refuses anything", VARIABLE)
    return "limit" if shadow else "process" if value == "1" else ""


def shadow_prefix(prefix: Any, shadow: str = "limit") -> Any:
    """Return the prefix of what is in shadow beside what is enforced under `prefix`."""
    if not isinstance(prefix, str) or not prefix:
        return prefix  # which is refused
    return f"{prefix}:shadow" if shadow == "limit" else f"{prefix}:shadow-process"


def admitted(decision: Decision) -> Decision:
    """Return `decision` as the caller gets it."""
    if decision.allowed and not decision.wait:
        return decision
    return decision._replace(allowed=True, wait=0.0, reason="shadow")


def as_enforced(decision: Decision) -> tuple[bool, str]:
    """Return whether the limit would have admitted the call, and its reason."""
    if decision[8] != "shadow":  # by index, as a name takes three times as long: `reason`
        return decision[0], decision[8]
    is_charged = decision.charged is not None  # it was delayed, and not refused
    return is_charged, "paced" if is_charged else "over_limit"


class ShadowStore:
    """A store whose mistakes are errors that `on_store_error` answers."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def decide(self, *arguments: Any) -> Any:
        return self._send(self._store.decide, arguments)

    def execute(self, *arguments: Any) -> Any:
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


_mistakes_logged_at: dict[tuple[str, type], float] = {}


def log_mistake(exc: Exception, of: str = "a limit") -> None:
    """Log what a limit in shadow has failed with, each kind of error once a minute: its text may
    have the key of a call.
    """
    kind, now = (of, type(exc)), time.monotonic()
    if now < _mistakes_logged_at.get(kind, -math.inf) + _LOG_EVERY_S:
        return
    if len(_mistakes_logged_at) >= _MAX_MISTAKES:
        _mistakes_logged_at.clear()
    _mistakes_logged_at[kind] = now
    _LOG.error("%s in shadow cannot be decided, and admits all calls: %r", of, exc)


def answered_by_policy(exc: ConfigurationError) -> StoreUnavailable:
    """Return the error in whose place `exc` is answered, and log it."""
    log_mistake(exc)
    return StoreUnavailable(str(exc), charged=False)


class Shadow(ScheduledSource):
    """Lets the calls of one limiter pass, and says in the log what would have been refused: a
    minute after the first refusal, and at the end. A source of its worker, which sends nothing.
    """

    def __init__(self, name: str, monotonic: Callable[[], float]) -> None:
        self._name, self._monotonic = name, monotonic
        self._schedule = FlushSchedule(_LOG_EVERY_S)
        register_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent logs what it has refused."""
        self._refused: dict[Limit, Counter[AnyKey]] = {}
        self._log_at = NEVER
        self._schedule.next_due_at = NEVER

    def admit(self, decision: Decision) -> Decision:
        """Return `decision` as the caller gets it, and note a refusal."""
        if not decision.allowed:
            self._note(decision)
        return admitted(decision)

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
        refused = self._refused.setdefault(decision.limit, Counter())
        key = decision.key if len(refused) < _MAX_KEYS or decision.key in refused else _OTHERS
        refused[key] += 1
        if self._log_at == NEVER:
            self._log_at = self._monotonic() + _LOG_EVERY_S
            self._schedule.flush_by(self._log_at)

    @property
    def has_untold(self) -> bool:  # type: ignore[override]  # until it is logged
        return bool(self._refused)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Log what was refused, if it is time."""
        if not self._refused or not (everything or now >= self._log_at):
            return
        found, self._refused, self._log_at = self._refused, {}, NEVER
        parts = [
            f"{counted(sum(keys.values()), 'call')} by {limit}, most of "
            + ", ".join(f"{short_repr(key)} ({n})" for key, n in keys.most_common(_SHOWN_KEYS))
            for limit, keys in found.items()
        ]
        _LOG.warning("%s in shadow would have refused %s", self._name, "; ".join(parts))

    def reschedule(self, now: float) -> None:
        self._schedule.recompute(now, [lambda now: self._log_at])
