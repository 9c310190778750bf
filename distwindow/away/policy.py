"""`on_store_error` and `on_unknown`: what a call gets that the store has not decided.

the store's error           which option answers
surely not executed         `on_store_error`
unknown outcome             `on_unknown`, by default the same
a configuration error       none: it is raised, whatever the options

raise    the error                                 local    the share of this process
allow    an admission that is not counted          a function of (key, cost, limits, error),
deny     a refusal                                 which returns allow or deny: True or False
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from ..errors import ConfigurationError, StoreError, short_repr
from ..ring.decision import Charge, Decision
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..ring.store import AsyncStore, Store
from ..runtime.command_cache import CommandCache
from ..runtime.flush import JoinedSources
from ..runtime.options import Options
from ..runtime.strategy import Strategy
from ..runtime.timers import LOG
from ..support.callables import RAISED_BY_CALLBACKS, check_not_async, check_takes, function_name
from .local_share import LocalShare
from .outages import RETRY_AFTER_S, Health, Outages

Answer = Literal["raise", "allow", "deny", "local"]
DecideWithoutStore: TypeAlias = (
    "Callable[[AnyKey, int, tuple[Limit, ...], StoreError], bool | Literal['allow', 'deny']]"
)
OnStoreError: TypeAlias = "Answer | DecideWithoutStore"


def check_options(options: Options) -> None:
    """Raise `ConfigurationError` for an `on_store_error` or `on_unknown` that is none."""
    for name in ("on_store_error", "on_unknown"):
        value = getattr(options, name)
        if callable(value):
            check_not_async(name, value)
            check_takes(name, value, 4, "(key, cost, limits, error)")
        elif value not in get_args(Answer) and not (value is None and name == "on_unknown"):
            raise ConfigurationError(
                f'{name}={short_repr(value)} is none of "raise", "allow", "deny", "local", and no '
                "function of (key, cost, limits, error)"
            )


class StoreErrorPolicy:
    """The answers of one limiter while its store is away."""

    def __init__(
        self,
        options: Options,
        commands: CommandCache,
        store: Store | AsyncStore,
        strategy: Strategy,
        store_name: str,
    ) -> None:
        """`store_name` is another one for each store."""
        self._commands = commands
        self._now_ms = store.clock.now_ms
        self._store = store
        self._strategy = strategy
        self._on_error: Any = options.on_store_error
        self._on_unknown: Any = (
            options.on_store_error if options.on_unknown is None else options.on_unknown
        )
        self.raises_always = self._on_error == self._on_unknown == "raise"
        self.local: LocalShare | None = None
        self.flush_source = JoinedSources(strategy)
        """What the worker flushes: the strategy, and what was admitted by the share."""
        if options.uses_local_share:
            self.local = LocalShare(commands, store.clock, options, store_name)
            self.flush_source = JoinedSources(strategy, self.local)
        self.outages: Outages = getattr(store, "outages", None) or Outages()
        self.outages.effect = (
            "calls fail at once until it is back"
            if self.raises_always
            else "calls are answered by on_store_error until it is back"
        )
        if options.shadow:
            self.outages.effect_of_mistake = "calls are admitted, as the limit is in shadow"

    @property
    def observe(self) -> Callable[[Decision], None] | None:
        """What takes in the decisions of the store; None where nothing wants them."""
        return None if self.local is None else self.local.observe

    def announce(self) -> None:
        """Have this process counted among those that share the limits, before its first call."""
        if self.local is not None:
            self.local.announce()

    def decide(self, key: AnyKey, cost: int, error: StoreError) -> Decision:
        """Decide a valid call that the store has not decided, or raise `error`."""
        answer = self._answer_to(error)  # before a closed limiter is asked for a command
        charges = self._commands.acquire_command(key, cost).charges
        return self._decide(charges, answer, error, peeks=False)

    def peek(self, key: AnyKey, error: StoreError) -> Decision:
        """Return what `decide` would for a call of cost 1, and count nothing."""
        answer = self._answer_to(error)
        charges = self._commands.acquire_command(key, 1).charges
        return self._decide(charges, answer, error, peeks=True)

    def decide_all(self, calls: Sequence[tuple[Charge, ...]], error: StoreError) -> Decision:
        """Return the decision of a call over several keys: `calls` has the charges of each."""
        answer = self._answer_to(error)
        if answer != "local" or self.local is None:
            decision = self._decide(calls[0], answer, error, peeks=False)
            for call in calls[1:]:
                if decision.allowed:  # a function may charge another limiter
                    decision = self._decide(call, answer, error, peeks=False)
            return decision
        return self.local.decide_all(calls)

    def _answer_to(self, error: StoreError) -> Any:
        """Return what the options say for `error`, or raise it."""
        self.outages.last_error = str(error)
        answer = self._on_unknown if error.charged is None else self._on_error
        if answer == "raise":
            raise error
        return answer

    def _decide(
        self, charges: tuple[Charge, ...], answer: Any, error: StoreError, *, peeks: bool
    ) -> Decision:
        _, limit, cost, key, _ = charges[0]
        if answer == "local" and self.local is not None:
            return self.local.decide(charges, peeks=peeks)
        allowed = answer == "allow"
        if callable(answer):
            decides = answer
            answer = decides(key, cost, tuple(charge.limit for charge in charges), error)
            if answer not in (True, False, "allow", "deny"):
                raise TypeError(
                    f"{function_name(decides)} has returned {short_repr(answer)}; it has to return "
                    "True (allow) or False (deny), as on_store_error and on_unknown have to"
                )
            allowed = answer in (True, "allow")
        return Decision(
            allowed, key, cost, limit, 0, 0.0 if allowed else RETRY_AFTER_S, 0.0, 0.0,
            "store_down", "policy", self._now_ms(), None,
        )  # fmt: skip

    def add_listener(self, listener: Callable[[Health], object]) -> None:
        """Call `listener` with the health of the store, after each change."""
        if not callable(listener):
            raise ConfigurationError(
                f"on_health_change({short_repr(listener)}): a listener is a function of one Health"
            )
        check_not_async("on_health_change", listener)

        def notify() -> None:
            try:
                listener(self.health())
            except RAISED_BY_CALLBACKS:
                LOG.exception("a listener of on_health_change has failed: %r", listener)

        self.outages.add_listener(notify)

    def health(self) -> Health:
        outages, flushed = self.outages, self.flush_source
        return Health(
            not outages.away,
            outages.changed_at,
            outages.last_error,
            self._store.unknown_total,
            flushed.unacknowledged_counts() + flushed.unreturned_permits(),
            outages.away,
        )

    def strategy_of(self, decision: Decision) -> Strategy:
        """Return what has counted the call of `decision`."""
        if self.local is not None and decision.reason == "store_down":
            return self.local
        return self._strategy

    def reset(self, key: AnyKey) -> None:
        if self.local is not None:
            self.local.reset(key)

    def close(self) -> None:
        if self.local is not None:
            self.local.close()
