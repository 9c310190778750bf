"""What breakers for threads do. What they do with the store is in `operations/breaker.py`; what is
decided in this process is in `consistency/breaker_states.py` and `adaptive_states.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..callables import check_handler
from ..consistency.breaker_source import BreakerSource, FollowedBreaker, SourceOptions
from ..core.key import AnyKey
from ..decorator import DecoratorKey
from ..lifecycle.base import ignore_wake, raise_failure
from ..lifecycle.blocking import BlockingLifecycle
from ..operations.breaker import admit, send_state
from .base import BaseBreaker, BreakerOptions, check_is_no_function, source_options
from .call import Call
from .protect import F, protect_function

S = TypeVar("S", bound=FollowedBreaker)
A = TypeVar("A")


class BlockingBreaker(BaseBreaker, BlockingLifecycle, Generic[S, A]):
    """A breaker for threads."""

    def __init__(self, store: Any, options: BreakerOptions, name: str | None) -> None:
        super().__init__(store, options)
        self._open_store(store, options.timeout, options.clock, name, options.time)
        self._states = self._open_states(source_options(options, self._store, self._store_name))
        self._add_flush_job(
            self._states,
            self._name,
            in_background=not self._states.in_process,
        )

    def _open_states(self, options: SourceOptions) -> BreakerSource[S, A]:
        """Return what this breaker knows and counts in this process."""
        raise NotImplementedError  # each kind of breaker has its own

    def call(self, key: AnyKey) -> Call[A]:
        """Return a context manager for one call of the service: raises `BreakerOpen` at the
        beginning of its block if it is refused, and counts its end. `fail()` of the object that
        `as` gives counts it as failed though it raises nothing.
        """
        check_is_no_function(key)
        admit = functools.partial(self._admit, key)
        return Call(self._failure_types, admit, self._finish, self._states.restarted)

    def protect(
        self,
        text: AnyKey | None = None,
        *,
        key: AnyKey | Callable[..., AnyKey] | None = None,
        fallback: Callable[..., Any] | None = None,
    ) -> Callable[[F], F]:
        """Return a decorator: each call of the function goes through the breaker. A refused call
        returns what `fallback` returns for the same arguments, or raises `BreakerOpen`.

        `text` and `key` are those of `Limiter.limit`. Raises `TypeError` for a function in the
        place of `text`, and `ConfigurationError` for what can never work, when it is applied.
        """
        source = DecoratorKey("breaker.protect", self._prefix, text, key)
        check_handler("protect: fallback", fallback, may_be_async=False)
        return functools.partial(protect_function, self, source, fallback)

    def _refreshed(self, key: AnyKey) -> S:
        """Return what the store knows of `key` now."""
        self._check_open()
        state = self._states.of_key(key)
        raise_failure(self._run(send_state(self._states, state)))
        return state

    def _end_calls(self) -> None:
        if self._owns_store:
            self._is_closed = True
            self._states.wake = ignore_wake  # the thread that closes flushes from here on

    def _admit(self, key: AnyKey) -> A:
        self._check_open()
        state = self._states.of_key(key)
        admission = self._states.decide(state)
        return self._run(admit(self._states, state)) if admission is None else admission

    def _finish(self, admission: A, failed: bool | None) -> None:
        if self._states.record(admission, failed) and not self._is_closed:
            # If the store does not take it now, the worker sends it again.
            self._run(send_state(self._states, self._states.state_of(admission)))
