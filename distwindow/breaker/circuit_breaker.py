"""`CircuitBreaker`, for threads, and `AsyncCircuitBreaker`, for tasks.

What they do with the store is in `cache.py`; what this process decides is in `states.py`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

from ..errors import ConfigurationError, closed_failure, short_repr
from ..lifecycle.connect import store_name
from ..lifecycle.lifecycle import (
    AsyncLifecycle,
    BlockingLifecycle,
    Flushed,
    ignore_wake,
    raise_failure,
)
from ..limiter.decorator import DecoratorKey
from ..observer import Observer
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.store import AsyncStore, Store
from ..runtime.options import ClockChoice, Options
from ..sentinel.circuit_breakers import BreakerState
from ..support.callables import (
    RAISED_BY_CALLBACKS,
    check_call_ends_with_work,
    check_decorated,
    check_handler,
    check_signatures,
    check_takes,
    describe_function,
    function_name,
    is_async_callable,
)
from ..support.failure_types import ErrorTypes, FailureTypes, IgnoredErrors
from ..support.fork import register_after_fork
from ..support.locks import was_raised_by_signal_handler
from .cache import BreakerCache, CachedBreaker
from .call import AsyncBreakerCall, BreakerCall
from .record import BreakerChange, BreakerOpen
from .rules import RULES, BreakerRule
from .states import BreakerAdmission, BreakerKeyState, BreakerStates, OnBreakerStoreError

S = TypeVar("S", bound=CachedBreaker)
A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])


class BaseBreaker(Flushed, Generic[S, A]):
    """Base class of all breakers, which document the arguments."""

    _instead = "@breaker.protect(key), or enter breaker.call(key)"
    _shared = "store, prefix and rule share their breakers"
    _states: BreakerCache[S, A]
    _rule_name: str
    """The kind of rule by which calls are refused."""
    _run: Any

    def __init__(self, store: Any, options: Options) -> None:
        if options.on_store_error not in get_args(OnBreakerStoreError):
            raise ConfigurationError(
                f"on_store_error={options.on_store_error!r} is neither 'allow' nor 'deny'"
            )
        self._options = options
        self._prefix = options.prefix
        self._timeout = float(options.timeout)
        self._store_name = store_name(store)
        self._name = f"breaker {options.prefix!r} at {self._store_name}"
        self._failure_types = FailureTypes(options.errors, options.ignore)
        self._open_store(store, options)
        self._tally = tally = self._add_tally(options, "breaker")
        self._states = self._open_states(self._store)
        self._name_store(self._name)
        in_background = tally is not None or not self._states.in_process
        self._flush_job = self._new_flush_job(
            self._states, self._name, tally, in_background=in_background
        )

    def _open_states(self, store: Store | AsyncStore) -> BreakerCache[S, A]:
        """Return what this breaker knows and counts in this process."""
        raise NotImplementedError  # each kind of breaker has its own

    def count_refused(self, refused: BreakerOpen) -> None:
        """Count a call that was refused; for its blocks."""
        if self._tally is not None:
            rule = self._rule_name
            self._tally.counted(refused.key, rule, "refused", "open", "local", 1, 0)

    def _ask(self, key: AnyKey) -> Any:
        """Have the store decide a call of `key`; awaited in tasks."""
        return self._run(self._states.admit(self._states.get_or_create(key)))

    def _send(self, admission: A) -> Any:
        """Send how a call has ended; awaited in tasks."""
        return self._run(self._states.send_end(admission))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store_name!r}, {self._settings_text()})"

    def _settings_text(self) -> str:
        """Return the settings for `repr`."""
        raise NotImplementedError  # each kind of breaker has settings of its own

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
        A breaker for tasks takes coroutine functions; its `fallback` may be one, too.
        """
        source = DecoratorKey("breaker.protect", self._prefix, text, key)
        check_handler("protect: fallback", fallback, may_be_async=isinstance(self, AsyncBreaker))
        return functools.partial(protect_function, self, source, fallback)

    @property
    def prefix(self) -> str:
        """The beginning of the names of all breakers in the store."""
        return self._prefix


def check_is_no_function(key: Any) -> None:
    """Raise `TypeError` for a function in the place of the key of `call`: it would never run."""
    if callable(key):
        name = function_name(key)
        raise TypeError(
            f"call takes the key of a service, and never runs {name}: write "
            f'`with breaker.call("key"): {name}()`, or @breaker.protect("key") above {name}'
        )


LOG = logging.getLogger("distwindow")

Listener = Callable[[BreakerChange], object]


class Listeners:
    """Calls each listener with each change once, in order, in the thread that learned of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.added: list[Listener] = []
        self._waiting: deque[BreakerChange] = deque()
        self.after_fork()

    def after_fork(self) -> None:
        """Make a new lock, as another thread may have held it at the fork."""
        self._waiting.clear()
        self._delivering = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Add a function of one `BreakerChange`. Raises `ConfigurationError` for anything else."""
        if not callable(listener):
            raise ConfigurationError(
                f"on_change({short_repr(listener)}): a listener is a function of one BreakerChange"
            )
        if is_async_callable(listener):
            raise ConfigurationError(
                f"on_change({short_repr(listener)}): a listener may not be asynchronous, as "
                "nothing would await it; have a plain function start a task"
            )
        check_takes("listener", listener, 1)
        self.added.append(listener)

    def notify(self, change: BreakerChange) -> None:
        """Call each listener with this change. An error of a listener is logged."""
        self._waiting.append(change)
        # Again after the lock was released: a thread that found it held has only added a change.
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    self._deliver(self._waiting.popleft())
            finally:
                self._delivering.release()

    def _deliver(self, change: BreakerChange) -> None:
        LOG.info(
            "%s: %s is %s, it was %s",
            self._name, short_repr(change.key), change.state, change.previous,
        )  # fmt: skip
        for listener in list(self.added):
            try:
                listener(change)
            except RAISED_BY_CALLBACKS as exc:
                if was_raised_by_signal_handler(exc):
                    raise  # it is for the caller, and no error of the listener
                LOG.exception("a listener of %s has failed on %r: %r", self._name, change, listener)


def protect_function(breaker: Any, key: DecoratorKey, fallback: Any, function: Any) -> Any:
    """Return `function` with its calls inside `breaker.call`. Raises `ConfigurationError` for what
    cannot be protected.
    """
    check_decorated("protect", function)
    check_call_ends_with_work(function, "breaker.call")
    check_signatures(function, {"protect: fallback": fallback})
    is_async = isinstance(breaker, AsyncBreaker)
    if is_async_callable(function) != is_async:
        instead = "AsyncCircuitBreaker.protect, as its call ends before its work begins"
        raise ConfigurationError(
            f"{describe_function(function)}; use "
            f"{'CircuitBreaker.protect' if is_async else instead}"
        )
    key_of = key.bind(function)

    @functools.wraps(function)
    def protected(*args: Any, **kwargs: Any) -> Any:
        call, is_let_through = breaker.call(key_of(args, kwargs)), False
        try:
            with call:
                is_let_through = True
                return function(*args, **kwargs)
        except BreakerOpen:
            # The function itself may raise one, which leads to no fallback.
            if fallback is None or is_let_through:
                raise
        return fallback(*args, **kwargs)

    @functools.wraps(function)
    async def protected_async(*args: Any, **kwargs: Any) -> Any:
        call, is_let_through = breaker.call(key_of(args, kwargs)), False
        try:
            async with call:
                is_let_through = True
                return await function(*args, **kwargs)
        except BreakerOpen:
            if fallback is None or is_let_through:
                raise
        value = fallback(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return protected_async if is_async else protected


class AsyncBreaker(BaseBreaker[S, A], AsyncLifecycle):
    """A breaker for tasks."""

    def call(self, key: AnyKey) -> AsyncBreakerCall[A]:
        """See `CircuitBreaker.call`; `async with`."""
        if key.__class__ is not str:
            check_is_no_function(key)
        return AsyncBreakerCall(self, key)

    async def _refreshed(self, key: AnyKey) -> S:
        if self._states.is_closed:
            raise closed_failure("circuit breaker")
        state = self._states.get_or_create(key)
        raise_failure(await self._run(self._states.send_state(state)))
        return state

    async def _end_calls(self) -> None:
        self._states.is_closed = True
        self._flush_job.wake = ignore_wake

    async def admit(self, key: AnyKey) -> A:
        try:
            admission = self._states.decide(key)
            return await self._ask(key) if admission is None else admission
        except BreakerOpen as refused:
            self.count_refused(refused)
            raise

    async def finish(self, admission: A, failed: bool | None) -> None:
        """See `CircuitBreaker.finish`."""
        if self._states.record(admission, failed):
            await self._send(admission)


class BlockingBreaker(BaseBreaker[S, A], BlockingLifecycle):
    """A breaker for threads."""

    def call(self, key: AnyKey) -> BreakerCall[A]:
        """Return a context manager for one call of the service: raises `BreakerOpen` at the
        beginning of its block if it is refused, and counts its end. `fail()` of the object that
        `as` gives counts it as failed though it raises nothing.
        """
        if key.__class__ is not str:
            check_is_no_function(key)
        return BreakerCall(self, key)

    def _refreshed(self, key: AnyKey) -> S:
        """Return what the store knows of `key` now."""
        if self._states.is_closed:
            raise closed_failure("circuit breaker")
        state = self._states.get_or_create(key)
        raise_failure(self._run(self._states.send_state(state)))
        return state

    def _end_calls(self) -> None:
        self._states.is_closed = True
        self._flush_job.wake = ignore_wake  # the thread that closes flushes from here on

    def admit(self, key: AnyKey) -> A:
        """Begin a call without a block, for other parts of this package. Raises `BreakerOpen`."""
        try:
            admission = self._states.decide(key)
            return self._ask(key) if admission is None else admission
        except BreakerOpen as refused:
            self.count_refused(refused)
            raise

    def finish(self, admission: A, failed: bool | None) -> None:
        """End a call that `admit` has let through; None: its end says nothing."""
        if self._states.record(admission, failed):
            self._send(admission)


_THIS_OBJECT: Any = object()
"""In place of a key: `close` without one."""


class WithRule(BaseBreaker[BreakerKeyState, BreakerAdmission]):
    """Base class of the breakers with a rule."""

    def __init__(
        self,
        store: Any,
        rule: BreakerRule,
        *,
        prefix: str = "distwindow",
        errors: ErrorTypes = Exception,
        ignore: IgnoredErrors = (),
        on_store_error: OnBreakerStoreError = "allow",
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.25,
        flush_interval: float = 0.25,
        max_local_keys: int = 10_000,
        observer: Observer | None = None,
        metric_name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        if not isinstance(rule, BreakerRule) or type(rule) is BreakerRule:
            raise ConfigurationError(
                f"{short_repr(rule)} is no rule of a circuit breaker; give one of "
                f"{', '.join(each.__name__ for each in RULES)}"
            )
        self._rule, self._rule_name = rule, rule.kind
        options = Options(
            prefix=prefix, errors=errors, ignore=ignore, on_store_error=on_store_error,
            timeout=timeout, clock=clock, name=name, sync_interval=sync_interval,
            flush_interval=flush_interval, max_local_keys=max_local_keys, observer=observer,
            metric_name=metric_name, time=time,
        )  # fmt: skip
        super().__init__(store, options)

    def _open_states(self, store: Store | AsyncStore) -> BreakerStates:
        """Return the states, whose changes the listeners hear. Raises `ConfigurationError` for an
        `open_for` that ends before all processes have heard of it.
        """
        options = self._options
        flush_s = min(options.flush_interval, options.sync_interval)
        heard_after_s = flush_s + options.sync_interval
        if self._rule.open_for < heard_after_s and store.decided_by != "local":
            raise ConfigurationError(
                f"open_for={self._rule.open_for!r} is shorter than a flush and a sync "
                f"({flush_s:g} + {options.sync_interval:g} s): processes that have not heard of it "
                f"would let calls through while the breaker is half-open; give at least "
                f"{heard_after_s:g}, or a shorter sync_interval"
            )
        self.listeners = register_after_fork(Listeners(self._name))
        """What hears of changes; for other parts of this package."""
        if self._tally is not None:
            self.listeners.add(self._tally.changed)
        states = BreakerStates(
            options, store, self._store_name, self._rule, self.listeners.notify,
            owns_store=self._owns_store,
        )  # fmt: skip
        self._change_by_hand = states.change_by_hand
        return register_after_fork(states)

    def _settings_text(self) -> str:
        return repr(self._rule)

    @property
    def rule(self) -> BreakerRule:
        """The rule."""
        return self._rule

    def on_change(self, listener: Listener) -> None:
        """Call `listener(change)`, with a `BreakerChange`, when this process finds a breaker in
        another state than it found it in before. It is called in the thread of a call or of the
        worker, so it should return soon; what it raises is logged, also `SystemExit`.

        A process looks at a breaker by calling it: then it hears of a state within `sync_interval`
        and a round trip. States that have passed between two looks are not heard, as a probe of
        another process that has just closed it: closed then follows open. One that is idle hears
        nothing, and the first look of a process tells nothing.
        """
        self.listeners.add(listener)


class AsyncCircuitBreaker(WithRule, AsyncBreaker[BreakerKeyState, BreakerAdmission]):
    """`CircuitBreaker` for tasks: the same names and signatures, awaited where there is I/O. Safe
    to share between tasks, and between event loops.
    """

    async def state(self, key: AnyKey) -> BreakerState:
        """See `CircuitBreaker.state`."""
        return (await self._refreshed(key)).state

    async def open(self, key: AnyKey) -> None:
        """See `CircuitBreaker.open`."""
        raise_failure(await self._run(self._change_by_hand(key, "open")))

    async def close(self, key: AnyKey) -> None:
        """Close the breaker of `key` for the whole fleet. See `CircuitBreaker.close`; what closes
        this object is `aclose()`.
        """
        raise_failure(await self._run(self._change_by_hand(key, "close")))


class CircuitBreaker(WithRule, BlockingBreaker[BreakerKeyState, BreakerAdmission]):
    """Circuit breakers that the whole fleet shares, one for each key. Safe to share between
    threads; survives `fork`.

        breaker = CircuitBreaker("redis://localhost:6379/0", ErrorRatio(0.5, open_for=5.0))
        with breaker.call("payments"):
            pay()

    `store` is what a `Limiter` takes: a URL, `memory://`, or a redis-py client that stays the
    caller's. `rule` is one of `distwindow.breaker.rules.RULES`, such as an `ErrorRatio`.

    A call is decided in this process, by the last known state. How calls ended is flushed every
    `flush_interval` seconds, and the states of the breakers in use are refreshed every
    `sync_interval` seconds, both by the background worker: when the fleet's calls reach the
    threshold, every process refuses within the sum of both and one round trip. The number of
    probes is the fleet's.

    `errors` are the exceptions that count as failures; `ignore` are those that say nothing about
    the service. Other exceptions count as successes, but a cancellation or `KeyboardInterrupt`
    says nothing.

    If the store does not answer, the last known state holds. Where that cannot decide (no state is
    known yet, or an open breaker's time has come), `on_store_error="allow"` lets calls through, an
    open breaker's one at a time as a probe of this process; `"deny"` refuses them.

    `observer` is told of changes as `on_change` is, and how many calls were refused, by
    `metric_name` (default: the prefix). `timeout`, `clock`, `name`, `max_local_keys` and `time` are
    those of `Limiter`. Raises `ConfigurationError` for arguments that can never work; nothing is
    connected to before the first call.
    """

    def state(self, key: AnyKey) -> BreakerState:
        """Return the breaker's state in the store: `"closed"`, `"open"` or `"half_open"`. An open
        breaker stays open until a call is let through as a probe. Raises `StoreError` if the store
        does not answer.
        """
        return self._refreshed(key).state

    def open(self, key: AnyKey) -> None:
        """Open the breaker of `key` by hand, for the whole fleet: calls are refused for `open_for`
        seconds from now, then probes decide. Other processes refuse within `sync_interval` and a
        round trip. Raises `StoreError` if the store does not answer; it may be called again.
        """
        raise_failure(self._run(self._change_by_hand(key, "open")))

    def close(self, key: AnyKey = _THIS_OBJECT) -> None:
        """With a key: close its breaker by hand, for the whole fleet. It counts afresh: calls that
        were let through before are not counted, and their probes decide nothing. See `open`.

        Without one: close this object and its connections, as `Limiter.close`.
        """
        if key is _THIS_OBJECT:
            super().close()
        else:
            raise_failure(self._run(self._change_by_hand(key, "close")))
