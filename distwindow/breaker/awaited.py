"""What breakers for tasks do: the methods of `BlockingBreaker`, awaited where there is I/O."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..callables import check_handler
from ..consistency.breaker_source import BreakerSource, FollowedBreaker, SourceOptions
from ..core.key import AnyKey
from ..decorator import DecoratorKey
from ..lifecycle.base import ignore_wake, raise_failure
from ..lifecycle.tasks import AsyncLifecycle
from ..operations.breaker import admit, send_state
from .base import BaseBreaker, BreakerOptions, check_is_no_function, source_options
from .call import AsyncCall
from .protect import F, protect_async_function

S = TypeVar("S", bound=FollowedBreaker)
A = TypeVar("A")


class AwaitedBreaker(BaseBreaker, AsyncLifecycle, Generic[S, A]):
    """A breaker for tasks."""

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

    def call(self, key: AnyKey) -> AsyncCall[A]:
        """See `CircuitBreaker.call`; `async with`."""
        check_is_no_function(key)
        admit = functools.partial(self._admit, key)
        return AsyncCall(self._failure_types, admit, self._finish, self._states.restarted)

    def protect(
        self,
        text: AnyKey | None = None,
        *,
        key: AnyKey | Callable[..., AnyKey] | None = None,
        fallback: Callable[..., Any] | None = None,
    ) -> Callable[[F], F]:
        """See `CircuitBreaker.protect`; for coroutine functions. `fallback` may be one, too."""
        source = DecoratorKey("breaker.protect", self._prefix, text, key)
        check_handler("protect: fallback", fallback, may_be_async=True)
        return functools.partial(protect_async_function, self, source, fallback)

    async def _refreshed(self, key: AnyKey) -> S:
        """Return what the store knows of `key` now."""
        self._check_open()
        state = self._states.of_key(key)
        raise_failure(await self._run(send_state(self._states, state)))
        return state

    async def _end_calls(self) -> None:
        if self._owns_store:
            self._is_closed = True
            self._states.wake = ignore_wake

    async def _admit(self, key: AnyKey) -> A:
        self._check_open()
        state = self._states.of_key(key)
        admission = self._states.decide(state)
        return await self._run(admit(self._states, state)) if admission is None else admission

    async def _finish(self, admission: A, failed: bool | None) -> None:
        # Before anything is awaited: if the task is cancelled then, the worker sends it.
        if self._states.record(admission, failed) and not self._is_closed:
            await self._run(send_state(self._states, self._states.state_of(admission)))
