"""Calls of an API that limits its callers: one window and one pause for the whole fleet.

A call passes these, in this order, and each costs nothing where it does not apply:

    the pause of its key     nobody of the fleet sends while the upstream has asked to wait; then
                             one call probes, and the others follow by turns
    the limits of its key    `Limiter.acquire`: by turns, for `max_wait` seconds at most; where its
                             cost is known afterwards, a reservation
    the upstream             what its response says of its limits is told the fleet
    its body                 what it reports is what the reservation counts then

`distwindow.contrib.httpx2`, `.httpx`, `.requests` and `.aiohttp` put this around the calls of a
client. What one call does is a coroutine, which in threads awaits nothing (`run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import math
import random
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

from .. import ConfigurationError, Decision, Limit, StoreError
from ..away.outages import RETRY_AFTER_S
from ..away.policy import OnStoreError, check_options
from ..errors import DistwindowError, RateLimitExceeded, closed_failure, short_repr
from ..lifecycle.connect import store_name
from ..observer import Observer, Result, Tally, observer_of
from ..ring.clock import SYSTEM, Clock
from ..ring.decision import Charge, with_cost
from ..ring.key import AnyKey, Key
from ..ring.limit import LimitSpec, parse_limits
from ..rules.shadow import AsyncShadowStore, ShadowStore, is_in_shadow
from ..runtime.options import ClockChoice, Consistency, Options
from ..support.async_use import only_async_with, result_of, run_at_once
from ..support.callables import RAISED_BY_CALLBACKS, check_not_async, check_takes
from ..support.fork import register_after_fork
from ..upstream.commands import PAUSED, PROBE, SEND, SEND_ONE, Lower, PauseCommand, pause_name
from ..upstream.fields import NO_INFO, Get, Quota, may_speak_of_limits, read_response
from ..upstream.presets import (
    APILimits,
    anthropic,
    ascii_host,
    by_header,
    by_host,
    choose,
    github,
    openai,
)
from .limiter_pool import AsyncLimiterPool, LimiterPool
from .model_calls import reserve_in_time

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AsyncUpstreamLimits",
    "Learned",
    "Lowered",
    "Pause",
    "UpstreamHealth",
    "UpstreamLimited",
    "UpstreamLimits",
    "Waited",
    "anthropic",
    "by_header",
    "by_host",
    "github",
    "openai",
]

_LOG = logging.getLogger("distwindow")
T = TypeVar("T")
HostLimits: TypeAlias = "LimitSpec | APILimits | Sequence[APILimits] | None"
Limits: TypeAlias = "HostLimits | Mapping[str, HostLimits]"
_ASK_EVERY_S = 0.1
"""A process that sends asks the store at most this often whether others were refused."""
_SEES_CLOSE_EVERY_S = 0.25
"""How often who sleeps looks whether this was closed."""
_LONGEST_PACED_MS = 60_000
"""The longest interval of a limit whose pace a process keeps after a call of it has waited: that of
5,000 a day is a call in 17 s, which no day should go on with."""
_MAX_KEYS = 10_000
"""Of how many keys a process knows whether they are paused."""
_JITTER = 100
"""A pause is up to so many thousandths longer, as others have been told to come back then, too."""
_PROBE_MS = 10_000
"""A probe that has no answer for so long leaves the place to the next call: its process may have
been killed. Its answer counts all the same."""
_LEARNED_WINDOWS = 10
"""For how many of its windows a limit holds that a response has named."""
_LEARNED_SHARE = 0.95
"""Of that limit; the upstream counts by its own clock, and others may call it, too."""
_NO_LIMIT = Limit(1, per=1)


class UpstreamLimited(RateLimitExceeded):
    """A call was not sent: its limit has no room within `max_wait`, or the upstream has asked to
    wait for longer than that. The class of each client's module is an error of the client, too.

    `.key`; `.retry_after` in seconds; `.is_paused`, true where the upstream has asked to wait;
    `.decision`, whose `limit` means nothing then.
    """

    is_outgoing = True

    def __init__(self, decision: Decision | list[Any], is_paused: bool = False) -> None:
        super().__init__(decision)
        self.key = self.decision.key  # of tokens, a Key with the tag of that of the requests
        self.is_paused = is_paused

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (*super().args, self.is_paused)

    def __str__(self) -> str:
        why, key = super().__str__(), short_repr(self.key)
        if self.is_paused:
            why = f"{key} has asked to wait; retry in {self.retry_after:.3f} s"
        elif self.decision.reason == "store_down":
            why = f"the store of the limits of {key} is away"
        return f"the call was not sent: {why}"


class Pause(NamedTuple):
    """A pause of one key, as this process knows it."""

    key: str
    seconds: float
    """For how long nobody of the fleet sends, from now on."""
    said: float
    """For how long the upstream has asked to wait, from now on."""


class Lowered(NamedTuple):
    """A response has said that less is left of a window than the fleet had counted."""

    key: str
    limit: Limit
    remaining: int


class Learned(NamedTuple):
    """A response has named the limit of a key that has none of ours; somewhat less holds now."""

    key: str
    limit: Limit


class Waited(NamedTuple):
    """A call has waited for the pause or the limits of its key."""

    key: str
    seconds: float


Event: TypeAlias = Pause | Lowered | Learned | Waited


class UpstreamHealth(NamedTuple):
    """What this process has seen, since it has made the object."""

    pauses: tuple[Pause, ...]
    """The pauses that it knows of now."""
    learned: tuple[Learned, ...]
    """The limits that hold now because a response has named them."""
    waited: int
    """Calls that waited for a pause or a limit."""
    limited: int
    """Calls that were not sent."""
    refused: int
    """Responses by which the upstream has asked to wait."""
    lowered: int
    """Responses by which the fleet has less left than it had counted."""


class ClientCalls(NamedTuple):
    """How the requests and responses of one client are used."""

    limited: Callable[..., UpstreamLimited]
    store_error: Callable[..., Exception]
    read: Callable[[Any], tuple[int, str, Get]]
    """`read(response)`: its status, the names of its header fields in one text, and what gets their
    values by their names in lower case."""
    close: Callable[[Any], Any]
    is_unsent: Callable[[BaseException], bool]
    """True for an error without a connection: the upstream has got no request."""
    body: Callable[[Any], bytes | None]
    """`body(request)`; None for one that is sent while it is made, and cannot be sent again."""
    watch: Callable[[Any, Callable[[bytes], Any]], Any]
    """`watch(response, end)`: have `end(body)` called when the caller has read the response. Where
    it is read already: call it, and return what it returns.
    """


class _Known:
    """What this process knows of one key, by the monotonic clock of the store."""

    __slots__ = (
        "ask_at", "learned", "learned_limiter", "learned_until", "next_at", "paced_until",
        "said_until", "until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.until = self.said_until = self.ask_at = self.learned_until = 0.0
        self.paced_until = self.next_at = 0.0
        self.learned: tuple[Limit, ...] = ()
        self.learned_limiter: Any = None


class _Part(NamedTuple):
    """What one call costs of one kind of what the upstream counts."""

    counts: str  # `requests` or `tokens`
    key: AnyKey
    limits: tuple[Limit, ...]
    limiter: Any
    cost: int
    is_paced: bool = False  # an admitted call has to wait, too


class _Route(NamedTuple):
    """What holds for the calls of one host."""

    limits: tuple[Any, ...]  # limits, or presets, or nothing
    limiter: Any
    parts: tuple[_Part, ...] | None
    """Those of each call, where the key is the host and the cost is always the same."""


class _Call:
    """One call of the upstream."""

    preset: APILimits | None = None
    learns = False
    is_reserved = False  # what it costs is known by its response only
    id = ""  # made when the fleet is asked, which most calls do not
    is_probe = may_be_sent = has_waited = False
    probe_ms = 0
    """When it became the probe, by the store's clock, ms since the epoch."""
    admitted: Decision | None = None
    reserved: Any = None

    def __init__(self, key: str, known: _Known, parts: tuple[_Part, ...] = ()) -> None:
        self.key, self.known, self.parts = key, known, parts


def check_is(upstream: T, kind: type) -> T:
    """Return `upstream`; raise `ConfigurationError` for another object, or one of another kind."""
    if not isinstance(upstream, kind):
        raise ConfigurationError(
            f"{type(upstream).__name__} is no {kind.__name__}: the limits of calls that block are "
            "UpstreamLimits, and of those that are awaited AsyncUpstreamLimits"
        )
    return upstream


def _checked_host(pattern: Any) -> str:
    host = ascii_host(pattern) if isinstance(pattern, str) else ""
    host = host.removeprefix("[").removesuffix("]")
    is_ipv6 = host.count(":") > 1
    if not re.fullmatch(r"[0-9a-fA-F:.*?]+" if is_ipv6 else r"[^\s/:@]*[^\s/:@.]", host):
        raise ConfigurationError(
            f"limits are of {short_repr(pattern)}, and have to be of a host, such as "
            "'api.example.com' or '*.example.com', without a scheme, a port and a path"
        )
    return host


def _checked(limits: Any) -> tuple[Any, ...]:
    """Return the limits of one host, parsed, or its presets; empty for None."""
    if limits is None:
        return ()
    given = limits if isinstance(limits, (list, tuple)) else (limits,)
    presets = tuple(one for one in given if isinstance(one, APILimits))
    if not presets:
        return parse_limits(limits)
    if len(presets) < len(given):
        raise ConfigurationError(
            "the limits of one host are either limits or what openai, anthropic and github "
            "return, and here are both"
        )
    return presets


def _is_paced(limits: Sequence[Limit]) -> bool:
    return any(limit.max_wait_ms is not None for limit in limits)


def _keeps_pace(limit: Limit) -> bool:
    """True where nothing but a process itself spreads its calls over the interval of `limit`."""
    return limit.interval_ms <= _LONGEST_PACED_MS and not limit.is_shaped


class BaseUpstreamLimits:
    """Base class of `UpstreamLimits` and `AsyncUpstreamLimits`, which document the arguments."""

    _pool_type: ClassVar[Callable[..., Any]]
    _awaits: ClassVar[bool]
    """What limiters and clients return is awaited."""
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    _sleep: Callable[[float], Any]
    _is_closed = False

    def __init__(
        self,
        store: Any,
        limits: Limits = None,
        *,
        prefix: str = "distwindow",
        key: Callable[[Any], str] = by_host,
        cost: int | Callable[[Any], int] = 1,
        cost_after: Callable[[Any, bytes], int | None] | None = None,
        max_wait: float = 30.0,
        learn: bool = True,
        cap: float = 600.0,
        retries: int = 0,
        on_store_error: OnStoreError = "allow",
        timeout: float = 1.0,
        clock: ClockChoice = "server",
        consistency: Consistency = "direct",
        share: float | None = None,
        name: str | None = None,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        if key is cast("Any", by_header):
            raise ConfigurationError(
                'key=by_header needs the name of a header field: key=by_header("authorization")'
            )
        for option, function, count in (
            ("key", key, 1), ("cost", cost, 1), ("cost_after", cost_after, 2),
        ):  # fmt: skip
            if callable(function):
                check_not_async(option, function)
                check_takes(option, function, count)
            elif option == "key" or (option == "cost_after" and function is not None):
                raise ConfigurationError(f"{option}={short_repr(function)} is no function")
            elif option == "cost" and (type(function) is not int or function < 1):
                raise ConfigurationError(
                    f"cost={short_repr(function)} is no whole number from 1 on, and no function"
                )
        for option, seconds in (("max_wait", max_wait), ("cap", cap)):
            if type(seconds) not in (int, float) or not 0 <= seconds < 10**9:
                raise ConfigurationError(
                    f"{option}={short_repr(seconds)} is not a number of seconds from 0 to 10**9, "
                    f"such as {option}=30"
                )
        if not cap:
            raise ConfigurationError("cap=0 would end each pause at once: write learn=False")
        if type(retries) is not int or retries < 0:
            raise ConfigurationError(f"retries={short_repr(retries)} is no whole number from 0 on")
        if not isinstance(learn, bool):
            raise ConfigurationError(f"learn={short_repr(learn)} is neither True nor False")
        if is_in_shadow():
            on_store_error = "allow"  # also where the store is asked of pauses, which are kept
        self._options = Options(
            prefix=prefix, consistency=consistency, on_store_error=on_store_error,
            timeout=timeout, clock=clock, share=share, name=name, time=time,
            observer=observer_of(observer), metric_name=name or "upstream", key_label=key_label,
        )  # fmt: skip
        check_options(self._options)
        self._key, self._cost, self._cost_after = key, cost, cost_after
        self._max_wait, self._learns, self._cap_s = max_wait, learn, cap
        self.retries = retries
        by_pattern = limits if isinstance(limits, Mapping) else {"*": limits}
        self._limits = {
            _checked_host(pattern): _checked(of_host) for pattern, of_host in by_pattern.items()
        }
        self._routes: dict[str, _Route] = {}
        self._pool = self._pool_type(store, self._options)
        self._check_reserved()
        # Its limiters tell the same observer of what they decide.
        self._tally: Tally | None = self._pool.observe(self._options, "upstream")
        self.store: Any = self._pool.observed_store
        if is_in_shadow():
            self.store = (AsyncShadowStore if self._awaits else ShadowStore)(self.store)
        self._shown_name = store_name(store)
        register_after_fork(self)
        self.after_fork()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.listeners: list[Callable[[Event], object]] = []
        self._tasks: set[Any] = set()  # or nobody would hold them
        self._waited = self._limited = self._refused = self._lowered = 0

    def _check_reserved(self) -> None:
        """Raise `ConfigurationError` where a cost that is known afterwards meets a paced limit."""
        for host, of_host in self._limits.items():
            limits: Sequence[Limit] = of_host if self._cost_after is not None else ()
            if of_host and isinstance(of_host[0], APILimits):
                limits = [limit for of in of_host if of.tokens for limit in of.requests + of.tokens]
            for limit in limits:
                if limit.is_shaped:
                    raise ConfigurationError(
                        f"the calls of {host!r} cost what their responses say, so their limits can "
                        f"be neither paced nor warm up, as {str(limit)!r}: what is counted later "
                        "cannot change when a call was sent"
                    )

    def health(self) -> UpstreamHealth:
        """Return what this process has seen, and the pauses that it knows of; asks nobody."""
        now = self.store.clock.monotonic()
        with self._lock:
            known = [*self._known.items()]
        pauses: list[Pause] = []
        learned: list[Learned] = []
        for key, each in known:
            if each.until > now:
                pauses.append(Pause(key, each.until - now, each.said_until - now))
            if each.learned_until > now:
                learned += [Learned(key, limit) for limit in each.learned]
        return UpstreamHealth(
            tuple(pauses), tuple(learned), self._waited, self._limited, self._refused, self._lowered
        )

    def on_event(self, listener: Callable[[Event], object]) -> None:
        """Call `listener(event)` when this process learns of a `Pause`, from a response or from
        the fleet; when a response has `Lowered` a window; when a limit was `Learned` from one; when
        a call has `Waited`. It is called in the thread or task of a call, so it should be quick;
        what it raises is logged.
        """
        if not callable(listener):
            raise ConfigurationError(f"on_event({short_repr(listener)}) is given no function")
        check_not_async("on_event", listener)
        check_takes("on_event", listener, 1)
        self.listeners.append(listener)

    async def exchange(self, request: Any, send: Callable[[Any], Any], client: ClientCalls) -> Any:
        """Return the response to `send(request)`, once the call may be sent."""
        repeats = self.retries
        while True:
            call = self._call_of(request, client)
            try:
                await self._begin(call)
                answer = send(request)
                response = (await answer) if self._awaits else answer
            except BaseException as exc:
                if call.is_probe:
                    await self._uncancelled(self._ask(call, "free"))
                if call.reserved is not None and client.is_unsent(exc):
                    await self._uncancelled(self._give_back(call))
                if not call.may_be_sent and isinstance(exc, RateLimitExceeded):
                    self._limited += 1
                    is_paused = isinstance(exc, UpstreamLimited)
                    if is_paused:
                        self._count(call, "refused", "pause", "store")
                    raise client.limited(exc.decision, is_paused=is_paused) from None
                if not call.may_be_sent and isinstance(exc, StoreError):
                    raise client.store_error(str(exc), charged=exc.charged) from exc
                raise
            try:
                status, names, get = client.read(response)
                speaks = may_speak_of_limits(status, names)
                if not speaks and not call.is_probe and call.reserved is None:
                    return response
                wait_s = await self._end(call, response, client, status, get, speaks=speaks)
                if wait_s is None or not repeats or client.body(request) is None:
                    return response
            except BaseException:  # cancelled, say; nobody else has the response
                await self._uncancelled(self._drop(call, response, client))
                raise
            repeats -= 1
            await result_of(client.close(response))
            await result_of(self._sleep(wait_s))

    async def _drop(self, call: _Call, response: Any, client: ClientCalls) -> None:
        await result_of(client.close(response))
        if call.is_probe:
            await self._ask(call, "free")

    def _call_of(self, request: Any, client: ClientCalls) -> _Call:
        host = by_host(request)
        route = self._routes.get(host) or self._route_of(host)
        if route.parts is not None:
            return _Call(host, self._known_of(host), route.parts)
        limits, limiter = route.limits, route.limiter
        if limits and limiter is None:
            body = client.body(request)
            if (chosen := choose(limits, request, body)) is not None:
                return self._call_of_preset(*chosen, host, request, body or b"")
            limits = ()
        key = host if self._key is by_host else self._key(request)
        call = _Call(key, self._known_of(key))
        call.learns = self._learns and not limits
        if call.learns and call.known.learned_until > self.store.clock.monotonic():
            limits, limiter = call.known.learned, call.known.learned_limiter
        if limits:
            cost = self._cost(request) if callable(self._cost) else self._cost
            if call.learns:  # nobody has compared the cost with a limit that was not known
                cost = min(cost, *(limit.amount for limit in limits))
            call.parts = (_Part("requests", key, limits, limiter, cost, _is_paced(limits)),)
            call.is_reserved = self._cost_after is not None
        return call

    def _call_of_preset(
        self, preset: APILimits, part: str, host: str, request: Any, body: bytes
    ) -> _Call:
        key = preset.key(host, request, part)
        call = _Call(key, self._known_of(key))
        call.preset, call.is_reserved = preset, bool(preset.tokens)
        if preset.requests:
            call.parts += (self._part("requests", key, preset.requests, 1),)
        if preset.tokens:
            of_tokens = Key("tokens", tag=key)  # in the same slot of a cluster
            call.parts += (self._part("tokens", of_tokens, preset.tokens, preset.reserve(body)),)
        return call

    def _route_of(self, host: str) -> _Route:
        patterns = [host, *(p for p in self._limits if fnmatch.fnmatchcase(host, p))]
        limits = next((self._limits[p] for p in patterns if p in self._limits), ())
        limiter = parts = None
        if limits and not isinstance(limits[0], APILimits):
            limiter = self._limiter(limits)
            if self._key is by_host and isinstance(self._cost, int) and self._cost_after is None:
                parts = (self._part("requests", host, limits, self._cost),)
        route = _Route(limits, limiter, parts)
        if len(self._routes) < _MAX_KEYS:
            self._routes[host] = route
        return route

    def _part(self, counts: str, key: AnyKey, limits: tuple[Limit, ...], cost: int) -> _Part:
        return _Part(counts, key, limits, self._limiter(limits), cost, _is_paced(limits))

    def _limiter(self, limits: tuple[Limit, ...]) -> Any:
        return self._pool.get(limits, self._options.on_store_error)

    async def _begin(self, call: _Call) -> None:
        """Wait until `call` may be sent. Raises `RateLimitExceeded` and `StoreError`."""
        known, monotonic = call.known, self.store.clock.monotonic
        now = began_at = monotonic()
        ends_at = began_at + self._max_wait
        while True:
            if not known.until <= now < known.ask_at:
                await self._pass_pause(call, ends_at)
            if not call.parts:
                break
            if call.is_reserved:
                await self._reserve(call, ends_at)
            else:
                _, key, limits, limiter, cost, is_paced = call.parts[0]
                if now < known.paced_until:
                    await self._keep_pace(call, limits[0], ends_at)
                decision = None
                if not is_paced:
                    decision = limiter.decider.decide_locally(key, cost)  # as `try_acquire` begins
                    if decision is None:
                        answer = limiter.try_acquire(key, cost)
                        decision = (await answer) if self._awaits else answer
                if decision is None or not decision.allowed:
                    was_refused = decision is not None
                    call.has_waited |= was_refused
                    left_s = max(0.0, ends_at - monotonic())
                    answer = limiter.decider.acquire(key, cost, left_s, False, decision)
                    decision = (await answer) if self._awaits else answer
                    call.has_waited |= decision.wait > 0
                    if was_refused and _keeps_pace(limits[0]):
                        known.paced_until = monotonic() + limits[0].interval_ms / 1000
                call.admitted = decision
            now = monotonic()
            if now >= known.until:
                break
            await self._give_back(call)  # a pause has begun while it waited
        call.may_be_sent = True
        if call.has_waited:
            self._waited += 1
            self._tell(Waited(call.key, monotonic() - began_at))

    async def _keep_pace(self, call: _Call, limit: Limit, ends_at: float) -> None:
        """Wait until the next call of this process by the pace of `limit`. A process whose call has
        waited would else take all that is free when its wait ends, and so with each window.
        """
        known, now = call.known, self.store.clock.monotonic()
        at = max(now, known.next_at)
        known.next_at = at + call.parts[0].cost * limit.interval_ms / 1000 / limit.amount
        if now < at <= ends_at:
            call.has_waited = True
            await result_of(self._sleep(at - now))

    async def _reserve(self, call: _Call, ends_at: float) -> None:
        """Wait until there is room for all that `call` costs by its estimate."""
        items = [(part.key, part.limits, part.cost) for part in call.parts]
        limiter, clock = call.parts[0].limiter, self.store.clock
        reserved, has_waited = await reserve_in_time(limiter, items, ends_at, clock, self._sleep)
        call.admitted, call.reserved = reserved.decision, reserved
        call.has_waited |= has_waited

    async def _give_back(self, call: _Call) -> None:
        if call.reserved is not None:
            await result_of(call.reserved.release())
        elif call.admitted is not None and call.admitted.charged:
            await result_of(call.parts[0].limiter.refund(call.admitted))

    async def _pass_pause(self, call: _Call, ends_at: float) -> None:
        """Wait until `call` may be sent by the pause of its key, if there is one."""
        known, monotonic = call.known, self.store.clock.monotonic
        while True:
            now = monotonic()
            wait_s, longest_s = known.until - now, known.said_until - now
            if wait_s <= 0:
                call.is_probe = True  # it may be, until its reply is here
                reply = await self._ask(call, "ask", _PROBE_MS)
                if isinstance(reply, StoreError):
                    call.is_probe = False
                    known.ask_at = monotonic() + _ASK_EVERY_S
                    self._answer_without_the_store(call, reply)
                    return
                call.is_probe, call.probe_ms = reply.state == PROBE, reply.now_ms
                if reply.state == SEND:  # others go on asking while one probes, or some return
                    known.ask_at = monotonic() + _ASK_EVERY_S
                if reply.state in (SEND, PROBE, SEND_ONE):
                    return
                wait_s, longest_s = reply.wait_ms / 1000, reply.said_ms / 1000
                if reply.state == PAUSED:
                    self._note_pause(call.key, known, wait_s, longest_s)
                else:  # of all who wait for one moment, the same should not be first each time
                    wait_s *= 1 + random.random()
            is_beyond_cap = known.said_until - now > self._cap_s * (1 + _JITTER / 1000)
            if is_beyond_cap or now + wait_s > ends_at:
                refusal = self._refusal(call.key, max(wait_s, longest_s))
                raise UpstreamLimited(refusal, is_paused=True)
            call.has_waited = True
            await result_of(self._sleep(wait_s))

    def _answer_without_the_store(self, call: _Call, failure: StoreError) -> None:
        """Answer by `on_store_error`. To ask the store for limits, too, would be to wait twice."""
        if self._options.on_store_error == "raise":
            self._count(call, "error", "store_down", "policy")
            raise failure
        if self._options.on_store_error == "deny":
            self._count(call, "refused", "store_down", "policy")
            refusal = self._refusal(call.key, RETRY_AFTER_S)
            raise RateLimitExceeded(refusal._replace(reason="store_down", source="policy"))
        if self._options.on_store_error == "allow":
            self._count(call, "allowed", "store_down", "policy")
            call.parts = ()

    def _refusal(self, key: str, retry_after: float) -> Decision:
        now_ms = self.store.clock.now_ms()
        return Decision(
            False, key, 1, _NO_LIMIT, 0, retry_after, retry_after, 0.0, "over_limit", "store",
            now_ms, None,
        )  # fmt: skip

    async def _end(
        self, call: _Call, response: Any, client: ClientCalls, status: int, get: Get,
        *, speaks: bool,
    ) -> float | None:  # fmt: skip
        """Tell the fleet what a response says, if it speaks of limits. Return the seconds after
        which it may be asked for again, before `_begin`; None where it does not ask to wait.
        """
        if call.reserved is not None:
            if call.preset is not None and status >= 400:  # it has used no tokens
                await self._commit(call, 0)
            else:
                settle = partial(self._settle, call, response)
                await result_of(client.watch(response, lambda body: self.run(settle(body))))
        try:
            said = NO_INFO
            if speaks:
                said = read_response(status, get, self.store.clock.now_ms() / 1000)
        except Exception:  # an upstream may send whatever it likes
            _LOG.exception("a response of %s could not be read", short_repr(call.key))
            return None
        known = call.known
        if said.pause_s is not None and not self._learns:
            if call.is_probe:
                await self._ask(call, "free")
            wait_s = said.pause_s or 1.0
            return wait_s if wait_s <= min(self._cap_s, self._max_wait) else None
        if said.pause_s is not None:
            self._refused += 1
            given_ms = min(10**12, int(said.pause_s * 1000))
            reply = await self._ask(call, "tell", given_ms, int(self._cap_s * 1000))
            if not isinstance(reply, StoreError):
                self._note_pause(call.key, known, reply.wait_ms / 1000, reply.said_ms / 1000)
            else:  # the store is away: this process pauses
                wait_s = min(said.pause_s or 1.0, self._cap_s)
                self._note_pause(call.key, known, wait_s, max(wait_s, said.pause_s))
            return 0.0  # `_begin` waits
        if call.learns:
            self._learn(call, known, said.quotas)
        if call.is_probe:
            await self._ask(call, "ok", call.probe_ms)
        if self._learns:
            for part in call.parts:
                await self._lower(call, part, said.quotas)
        return None

    def _learn(self, call: _Call, known: _Known, quotas: tuple[Quota, ...]) -> None:
        """Have the limits hold that a response names for a key that has none of ours."""
        limits = []
        for quota in quotas:
            window_s = quota.window_s
            # Nobody may have the key wait for longer than a pause.
            if quota.counts == "requests" and quota.limit and window_s and window_s <= self._cap_s:
                amount = max(1, min(quota.limit - 1, int(quota.limit * _LEARNED_SHARE)))
                with contextlib.suppress(ConfigurationError):  # of a window of part of a ms, say
                    limits.append(Limit(amount, per=window_s))
        if not limits:
            return
        if known.learned != (learned := tuple(limits)):
            known.learned, known.learned_limiter = learned, self._limiter(learned)
            for limit in learned:
                self._tell(Learned(call.key, limit))
        holds_s = _LEARNED_WINDOWS * max(limit.interval_ms for limit in learned) / 1000
        known.learned_until = self.store.clock.monotonic() + holds_s
        if not call.parts:
            call.parts = (_Part("requests", call.key, learned, known.learned_limiter, 1),)

    async def _lower(self, call: _Call, part: _Part, quotas: tuple[Quota, ...]) -> None:
        """Count what others have used, where the upstream has less left than our window."""
        decision = call.admitted
        if decision is not None and not decision.charged:
            return  # decided without the store
        lowered: list[Charge] = []
        resets_ms: list[int] = []
        left = min((q.remaining for q in quotas if q.counts == part.counts), default=None)
        # `remaining` is that of the window with the fewest left, of several keys that of one.
        if left is None or (decision and not call.reserved and left >= decision.remaining):
            return
        commands = part.limiter.decider.commands
        for charge in commands.charges_of_items([(part.key, part.limits, 1)])[0]:
            limit = charge.limit
            for quota in quotas:
                of_window = quota.window_s is None or quota.window_s * 1000 == limit.interval_ms
                if quota.counts != part.counts or not of_window:
                    continue
                # Without a window, nobody knows of which of several limits a response speaks, and
                # one that names a smaller limit than this may be about other calls.
                is_smaller = quota.limit is not None and quota.limit < limit.amount
                if quota.window_s is None and (len(part.limits) > 1 or is_smaller):
                    continue
                if quota.remaining < limit.amount:
                    lowered += with_cost([charge], limit.amount - quota.remaining)
                    reset_ms = math.ceil(min((quota.reset_s or 0.0) * 1000, limit.interval_ms))
                    resets_ms.append(reset_ms)
                    self._tell(Lowered(call.key, limit, quota.remaining))
        if lowered:
            self._lowered += 1
            command = Lower(tuple(lowered), self._client_time(), resets_ms=tuple(resets_ms))
            await self._execute(command)

    async def _settle(self, call: _Call, response: Any, body: bytes) -> None:
        """Count what a call has used, now that its body was read."""
        try:
            if call.preset is not None:
                used = call.preset.used(body)
            else:
                assert self._cost_after is not None
                used = self._cost_after(response, body)
        except RAISED_BY_CALLBACKS:
            _LOG.exception("cost_after has failed, and the call keeps its estimate")
            return
        if used is not None:
            await self._commit(call, used)

    async def _commit(self, call: _Call, used: int) -> None:
        """Count `used` for the last part of the call, whose cost was an estimate."""
        known = [part.cost for part in call.parts[:-1]]
        try:
            await result_of(call.reserved.commit(*known, used))
        except (DistwindowError, RuntimeError, TypeError, ValueError) as exc:
            # It was closed, the body is read in a forked child, or it is no number.
            _LOG.warning("what a call of %s has used is not counted: %s", call.key, exc)

    async def _ask(self, call: _Call, what: Any, first: int = 0, second: int = 0) -> Any:
        """Ask or tell the pause of the key of a call. Return a `PauseReply`, or a `StoreError`."""
        name = pause_name(self._options.prefix, call.key)
        call.id = call.id or uuid.uuid4().hex
        jitter = random.randint(0, _JITTER) if what == "tell" else 0
        command = PauseCommand(
            (), self._client_time(), name=name, what=what, call=call.id, first_ms=first,
            second_ms=second, jitter=jitter,
        )  # fmt: skip
        return await self._execute(command)

    async def _execute(self, command: Any) -> Any:
        deadline = self.store.clock.monotonic() + self._options.timeout
        try:
            return await result_of(self.store.execute(command, deadline))
        except StoreError as exc:
            _LOG.debug("the fleet cannot be asked of an upstream: %s", exc)
            return exc

    def _client_time(self) -> int | None:
        return self.store.clock.now_ms() if self._options.clock == "client" else None

    def _known_of(self, key: str) -> _Known:
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.setdefault(key, _Known())
                if len(self._known) > _MAX_KEYS:
                    self._known.popitem(last=False)
        return known

    def _note_pause(self, key: str, known: _Known, wait_s: float, said_s: float) -> None:
        now = self.store.clock.monotonic()
        is_new = known.until <= now
        known.until = max(known.until, now + wait_s)
        known.said_until = max(known.said_until, now + said_s)
        if is_new:
            _LOG.info("%s has asked to wait for %.1f s; nobody calls it until then", key, said_s)
            self._tell(Pause(key, wait_s, said_s))

    def _count(self, call: _Call, result: Result, reason: str, source: str) -> None:
        """Count a call that is decided before its limits are asked."""
        if self._tally is not None:
            self._tally.counted(call.key, "pause", result, reason, source, 1, 1)

    def _tell(self, event: Event) -> None:
        if self._tally is not None and not isinstance(event, Waited):  # limiters count who waits
            self._tally.changed(event)
        for listener in self.listeners:
            try:
                listener(event)
            except RAISED_BY_CALLBACKS:
                _LOG.exception("a listener of on_event has failed: %r", listener)

    def after_fork(self) -> None:
        """Have a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    def _uncancelled(self, steps: Coroutine[Any, Any, T]) -> Any:
        return steps  # a thread is not cancelled

    def _parts_of_sleep(self, seconds: float) -> Iterator[float]:
        """Yield the parts of a sleep, after each of which it raises if this was closed. Of a clock
        that a test moves it is one part: parts of less than its ms would never end.
        """
        clock = self.store.clock
        part_s = _SEES_CLOSE_EVERY_S if clock is SYSTEM else seconds
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            yield min(left, part_s)
            if self._is_closed:
                raise closed_failure()
            if clock is not SYSTEM:
                return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown_name!r}, prefix={self._options.prefix!r})"


@only_async_with
class AsyncUpstreamLimits(BaseUpstreamLimits):
    """`UpstreamLimits` for tasks. Safe to share between tasks, and between event loops."""

    _pool_type = AsyncLimiterPool
    _awaits = True

    def run(self, steps: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what one call does, to be awaited."""
        return steps

    def _uncancelled(self, steps: Coroutine[Any, Any, T]) -> Any:
        """Have `steps` run to their end, also if the scope that awaits them is cancelled."""
        task = asyncio.ensure_future(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def _sleep(self, seconds: float) -> None:
        for part in self._parts_of_sleep(seconds):
            await self.store.sleep(part)

    async def aclose(self) -> None:
        """Send what was counted, and close the connections. Later calls, and those that wait, raise
        `ConfigurationError`.
        """
        self._is_closed = True
        await self._pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class UpstreamLimits(BaseUpstreamLimits):
    """What an API lets all of a fleet call, and what it says of it. Safe to share between threads;
    survives `fork`.

        upstream = UpstreamLimits("redis://localhost:6379/0", {"api.github.com": "5000/hour"})
        client = httpx2.Client(transport=RateLimitTransport(upstream))

    `store` is what `Limiter` takes. `limits` are those of each host: one limit or several for all
    hosts, a mapping from hosts (`*` stands for any characters) to limits, or None: only what the
    upstream says. `key(request)` names whose calls count together, by default the host;
    `by_header("authorization")` one account. `cost` is a number, or a function of the request; with
    `cost_after(response, body)` it is an estimate, and what that returns is counted once the caller
    has read the body (None: the estimate stays; `body` is what was read, unpacked, without its
    middle beyond 128 KiB). `openai`, `anthropic` and `github` return the limits of those APIs, by
    account and model.

    A call waits for at most `max_wait` seconds, outside of the client's own timeouts; then it
    raises `UpstreamLimited`, and is not sent. With `learn`, a response 429, 503 or 529 that asks to
    wait (403 with `Retry-After` as well) pauses its key for the whole fleet, for `cap` seconds at
    most: where the upstream asks for more, calls fail at once until then. A pause ends with one
    call of the fleet, and the others follow if that was not refused. Fields that say that less is
    left than the fleet has counted lower its window; nothing raises it. `retries` is how often such
    a response is asked for again after the pause, if the body can be sent again.

    `on_store_error`, `timeout`, `prefix`, `clock`, `consistency`, `share`, `name`, `observer`,
    `key_label` and `time` are those of `Limiter`. The observer is told what the limits decide and
    which calls a pause refuses, by `name` or as "upstream", and of what `on_event` is told but for
    calls that have waited. Raises `ConfigurationError` for arguments that can never work.
    """

    _pool_type = LimiterPool
    _awaits = False

    def run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run what one call does. It awaits nothing, as all that it asks has answered already."""
        return run_at_once(steps)

    def _sleep(self, seconds: float) -> Any:
        for part in self._parts_of_sleep(seconds):
            self.store.clock.sleep(part)

    def close(self) -> None:
        """Send what was counted, and close the connections. Later calls, and those that wait, raise
        `ConfigurationError`.
        """
        self._is_closed = True
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
