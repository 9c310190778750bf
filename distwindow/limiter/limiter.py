"""`Limiter`, for threads, and `AsyncLimiter`, for tasks: the same methods, awaited where there is
I/O.  What the methods do is in `runtime/` and the folder of each feature; how calls are decided
in this process is in `local/`, and in the store in `stores/`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..away.outages import Health
from ..away.policy import OnStoreError, check_options
from ..breaker.entry import (
    AsyncBreakerEntry,
    AsyncEntryBreaker,
    BreakerEntry,
    EntryBreaker,
    call_of,
)
from ..errors import ConfigurationError
from ..lifecycle.connect import make_views, store_name
from ..lifecycle.lifecycle import AsyncLifecycle, BlockingLifecycle, Flushed, ignore_wake
from ..minute import operations as minute_views
from ..minute.operations import EntryViews
from ..minute.view import MinuteStats
from ..observer import Observer
from ..reserve.reservation import (
    AsyncReservations,
    OnError,
    Reservation,
    Reservations,
    Settlement,
    UnawaitedReservation,
)
from ..ring.clock import SYSTEM, Clock
from ..ring.decision import Decision
from ..ring.key import AnyKey, line_name
from ..ring.limit import Limit, LimitSpec, reads_as_limit
from ..ring.stats import Stats
from ..rules.shadow import AsyncShadowStore, ShadowStore, is_in_shadow, shadow_prefix
from ..runtime.flush_job import FlushJob
from ..runtime.options import ClockChoice, Consistency, Options, check_origin
from ..runtime.worker import hook_process
from ..shaping.operations import make_command_cache
from ..support.async_use import Unawaited, UnawaitedCoroutine
from ..support.failure_types import ErrorTypes, FailureTypes, IgnoredErrors
from ..support.first_use import FirstUse
from ..support.locks import PATCH_STATE, check_patched_before_import, check_patched_whole
from .decider import AsyncDecider, Attempt, BaseDecider, Decider, raise_closed
from .decorator import DecoratorKey, F, check_decorator_cost, limit_async_function, limit_function
from .entry import AsyncEntry, Entry, EntrySettings

if TYPE_CHECKING:
    from typing_extensions import Self


class BaseLimiter(Flushed):
    """Base class of `Limiter` and `AsyncLimiter`, which document the arguments."""

    _instead = "limiter.try_acquire(key), or enter limiter.entry(key)"
    _shared = "store, prefix and limits share their windows"
    _decider_type: Callable[..., BaseDecider]
    _decide_locally: Callable[[AnyKey, int], Decision | None]
    _shadow_store: Callable[[Any], Any]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Say what is missing where the limit is all that is given."""
        if len(arguments) == 1 and "limits" not in options and reads_as_limit(arguments[0]):
            raise ConfigurationError(
                f"the URL of the store comes first, and then the limits: "
                f'{cls.__name__}("redis://localhost:6379/0", {arguments[0]!r})'
            )
        return super().__new__(cls)

    def __init__(
        self,
        store: Any,
        limits: LimitSpec,
        *,
        prefix: str = "distwindow",
        consistency: Consistency = "direct",
        on_store_error: OnStoreError = "raise",
        on_unknown: OnStoreError | None = None,
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.1,
        share: float | None = None,
        flush_interval: float = 0.25,
        max_local_keys: int = 100_000,
        max_wait: float = 0.5,
        borrow_share: float = 0.5,
        errors: ErrorTypes = BaseException,
        ignore: IgnoredErrors = (),
        max_origins: int = 100,
        observer: Observer | None = None,
        metric_name: str | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
        shadow: bool = False,
        time: Clock = SYSTEM,
    ) -> None:
        how = is_in_shadow(shadow)
        if how:
            on_store_error, on_unknown, metric_name = "allow", None, metric_name or prefix
            share, prefix = share if consistency == "eventual" else None, shadow_prefix(prefix, how)
        options = Options(
            prefix=prefix, consistency=consistency, on_store_error=on_store_error,
            on_unknown=on_unknown, timeout=timeout, clock=clock, name=name,
            sync_interval=sync_interval, share=share, flush_interval=flush_interval,
            max_local_keys=max_local_keys, max_wait=max_wait, borrow_share=borrow_share,
            errors=errors, ignore=ignore, max_origins=max_origins, observer=observer,
            metric_name=metric_name, key_label=key_label, shadow=how, time=time,
        )  # fmt: skip
        check_options(options)
        self._options = options
        FailureTypes(options.errors, options.ignore)  # raises for what are none
        self._command_cache = make_command_cache(options.prefix, limits, [line_name])
        self._store_name = sys.intern(store_name(store))
        self._timeout = options.timeout
        self._open_store(store, options)
        tally = self._add_tally(options, "limiter")
        if options.shadow and self._store.decided_by != "local":
            self._store = self._shadow_store(self._store)
        store_id = store if isinstance(store, str) else f"{self._store_name} {id(store)}"
        self.decider: BaseDecider = self._decider_type(
            options, self._command_cache, self._store, store_id, self._run, self._execute_step,
            tally,
        )  # fmt: skip
        """What answers the calls; for other parts of this package."""
        self._decide_locally = self.decider.decide_locally
        self._name_store(self._name)
        if self._store.clock is SYSTEM:
            hook_process()
        self.decider.policy.flush_source.wake = self._flush_from_now_on

    @property
    def _name(self) -> str:
        """The limiter and its store, for log lines; without passwords."""
        return f"limiter {self.prefix!r} at {self._store_name}"

    @FirstUse
    def _flush_job(self) -> FlushJob:
        return self._new_flush_job(self.decider.policy.flush_source, self._name)

    def _flush_from_now_on(self) -> None:
        """Have the worker flush what is counted. Called once something is, for the first time."""
        job = self._flush_job
        if self._store.clock is SYSTEM:
            job.wake()

    @FirstUse
    def _settlement(self) -> Settlement:
        return Settlement(self._options, self.decider)

    @FirstUse
    def _views(self) -> EntryViews | None:
        return make_views(self.decider.strategy, self._options, self._store)

    @FirstUse
    def _entry_settings(self) -> EntrySettings:
        decider, options = self.decider, self._options
        return EntrySettings(
            decider.admit, decider.record, self._views, decider.clock.monotonic, self._name,
            FailureTypes(options.errors, options.ignore),
        )  # fmt: skip

    def _refuse_calls(self) -> None:
        """Have each call raise from here on, waiting ones too, and on a store that stays open."""
        self._decide_locally = raise_closed
        self.decider.close()

    def health(self) -> Health:
        """Return what is known of the store: whether it is away, and since when."""
        return self.decider.policy.health()

    def on_health_change(self, listener: Callable[[Health], object]) -> None:
        """Call `listener(health)` when a server of the store is found to be away, and when it is
        back. It is called in the thread of a call or of a probe, or in the event loop, so it should
        return soon; what it raises is logged.
        """
        self.decider.policy.add_listener(listener)

    def __repr__(self) -> str:
        limits = "; ".join(map(str, self.limits))
        return (
            f"{type(self).__name__}({self._store_name!r}, {limits!r}, prefix={self.prefix!r}, "
            f"consistency={self._options.consistency!r})"
        )

    @property
    def unknown_total(self) -> int:
        """The number of calls with an unknown outcome: each may have been charged, once."""
        total: int = self._store.unknown_total
        return total

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits, shortest interval first."""
        return self._command_cache.limits

    @property
    def prefix(self) -> str:
        """The beginning of the names of all rings."""
        return self._command_cache.prefix


# And not that of `__new__`.
_of_init = inspect.signature(BaseLimiter.__init__)
BaseLimiter.__signature__ = _of_init.replace(  # type: ignore[attr-defined]
    parameters=[*_of_init.parameters.values()][1:], return_annotation=inspect.Signature.empty
)


class AsyncLimiter(BaseLimiter, AsyncLifecycle):
    """`Limiter` for tasks: the same names and signatures, awaited where there is I/O. Safe to share
    between tasks, and between event loops.

    Concurrent calls share one connection, and those of one key share script calls.
    """

    decider: AsyncDecider
    _decider_type = AsyncDecider
    _shadow_store = AsyncShadowStore

    @FirstUse
    def _reservations(self) -> AsyncReservations:
        return AsyncReservations(self._settlement, self.decider)

    def try_acquire(
        self, key: AnyKey, cost: int = 1, priority: bool = False, enqueue: bool = False
    ) -> Unawaited[Decision]:
        """See `Limiter.try_acquire`; it has no truth value before it is awaited."""
        if priority or enqueue:
            return UnawaitedCoroutine(self.decider.try_special(key, cost, priority, enqueue))
        return Attempt(self.decider, key, cost)

    def try_acquire_all(
        self, items: Iterable[Sequence[Any]], enqueue: bool = False
    ) -> Unawaited[Decision]:
        """See `Limiter.try_acquire_all`; it has no truth value before it is awaited."""
        return UnawaitedCoroutine(self._try_acquire_all(items, enqueue))

    async def _try_acquire_all(self, items: Iterable[Sequence[Any]], enqueue: bool) -> Decision:
        calls = self._command_cache.charges_of_items(items)  # checked when it is awaited
        decision: Decision = await self.decider.acquire_all(calls, enqueue)
        return decision

    async def acquire(
        self, key: AnyKey, cost: int = 1, timeout: float | None = None, priority: bool = False
    ) -> Decision:
        """See `Limiter.acquire`."""
        return await self.decider.acquire(key, cost, timeout, priority)

    def try_reserve(
        self, key: AnyKey, estimate: int, *, clamp: bool = False, on_error: OnError = "keep"
    ) -> UnawaitedReservation:
        """See `Limiter.try_reserve`; no truth value before `await` or `async with`."""
        return UnawaitedReservation(self._reservations.try_reserve(key, estimate, clamp, on_error))

    def reserve(
        self,
        key: AnyKey,
        estimate: int,
        timeout: float | None = None,
        *,
        clamp: bool = False,
        on_error: OnError = "keep",
    ) -> UnawaitedReservation:
        """See `Limiter.reserve`; `async with` awaits it."""
        return UnawaitedReservation(
            self._reservations.reserve(key, estimate, timeout, clamp, on_error)
        )

    def reserve_all(
        self, items: Iterable[Sequence[Any]], *, clamp: bool = False, on_error: OnError = "keep"
    ) -> UnawaitedReservation:
        """See `Limiter.reserve_all`; no truth value before `await` or `async with`."""
        return UnawaitedReservation(self._reservations.reserve_all(items, clamp, on_error))

    def peek(self, key: AnyKey) -> Unawaited[Decision]:
        """See `Limiter.peek`; it has no truth value before it is awaited."""
        return UnawaitedCoroutine(self.decider.peek(key, 1))

    async def stats(self, key: AnyKey) -> Stats:
        """See `Limiter.stats`."""
        return await self._run(self.decider.stats(key))

    async def minute(self, key: AnyKey) -> MinuteStats:
        """See `Limiter.minute`."""
        return await self._run(
            minute_views.minute(self._views, self.prefix, key, self._store.clock)
        )

    async def origins(self, key: AnyKey) -> dict[str, MinuteStats]:
        """See `Limiter.origins`."""
        return await self._run(
            minute_views.origins(self._views, self.prefix, key, self._store.clock)
        )

    async def refund(self, decision: Decision) -> int:
        """See `Limiter.refund`."""
        return await self._run(self.decider.refund(decision))

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        await self._run(self.decider.reset(key, self._settlement.reset))

    def limit(
        self,
        text: AnyKey | None = None,
        *,
        key: AnyKey | Callable[..., AnyKey] | None = None,
        cost: int | Callable[..., int] = 1,
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions, and async generators, at the first step."""
        source = DecoratorKey("limiter.limit", self.prefix, text, key)
        check_decorator_cost(cost, self.limits)
        return functools.partial(limit_async_function, self, source, cost)

    def entry(
        self,
        key: AnyKey,
        cost: int = 1,
        *,
        origin: str | None = None,
        errors: ErrorTypes | None = None,
        ignore: IgnoredErrors | None = None,
        any_thread: bool = False,
        breaker: AsyncEntryBreaker | None = None,
    ) -> AsyncEntry:
        """See `Limiter.entry`; `async with`."""
        origin = check_origin(origin)
        if origin:
            minute_views.require_views(self._views)
        settings = self._entry_settings
        counted = settings.failure_types.changed(errors, ignore)
        if breaker is None:
            return AsyncEntry(settings, key, cost, counted, origin, any_thread)
        call = call_of(breaker, key, in_tasks=True)
        return AsyncBreakerEntry(call, settings, key, cost, counted, origin, any_thread)

    async def _end_calls(self) -> None:
        self._refuse_calls()
        if self._owns_store:
            self.decider.stop_counting()
            self._settlement.close()
            if self.decider.strategy.uses_leases:
                # Leases that are being fetched arrive first, so that they are given back, too.
                await self._store.drain()
            self.decider.policy.flush_source.wake = ignore_wake


__all__ = ["AsyncLimiter", "Limiter"]


class Limiter(BaseLimiter, BlockingLifecycle):
    """Limits that hold for the whole fleet. Safe to share between threads; survives `fork`.

    `store` is a URL (`redis://`, `rediss://`, `unix://`, `redis+cluster://`, `redis+sentinel://`,
    the same with `valkey`, `memory://`) or a redis-py client that stays the caller's. `limits` is
    one limit or several; all must admit, or none is charged.

        limiter = Limiter("redis://localhost:6379/0", "100/second")
        if limiter.try_acquire("user:42"):
            ...

    `consistency` is where calls are decided. `direct`: in the store, each call; a refusal is cached
    until it can change. `leased`: in this process, with permits that were bought from the store in
    blocks; never more than the limit is admitted. `eventual`: in this process, by what all
    processes had passed at the last sync, every `sync_interval` seconds; a call never waits for the
    store, and the fleet may pass more than the limit between two syncs. `share` (0 to 1) is then
    the part of each limit that one process may admit. docs/consistency.md has bounds and costs.

    What is counted in this process (permits blocked by cached refusals, and the ends of entries) is
    flushed to the store every `flush_interval` seconds by one worker for all limiters, and when the
    process ends (by SIGTERM only where something handles it: `exit_on_sigterm`). At most
    `max_local_keys` keys are kept in this process, the most recently used.

    `on_store_error` is what a call gets that the store has not decided: `raise`, `allow`, `deny`,
    `local` (a window of this process decides, with its `share` of the limit; without `share`, the
    limit divided by the processes that share the prefix), or a function of (key, cost, limits,
    error) that returns whether to allow it. `on_unknown` is the same for calls whose outcome is
    unknown; None: as `on_store_error`. `health()` says what is known of the store.

    `max_wait` (seconds) and `borrow_share` (0 to 1) are for calls with `priority=True`: how long
    such a call may be told to wait for the permits that it borrows, and the part of each limit that
    a window may hold in borrowed permits, so that the others find the rest. docs/howto/borrowing.md
    `errors` and `ignore` are types of exceptions, or tuples of them: an entry whose block ends with
    an exception counts as an error if it is one of `errors` and none of `ignore`, and otherwise as
    a success. By default every exception is an error, `CancelledError` as well: a timeout of
    asyncio reaches the block as one. An entry may replace both. Of one key, at most `max_origins`
    origins of entries have a minute view (1 to 1000).

    `timeout` (seconds) is the deadline of one whole call: connect, TLS, write and read together.
    `clock="client"` is for servers that refuse TIME in scripts; never mix clocks on one key. `name`
    is the name of the connections in the server's list of clients. Raises `ConfigurationError` for
    arguments that can never work; nothing is connected to before a call.

    Every call may raise `StoreTimeout` and `StoreUnavailable`, whose `.charged` is what is known
    about the call, and `ConfigurationError` where the server can never serve it.
    """

    decider: Decider
    _decider_type = Decider
    _shadow_store = ShadowStore

    def _open_store(self, store: Any, options: Options) -> None:
        check_patched_before_import()
        check_patched_whole()
        PATCH_STATE.check()
        super()._open_store(store, options)

    @FirstUse
    def _reservations(self) -> Reservations:
        return Reservations(self._settlement, self.decider)

    def try_acquire(
        self, key: AnyKey, cost: int = 1, priority: bool = False, enqueue: bool = False
    ) -> Decision:
        """Count `cost` permits on `key` if all limits allow it. Never raises because of a limit.
        Under a paced limit the caller waits for `.wait` seconds before it proceeds.

        With `priority`, a call for which there is no room borrows permits of a coming bucket that
        begins within `max_wait`. The decision is then allowed, its `reason` is "borrowed", and the
        caller has to hold back for `wait` seconds (`acquire` does that).

        With `enqueue`, a refused call takes a place in the fleet's virtual line, and `retry_after`
        is its own turn: the seconds after which it should ask again, so that not all who were
        refused come back together. It is a hint: the line never changes what is admitted.

        Raises `ValueError` for an empty key, and for a cost that is not a whole number of at least
        1 or exceeds the smallest limit, before anything is sent; `ConfigurationError` for
        `priority` or `enqueue` with `consistency="eventual"` or a limit that is paced or warms up,
        and for both together.
        """
        if priority or enqueue:
            special: Decision = self.decider.try_special(key, cost, priority, enqueue)
            return special
        decision = self._decide_locally(key, cost)
        if decision is not None:
            return decision
        return self.decider.ask(key, cost)

    def try_acquire_all(self, items: Iterable[Sequence[Any]], enqueue: bool = False) -> Decision:
        """Acquire over several keys, each with its own limits: `[(key, limits, cost), ...]`; all
        are charged, or none.

        One round trip; the decision names the key and the limit that refused. Raises
        `ConfigurationError` on a cluster where the keys have no common tag (`Key(resource,
        tag=...)`).

        With `enqueue`, a refused call is told its turn, as by `try_acquire`: in the line of the
        limit that refused. Raises `ConfigurationError` for limits that are paced or warm up then.
        """
        calls = self._command_cache.charges_of_items(items)
        decision: Decision = self.decider.acquire_all(calls, enqueue)
        return decision

    def acquire(
        self, key: AnyKey, cost: int = 1, timeout: float | None = None, priority: bool = False
    ) -> Decision:
        """`try_acquire` that waits until it is admitted: in a queue behind the earlier waiters of
        this limiter, and then asleep until its turn in the line of all processes that wait.

        With `priority`, it waits in a queue before all callers without, borrows if it can, and then
        sleeps until the bucket begins that it has borrowed from.
        A paced limit has it wait until its promised moment, too.

        Raises `RateLimitExceeded` as soon as it is certain that `timeout` (seconds; None: no
        timeout) ends before there is room; with a later turn it asks once more at the end.
        """
        return self.decider.acquire(key, cost, timeout, priority)

    def try_reserve(
        self, key: AnyKey, estimate: int, *, clamp: bool = False, on_error: OnError = "keep"
    ) -> Reservation:
        """Reserve `estimate` permits for a call whose cost is known afterwards, if all limits admit
        them. Never raises because of a limit: the reservation is false when refused, and nothing is
        charged then. `reservation.commit(actual)` says what was used.

        With `clamp`, an estimate above the smallest limit is cut to it; without, it is a
        `ValueError`, because it could never be admitted. `on_error="release"` gives the estimate
        back when the reservation's block raises; by default it stays charged.

        Raises `ConfigurationError` for limits that are paced or warm up.
        """
        return self._reservations.try_reserve(key, estimate, clamp, on_error)

    def reserve(
        self,
        key: AnyKey,
        estimate: int,
        timeout: float | None = None,
        *,
        clamp: bool = False,
        on_error: OnError = "keep",
    ) -> Reservation:
        """`try_reserve` that waits until it is admitted, as `acquire` does. Raises
        `RateLimitExceeded` once it is certain that `timeout` (seconds; None: none) ends first.

            with limiter.reserve("tokens:acme", 1200, timeout=5.0) as reservation:
                reservation.commit(call_model())
        """
        return self._reservations.reserve(key, estimate, timeout, clamp, on_error)

    def reserve_all(
        self, items: Iterable[Sequence[Any]], *, clamp: bool = False, on_error: OnError = "keep"
    ) -> Reservation:
        """`try_reserve` over several keys, each with its own limits, as `try_acquire_all` takes
        them: `[(key, limits, estimate), ...]`; all are charged, or none. `commit` takes a number
        for each, in order.
        """
        return self._reservations.reserve_all(items, clamp, on_error)

    def peek(self, key: AnyKey) -> Decision:
        """Return the decision that a cost of 1 would get now. Counts nothing, so `remaining` is the
        number before that call.
        """
        decision: Decision = self.decider.peek(key, 1)
        return decision

    def stats(self, key: AnyKey) -> Stats:
        """Return what is recorded in the windows of `key`."""
        return self._run(self.decider.stats(key))

    def minute(self, key: AnyKey) -> MinuteStats:
        """Return what entries of `key` did in the last minute, by second, without plain calls."""
        return self._run(minute_views.minute(self._views, self.prefix, key, self._store.clock))

    def origins(self, key: AnyKey) -> dict[str, MinuteStats]:
        """Return what the entries of each origin of `key` did in the last minute: first those with
        the most permits passed and blocked. Beyond `max_origins`, origins are counted together,
        under `"(other)"`, which comes last.
        """
        return self._run(minute_views.origins(self._views, self.prefix, key, self._store.clock))

    def refund(self, decision: Decision) -> int:
        """Give an admitted cost back, out of the bucket in which it was counted. Return how many
        permits were still there: with several limits, the most that any of them still held.

        Not idempotent: two refunds of one decision give back twice. Raises `ValueError` for a
        decision that charged nothing.
        """
        return self._run(self.decider.refund(decision))

    def reset(self, key: AnyKey) -> None:
        """Delete the windows of `key`, so that all its permits are free again."""
        self._run(self.decider.reset(key, self._settlement.reset))

    def limit(
        self,
        text: AnyKey | None = None,
        *,
        key: AnyKey | Callable[..., AnyKey] | None = None,
        cost: int | Callable[..., int] = 1,
    ) -> Callable[[F], F]:
        """Return a decorator: each call of the function acquires first, and raises
        `RateLimitExceeded` when it is refused. The decorated function keeps its signature.

        `text` is the key, in which `{name}` stands for the argument `name` of the function, as in
        `str.format`; a brace that is meant literally is written twice. `key` is a function of the
        function's own arguments that returns the key, and `cost` may be one that returns the cost.
        Raises `TypeError` for a function in the place of `text`, and `ConfigurationError` for what
        can never work, when it is applied.
        """
        source = DecoratorKey("limiter.limit", self.prefix, text, key)
        check_decorator_cost(cost, self.limits)
        return functools.partial(limit_function, self, source, cost)

    def entry(
        self,
        key: AnyKey,
        cost: int = 1,
        *,
        origin: str | None = None,
        errors: ErrorTypes | None = None,
        ignore: IgnoredErrors | None = None,
        any_thread: bool = False,
        breaker: EntryBreaker | None = None,
    ) -> Entry:
        """Return a context manager that acquires at the beginning of its block (or raises
        `RateLimitExceeded`), and at the end records success or error and the response time.

        `origin` says who calls: the entry counts in its minute view, too (`origins`). `errors` and
        `ignore` replace those of the limiter. The entry is left in the thread that has entered it,
        or in any with `any_thread`; else `RuntimeError` is raised.

        `breaker` is a `CircuitBreaker` or an `AdaptiveBreaker`, for the same key, or what
        `breaker.call(key)` returns, for another one. It is asked before the limit (`BreakerOpen`),
        and counts how the block ends by its own `errors` and `ignore`.

        Raises `TypeError` for an origin that is no str, `ValueError` for an empty one or one of
        more than 128 characters, and `ConfigurationError` for `errors` and `ignore` that are no
        types of exceptions, and for a `breaker` that is none for threads.
        """
        origin = check_origin(origin)
        if origin:
            minute_views.require_views(self._views)
        settings = self._entry_settings
        counted = settings.failure_types.changed(errors, ignore)
        if breaker is None:
            return Entry(settings, key, cost, counted, origin, any_thread)
        call = call_of(breaker, key)
        return BreakerEntry(call, settings, key, cost, counted, origin, any_thread)

    def _end_calls(self) -> None:
        self._refuse_calls()
        if self._owns_store:
            self.decider.stop_counting()
            self._settlement.close()
            ends = self._store.clock.monotonic() + self._timeout
            # Leases that are being fetched arrive first, so that they are given back, too.
            for fetch in self.decider.strategy.lease_fetch_waits():
                fetch.completion.wait(ends - self._store.clock.monotonic())
            # The thread that closes flushes from here on.
            self.decider.policy.flush_source.wake = ignore_wake
