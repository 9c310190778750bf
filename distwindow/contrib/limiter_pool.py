"""The limiters of one application by their limits: one store, and the worker, for all of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from .. import AsyncLimiter, Limit, Limiter
from ..lifecycle.connect import (
    SharedStore,
    is_opened,
    open_async_store,
    open_store,
    share_store,
    store_name,
)
from ..observer import UNOBSERVED, AsyncTimedStore, SourceKind, Tally, TimedStore, tally_of
from ..ring.clock import SYSTEM
from ..runtime.options import Options
from ..runtime.worker import hook_process
from ..support.fork import register_after_fork

L = TypeVar("L", Limiter, AsyncLimiter)
_ANY_LIMIT = (Limit("1/second"),)
"""For what concerns the store, and no limit."""


class _Pool(Generic[L]):
    """Base class of both pools. Makes a limiter when one with its limits is asked for, and keeps
    the `capacity` that were asked for last. Connects to nothing.

    One that goes is not closed: who has it may go on, and the worker keeps it until what it has
    counted is sent. As long as it is there, it is returned to who asks for its limits.
    """

    capacity = 1000
    _limiter_type: Callable[..., L]
    _open_store: Callable[..., Any]
    _timed_store: Callable[[Any, Tally], Any]
    tally: Tally | None = None
    """What adds up for an observer, where `observe` was called; the limiters have none."""
    _flushed_with: L

    def __init__(self, store: Any, options: Options) -> None:
        if options.time is SYSTEM:
            hook_process()  # the first limiter may be made after gevent has patched
        self.store = self._open_store(store, options)
        self._owns_store = is_opened(self.store, store)
        self.observed_store: Any = self.store
        """The store, which `observe` has note each exchange."""
        self._store_name = store_name(store)
        self._shared_store = share_store(self.store, self._store_name, owned=self._owns_store)
        self._options = options
        self._recent: OrderedDict[Any, L] = OrderedDict()
        self._alive: WeakValueDictionary[Any, L] = WeakValueDictionary()
        register_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Have a lock that no thread of the parent holds."""
        self._lock = threading.RLock()

    def observe(self, options: Options, source_kind: SourceKind) -> Tally | None:
        """Make what adds up what is decided here, if `options` have an observer, before there is a
        limiter. It is flushed with one that nobody asks. If the limiters have no observer of their
        own, it notes the exchanges of all, and whether the store is away.
        """
        tally = self.tally = tally_of(options, source_kind, self.store.clock.monotonic)
        if tally is None:
            return None
        if self.store.decided_by != "local":
            timed = self.observed_store = self._timed_store(self.store, tally)
            timed.shown_name = self._store_name
        asked = _ANY_LIMIT, "an observer"
        limiter = self._flushed_with = self._alive[asked] = self._make(_ANY_LIMIT, "raise", None)
        limiter.decider.policy.flush_source.add_first(tally)
        if self._options.observer is None:
            limiter.decider.policy.add_listener(tally.changed)
            is_shared = isinstance(self._shared_store, SharedStore)
            self._shared_store = share_store(self.observed_store, self._store_name, owned=is_shared)
        return tally

    def get(
        self, limits: tuple[Limit, ...], on_store_error: Any = "raise", shadow: bool = False
    ) -> L:
        """Return the limiter for these limits."""
        asked = limits, on_store_error, shadow
        with self._lock:
            limiter = self._alive.get(asked)
            if limiter is None:
                limiter = self._make(limits, on_store_error, self._options.observer, shadow)
                self._alive[asked] = limiter
            self._recent[asked] = limiter
            self._recent.move_to_end(asked)
            if len(self._recent) > self.capacity:
                self._recent.popitem(last=False)
        return limiter

    def _make(
        self, limits: tuple[Limit, ...], on_store_error: Any, observer: Any, shadow: bool = False
    ) -> L:
        options = self._options
        has_share = on_store_error == "local" or options.consistency == "eventual"
        return self._limiter_type(
            self._shared_store, limits, prefix=options.prefix, timeout=options.timeout,
            clock=options.clock, consistency=options.consistency,
            share=options.share if has_share else None, on_store_error=on_store_error,
            max_local_keys=options.max_local_keys, time=options.time,
            observer=observer or UNOBSERVED, metric_name=options.metric_name,
            key_label=options.key_label, shadow=shadow,
        )  # fmt: skip

    def all(self) -> list[L]:
        """Return the limiters that are there."""
        with self._lock:
            return list(self._alive.values())


class AsyncLimiterPool(_Pool[AsyncLimiter]):
    """`LimiterPool` for tasks."""

    _limiter_type = AsyncLimiter
    _timed_store = AsyncTimedStore
    _open_store = staticmethod(open_async_store)

    async def aclose(self) -> None:
        for limiter in self.all():
            await limiter.aclose()
        if self._owns_store:
            await self.store.aclose()


class LimiterPool(_Pool[Limiter]):
    """The limiters of an application with threads. Survives `fork`."""

    _limiter_type = Limiter
    _timed_store = TimedStore
    _open_store = staticmethod(open_store)

    def after_fork(self) -> None:
        super().after_fork()
        self.under_way: set[object] = set()
        """One object for each thread that may be calling these."""

    def close(self) -> None:
        """Send what was counted, give back what is held, and close the connections, once the calls
        of other threads have their answers. A store object of the caller stays open.
        """
        clock = self.store.clock
        ends_at = clock.monotonic() + self._options.timeout
        while self.under_way and clock.monotonic() < ends_at:
            clock.sleep(0.005)
        for limiter in self.all():
            limiter.close()
        if self._owns_store:
            self.store.close()
