"""The limits of one application, as all integrations with web frameworks have them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

from ... import ConfigurationError, Decision, Limit, StoreError
from ...away.outages import Health
from ...away.policy import OnStoreError, check_options
from ...errors import DistwindowError, RateLimitExceeded, short_repr
from ...lifecycle.connect import store_name
from ...observer import UNOBSERVED, Observer, observer_of
from ...ring.clock import SYSTEM, Clock
from ...ring.key import AnyKey
from ...ring.limit import LimitSpec
from ...runtime.options import ClockChoice, Consistency, Options
from ...support.async_use import only_async_with, result_of, run_at_once, running_loop
from ..limiter_pool import AsyncLimiterPool, LimiterPool
from ..shared_windows import SharedWindows
from .address import ClientAddress
from .counts import label_of_request
from .fields import Headers, LimitAnswer, Policies, PolicyNames, Unit
from .request_limit import NOT_GIVEN, RateLimited, counted_by

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("distwindow")
T = TypeVar("T")

DefaultLimits: TypeAlias = "LimitSpec | Callable[..., Any] | Mapping[str, Any]"
"""What `RateLimits` takes as `default_limits`."""
_START_S = 3.0
"""Seconds for which a start that needs the store asks until it answers: to connect for the first
time may take longer than a call may wait."""
_START_PAUSE_S = 0.1
_ANY_LIMIT = (Limit("1/second"),)
"""For what concerns the store, and no limit."""
R = TypeVar("R")


class MakesLimits(Generic[R]):
    """Has `limit`, which returns a `limit_type`: what it makes limits is its first argument."""

    limit_type: Callable[..., R]
    """What the integration has for one limit."""

    def limit(
        self,
        limits: LimitSpec | Callable[..., Any],
        *,
        name: str | None = None,
        key: Callable[..., Any] | None = None,
        cost: int | Callable[..., Any] = 1,
        exempt: Callable[..., Any] | None = None,
        methods: Collection[str] | None = None,
        on_store_error: OnStoreError | None = None,
        count_when: Callable[..., Any] | None = None,
        cost_after: Callable[..., Any] | None = None,
        priority: bool = False,
        unit: Unit = "requests",
        override_defaults: bool = True,
        shadow: bool = False,
    ) -> R:
        """Return one limit, for the place where the framework has such things.

        `limits` is one limit or several, of which all must admit, or a function of the request
        that returns them, or None for no limit. `name` is what header fields call it, and the
        beginning of its keys: limits with one name are one limit, and have to be equal. Without it,
        each limit of each route holds by itself. `key` is a function of the request that returns a
        `str`, `bytes` or `Key`, or None for the address of the client, which is the default.
        `cost` is a whole number, or a function of the request. `exempt` is a function of the
        request: where it returns true, nothing else is asked. `methods` are those that are limited,
        such as ["POST", "PUT"]; HEAD counts as GET. `on_store_error` replaces that of the object.
        `count_when` is a function of the response: the cost is charged before, and given back after
        a response for which it returns false. `cost_after` is a function of the request and the
        response that returns the real cost: `cost`, or the limit if that is less, is reserved
        before. `priority` is that of `Limiter.try_acquire`. `unit` is what the limit counts:
        "requests" or "content-bytes". `override_defaults` says whether it takes the place of the
        `default_limits` at its route, for its methods. With `shadow` it is decided and counted,
        under a prefix of its own; it refuses nothing, is in no header field, and whatever it raises
        is logged. Raises `ConfigurationError` for what can never work.
        """
        return self.limit_type(
            self, limits, name=name, key=key, cost=cost, exempt=exempt, methods=methods,
            on_store_error=on_store_error, count_when=count_when, cost_after=cost_after,
            priority=priority, unit=unit, override_defaults=override_defaults, shadow=shadow,
        )  # fmt: skip


class BaseRateLimits(MakesLimits[R]):
    """The limits of one application, on one connection: base class of `AsyncRateLimits` and
    `BlockingRateLimits`, of which an integration has a subclass.

    `on_store_error` is what a request gets that the store has not decided, and a limit may name
    its own: `"allow"` (it is served, without header fields), `"deny"` (503), `"raise"` (the
    `StoreError` goes to the framework), `"local"` (the share of this process decides). A
    `ConfigurationError`, such as a wrong password, is always raised: a mistake is no outage.
    `trusted_proxies` are the addresses and networks of proxies whose `X-Forwarded-For` is believed
    (`ClientAddress`). `headers` says which header fields responses get: `"ietf"`,
    `"x-ratelimit"`, `"both"`, `"none"`. Without `enabled` nothing is asked, and no field is
    written. `store`, `prefix`, `timeout`, `clock`, `consistency`, `share`, `max_local_keys` and
    `name` are as for `Limiter`. `observer` is told what each limit has decided, by its name; a
    request that a later limit has refused counts for that alone. `key_label` is a function of what
    `key` has returned. With `require` the application does not start while the store
    cannot be asked, whatever `on_store_error` says. Without a `prefix`, which is "distwindow"
    then, names such as "GET /search" are those of other applications on the store, too; that is
    logged once. `default_limits` are the limits of each route that has none of its own, in FastAPI
    and Flask: as for `limit`, or a dict of its arguments. Each route has windows of its own.

    After it was closed, the next request opens it again: a test starts an application many times.
    """

    address_type: type[ClientAddress]
    """The integration's subclass of `ClientAddress`."""
    error_type: Callable[[Decision, Sequence[LimitAnswer], str], Exception] = RateLimited
    """What is raised for a refusal; a subclass of `RateLimited`, with its arguments."""
    awaits: ClassVar[bool]
    """True if `key`, `cost`, `exempt` and `limits` may be coroutine functions."""
    sleep: Callable[[float], Any]
    """Sleeps for some seconds by the clock of the store; to be awaited if `awaits`."""
    knows_routes: ClassVar[bool] = False
    """True if there may be `default_limits`."""
    _pool_type: Callable[[Any, Options], Any]

    def __init__(
        self,
        store: Any,
        *,
        on_store_error: OnStoreError = NOT_GIVEN,
        prefix: str | None = None,
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        consistency: Consistency = "direct",
        share: float | None = None,
        max_local_keys: int = 100_000,
        trusted_proxies: Sequence[str] = (),
        headers: Headers = "ietf",
        enabled: bool = True,
        require: bool = False,
        name: str | None = None,
        default_limits: DefaultLimits | None = None,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        if default_limits is not None and not self.knows_routes:
            raise ConfigurationError(
                "default_limits are for the routes of FastAPI and Flask; here, a limit of all "
                'requests is RateLimitMiddleware(app, rate_limits, "100/minute")'
            )
        if headers not in get_args(Headers):
            raise ConfigurationError(
                f'headers={short_repr(headers)} is none of "ietf", "x-ratelimit", "both", "none"'
            )
        for option, given in (("enabled", enabled), ("require", require)):
            if not isinstance(given, bool):  # "false" of an environment would be true
                raise ConfigurationError(f"{option}={short_repr(given)} is neither True nor False")
        if on_store_error is NOT_GIVEN:
            raise ConfigurationError(
                "on_store_error says what requests get while the store does not answer, and has no "
                'default: "allow" (they are served), "deny" (refused), "raise" (StoreError), or '
                '"local" (by the share of this process)'
            )
        self.on_store_error: Any = on_store_error
        self.headers: Headers = headers
        self.enabled, self._require = enabled, require
        self.client_address = self.address_type(trusted_proxies)
        """The address of the client of a request, by `trusted_proxies`: for key functions."""
        self._given_store = store
        self._options = Options(
            prefix="distwindow" if prefix is None else prefix, timeout=timeout, clock=clock,
            consistency=consistency, name=name, max_local_keys=max_local_keys, time=time,
            on_store_error=on_store_error, share=share,
            on_unknown="local",  # a limit may have a share, whatever `on_store_error` is here
        )  # fmt: skip
        check_options(self._options)
        # The limiters have no observer: one is that of several limits of requests.
        self._observed = replace(
            self._options, observer=observer_of(observer) or UNOBSERVED,
            key_label=None if key_label is None else label_of_request(key_label),
        )  # fmt: skip
        self._has_own_names = prefix is not None or store_name(store).lower().startswith("memory")
        self.shared_windows = SharedWindows(_LOG)
        self.policy_names = PolicyNames()
        self.namespace: object = (store_name(store), self._options.prefix)
        """The store and the prefix: limits of one name are one limit in it."""
        self.opened = self._open()  # from one closing to the next
        self.default_limit: R | None = None
        """The limit of each route that has none of its own."""
        if isinstance(default_limits, Mapping):
            self.default_limit = self.limit(**default_limits)
        elif default_limits is not None:
            self.default_limit = self.limit(default_limits)

    @property
    def is_required(self) -> bool:
        """True if the application does not start without its store."""
        return self._require and self.enabled

    def key_function(self, key: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the function for `key`: that of this object for the default."""
        return self.client_address if key is None else key

    def refusal_of(self, exceeded: RateLimitExceeded) -> Any:
        """Return the error of `error_type` for what a limiter has raised in a handler. Its fields
        name the limit, and not the key; those of a call that goes out name none: 503.
        """
        if isinstance(exceeded, RateLimited):
            return exceeded
        decision, limit = exceeded.decision, exceeded.decision.limit
        name = str(limit)
        if exceeded.is_outgoing:  # as where the store is away: no limit of who asks has decided
            decision, name = decision._replace(source="policy"), "outgoing calls"
        policies = Policies(name, (limit,), "requests", self.headers)
        answers = [LimitAnswer(decision, policies)]
        return type(self).error_type(decision, answers, counted_by(decision))

    def health(self) -> Health:
        """Return what is known of the store, without asking it: `Limiter.health`."""
        health: Health = self._any_limiter().health()
        return health

    async def _start(self) -> None:
        """Ask the store until it answers, or else do what `start` says."""
        clock = self._options.time
        began_at = clock.monotonic()
        while True:
            try:
                await result_of(self._any_limiter().stats("start"))
                return
            except DistwindowError as exc:
                if not self.is_required:
                    _LOG.error("limits of requests are not enforced now: %s", exc)
                    return
                is_late = clock.monotonic() - began_at >= _START_S
                if is_late or not isinstance(exc, StoreError):
                    kind = type(exc) if isinstance(exc, StoreError) else ConfigurationError
                    raise kind(
                        f"limits of requests cannot be enforced, and require=True: {exc}"
                    ) from exc
            await result_of(self.sleep(_START_PAUSE_S))

    def _any_limiter(self) -> Any:
        return self.opened.get(_ANY_LIMIT, self.on_store_error)

    def log_shared_names(self, name: str) -> None:
        """Log once with whom a limit of this name is shared, if no prefix was given."""
        if not self._has_own_names:
            self._has_own_names = True
            _LOG.warning(
                "the limit %r is one with the limit of that name of each application that uses %s "
                'without a prefix; give each a prefix of its own: RateLimits(..., prefix="shop"), '
                'or prefix="distwindow" to share them',
                name, store_name(self._given_store),
            )  # fmt: skip

    def __repr__(self) -> str:
        shown = store_name(self._given_store)
        return f"{type(self).__name__}({shown!r}, on_store_error={self.on_store_error!r})"

    def _open(self) -> Any:
        opened = type(self)._pool_type(self._given_store, self._options)
        opened.observe(self._observed, "web")
        return opened


@only_async_with
class AsyncRateLimits(BaseRateLimits[R]):
    """`BaseRateLimits` for tasks. `async with rate_limits:` asks the store once, so that a log line
    says if limits are not enforced, and closes it at its end.
    """

    awaits = True
    _pool_type = AsyncLimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what a limit does with a request, to be awaited."""
        return steps

    async def sleep(self, seconds: float) -> None:
        await self.opened.store.sleep(seconds)

    async def check_store(self) -> None:
        """Ask the store once, whatever `on_store_error` says. Raises `StoreError` if it does not
        answer, and `ConfigurationError` for what will never work, such as a wrong password.
        """
        await self._any_limiter().stats("start")

    async def start(self) -> None:
        """Ask the store at the start of an application. With `require` this raises what
        `check_store` raises, or after 3 s without an answer; otherwise it is logged.
        """
        await self._start()

    async def aclose(self) -> None:
        """Send what was counted, give back what is held, and close the connection. The next
        request opens it again.
        """
        closed, self.opened = self.opened, self._open()
        await closed.aclose()

    async def __aenter__(self) -> Self:
        running_loop()
        for limiter in self.opened.all():
            limiter.decider.policy.announce()
        if self.enabled:
            try:
                await self.start()
            except BaseException:  # nobody else would close it
                await self.aclose()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class BlockingRateLimits(BaseRateLimits[R]):
    """`BaseRateLimits` for threads. Safe to share between threads; survives `fork`."""

    awaits = False
    _pool_type = LimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run what a limit does with a request."""
        under_way, this_call = self.opened.under_way, object()
        under_way.add(this_call)
        try:
            steps.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            under_way.discard(this_call)
        steps.close()
        raise ConfigurationError(
            "a function that is not asynchronous has returned what waits for an event loop, and "
            "there is none here; write `async def`, or return the answer"
        )

    def sleep(self, seconds: float) -> None:
        self.opened.store.clock.sleep(seconds)

    def check_store(self) -> None:
        self._any_limiter().stats("start")

    def start(self) -> None:
        """Ask the store if it is required, and raise as `AsyncRateLimits.start`."""
        if self.is_required:
            try:
                run_at_once(self._start())
            except BaseException:  # nobody else would close it
                self.close()
                raise

    def close(self) -> None:
        """Send what was counted, give back what is held, and close the connections, once the calls
        of other threads have their answers. The next request opens them again.
        """
        closed, self.opened = self.opened, self._open()
        closed.close()
