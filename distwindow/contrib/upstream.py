"""Calls of an API that limits its callers: one window and one pause for the whole fleet.

A call passes these, in this order, and each costs nothing where it does not apply:

    the pause of its key     nobody of the fleet sends while the upstream has asked to wait; then
                             one call probes, and the others follow by turns
    the limits of its key    `Limiter.acquire`: by turns, for `max_wait` seconds at most
    the upstream             what its response says of its limits is told the fleet

`distwindow.contrib.httpx2`, `.httpx`, `.requests` and `.aiohttp` put this around the calls of a
client. What one call does is a coroutine, which in threads awaits nothing (`run`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import random
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

from .. import ConfigurationError, Decision, Limit, StoreError
from ..away.policy import OnStoreError, check_options
from ..errors import RateLimitExceeded, short_repr
from ..lifecycle.connect import store_name
from ..ring.clock import SYSTEM, Clock
from ..ring.decision import Charge, with_cost
from ..ring.limit import LimitSpec, parse_limits
from ..runtime.options import ClockChoice, Consistency, Options
from ..support.async_use import only_async_with, result_of
from ..support.callables import RAISED_BY_CALLBACKS, check_takes
from ..upstream.commands import ASK_AGAIN, PAUSED, PROBE, Lower, PauseCommand, pause_name
from ..upstream.fields import Get, Quota, read_response
from .limiter_pool import AsyncLimiterPool, LimiterPool

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("distwindow")
T = TypeVar("T")
Limits: TypeAlias = "LimitSpec | Mapping[str, LimitSpec | None] | None"
_ASK_EVERY_S = 0.1
"""A process that sends asks the store at most this often whether others were refused."""
_MAX_KEYS = 10_000
"""Of how many keys a process knows whether they are paused, the most recently used."""
_JITTER = 100
"""A pause is up to so many thousandths longer, as others have been told to come back then, too."""
_NO_LIMIT = Limit(1, per=1)


class UpstreamLimited(RateLimitExceeded):
    """A call was not sent: its limit has no room within `max_wait`, or the upstream has asked to
    wait for longer than that. The class of each client's module is an error of the client, too.

    `.key`; `.retry_after` in seconds; `.is_paused`, true where the upstream has asked to wait;
    `.decision`, whose `limit` means nothing then.
    """

    def __init__(self, decision: Decision, *, is_paused: bool) -> None:
        super().__init__(decision)
        self.key = decision.key
        self.is_paused = is_paused

    def __str__(self) -> str:
        if self.is_paused:
            return (
                f"the call was not sent: {short_repr(self.key)} has asked to wait, for "
                f"{self.retry_after:.3f} s more"
            )
        return f"the call was not sent: {super().__str__()}"


class Pause(NamedTuple):
    """A pause of one key, as this process knows it."""

    key: str
    seconds: float
    """For how long nobody of the fleet sends, from now on."""
    said: float
    """For how long the upstream has asked to wait, from now on."""


class UpstreamHealth(NamedTuple):
    """What this process has seen, since it has made the object."""

    pauses: tuple[Pause, ...]
    """The pauses that it knows of now."""
    waited: int
    """Calls that waited for a pause or a limit."""
    limited: int
    """Calls that were not sent."""
    refused: int
    """Responses by which the upstream has asked to wait."""
    lowered: int
    """Responses by which the fleet has less left than it had counted."""


class _Known:
    """What this process knows of the pause of one key, by the monotonic clock of the store."""

    __slots__ = ("ask_at", "said_until", "until")

    def __init__(self) -> None:
        self.until = self.said_until = self.ask_at = 0.0


class _Call:
    """One call of the upstream."""

    __slots__ = ("decision", "id", "is_probe", "key", "limiter", "may_be_sent")

    def __init__(self, key: str, limiter: Any) -> None:
        self.key, self.limiter = key, limiter
        self.id = uuid.uuid4().hex
        self.is_probe = self.may_be_sent = False
        self.decision: Decision | None = None


def check_is(upstream: T, kind: type) -> T:
    """Return `upstream`; raise `ConfigurationError` for another object, or one of another kind."""
    if not isinstance(upstream, kind):
        raise ConfigurationError(
            f"{type(upstream).__name__} is no {kind.__name__}: the limits of calls that block are "
            "UpstreamLimits, and of those that are awaited AsyncUpstreamLimits"
        )
    return upstream


def by_host(request: Any) -> str:
    """Return the host that a request of any of the clients goes to: the default `key`."""
    url = request.url
    host = urlsplit(url).hostname if isinstance(url, str) else url.host
    return str(host or "").lower()


def by_header(name: str) -> Callable[[Any], str]:
    """Return a key function: the host, and a digest of this header field, such as the account in
    `Authorization`. A secret never becomes a key.
    """

    def key(request: Any) -> str:
        value = request.headers.get(name)
        if value is None:
            return by_host(request)
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        return f"{by_host(request)}:{hashlib.blake2b(raw, digest_size=8).hexdigest()}"

    return key


class BaseUpstreamLimits:
    """Base class of `UpstreamLimits` and `AsyncUpstreamLimits`, which document the arguments."""

    _pool_type: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        store: Any,
        limits: Limits = None,
        *,
        prefix: str = "distwindow",
        key: Callable[[Any], str] = by_host,
        cost: int | Callable[[Any], int] = 1,
        max_wait: float = 30.0,
        learn: bool = True,
        cap: float = 600.0,
        retries: int = 0,
        on_store_error: OnStoreError = "allow",
        timeout: float = 1.0,
        clock: ClockChoice = "server",
        consistency: Consistency = "direct",
        name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        for option, function in (("key", key), ("cost", cost)):
            if callable(function):
                check_takes(f"UpstreamLimits: {option}", function, 1)
        for option, seconds in (("max_wait", max_wait), ("cap", cap)):
            if not isinstance(seconds, (int, float)) or not 0 <= seconds < 10**9:
                raise ConfigurationError(f"{option}={short_repr(seconds)} is no number of seconds")
        if not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(f"retries={short_repr(retries)} is no whole number from 0 on")
        self._options = Options(
            prefix=prefix, consistency=consistency, on_store_error=on_store_error,
            timeout=timeout, clock=clock, name=name, time=time,
        )  # fmt: skip
        check_options(self._options)
        self._key, self._cost = key, cost
        self._max_wait, self._learns, self._cap_s = max_wait, learn, cap
        self.retries = retries
        by_pattern = limits if isinstance(limits, Mapping) else {"*": limits}
        self._limits = {
            pattern.lower(): None if of_host is None else parse_limits(of_host)
            for pattern, of_host in by_pattern.items()
        }
        self._pool = self._pool_type(store, self._options)
        self.store: Any = self._pool.store
        self._shown_name = store_name(store)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._listeners: list[Callable[[Pause], object]] = []
        self._waited = self._limited = self._refused = self._lowered = 0

    def health(self) -> UpstreamHealth:
        """Return what this process has seen, and the pauses that it knows of; asks nobody."""
        now = self.store.clock.monotonic()
        with self._lock:
            known = [*self._known.items()]
        pauses = tuple(
            Pause(key, each.until - now, each.said_until - now)
            for key, each in known
            if each.until > now
        )
        return UpstreamHealth(pauses, self._waited, self._limited, self._refused, self._lowered)

    def on_pause(self, listener: Callable[[Pause], object]) -> None:
        """Call `listener(pause)` when this process learns of a pause: from a response, or from the
        fleet. It is called in the thread or task of a call; what it raises is logged.
        """
        check_takes("on_pause", listener, 1)
        self._listeners.append(listener)

    async def exchange(
        self,
        request: Any,
        send: Callable[[], Any],
        read: Callable[[Any], tuple[int, Get]],
        close: Callable[[Any], Any],
        *,
        may_repeat: bool,
        error_type: Callable[..., UpstreamLimited],
        store_error_type: Callable[..., Exception],
    ) -> Any:
        """Return the response to `send()`, once the call may be sent. `read` returns the status of
        a response and what gets its header fields; `close` closes one that is sent again.
        """
        repeats = self.retries if may_repeat else 0
        while True:
            call = _Call(self._key(request), self._limiter_of(by_host(request)))
            try:
                await self._begin(call, request)
                response = await result_of(send())
            except BaseException as exc:
                if call.is_probe:
                    await self._ask(call, "free")
                if not call.may_be_sent and isinstance(exc, RateLimitExceeded):
                    self._limited += 1
                    is_paused = isinstance(exc, UpstreamLimited)
                    raise error_type(exc.decision, is_paused=is_paused) from None
                if not call.may_be_sent and isinstance(exc, StoreError):
                    raise store_error_type(str(exc), charged=exc.charged) from exc
                raise
            asked_to_wait = await self._end(call, *read(response))
            if not asked_to_wait or not repeats:
                return response
            repeats -= 1
            await result_of(close(response))

    # -- before a call -----------------------------------------------------------------------------

    async def _begin(self, call: _Call, request: Any) -> None:
        """Wait until `call` may be sent. Raises `RateLimitExceeded` and `StoreError`."""
        cost = self._cost(request) if callable(self._cost) else self._cost
        monotonic = self.store.clock.monotonic
        began_at = monotonic()
        ends_at = began_at + self._max_wait
        while True:
            known = self._known_of(call.key)
            if monotonic() < known.until or monotonic() >= known.ask_at:
                await self._pass_pause(call, known, ends_at)
            if call.limiter is not None:
                decision = await self._admit(call, cost, max(0.0, ends_at - monotonic()))
                if monotonic() < known.until:  # a pause has begun while it waited
                    if decision.charged:
                        await result_of(call.limiter.refund(decision))
                    continue
                call.decision = decision
            if monotonic() - began_at > 0.001:
                self._waited += 1
            call.may_be_sent = True
            return

    async def _admit(self, call: _Call, cost: int, timeout: float) -> Decision:
        decision: Decision = await result_of(call.limiter.try_acquire(call.key, cost))
        if not decision.allowed:
            decision = await result_of(call.limiter.acquire(call.key, cost, timeout))
        return decision

    async def _pass_pause(self, call: _Call, known: _Known, ends_at: float) -> None:
        """Wait until `call` may be sent by the pause of its key, if there is one."""
        monotonic = self.store.clock.monotonic
        while True:
            now = monotonic()
            wait_s, said_s = known.until - now, known.said_until - now
            if wait_s <= 0:
                reply = await self._ask(call, "ask", self._max_call_ms())
                if reply is None or reply.state not in (PAUSED, ASK_AGAIN):
                    call.is_probe = reply is not None and reply.state == PROBE
                    if not call.is_probe:  # others go on asking until it has its answer
                        known.ask_at = now + _ASK_EVERY_S
                    return
                wait_s = said_s = reply.wait_ms / 1000
                if reply.state == PAUSED:
                    said_s = reply.said_ms / 1000
                    self._note_pause(call.key, known, wait_s, said_s)
            if said_s > self._cap_s * (1 + _JITTER / 1000) or now + wait_s > ends_at:
                raise UpstreamLimited(self._refusal(call.key, max(wait_s, said_s)), is_paused=True)
            await result_of(self._sleep(wait_s))

    def _refusal(self, key: str, retry_after: float) -> Decision:
        now_ms = self.store.clock.now_ms()
        return Decision(
            False, key, 1, _NO_LIMIT, 0, retry_after, retry_after, 0.0, "over_limit", "store",
            now_ms, None,
        )  # fmt: skip

    # -- after a call ------------------------------------------------------------------------------

    async def _end(self, call: _Call, status: int, get: Get) -> bool:
        """Tell the fleet what a response says. Return whether it asks to wait. Raises nothing: the
        caller has its response.
        """
        try:
            said = read_response(status, get, self.store.clock.now_ms() / 1000)
        except Exception:  # an upstream may send whatever it likes
            _LOG.exception("a response of %s could not be read", short_repr(call.key))
            return False
        if said.pause_s is not None and self._learns:
            self._refused += 1
            given_ms = min(10**12, int(said.pause_s * 1000))
            reply = await self._ask(call, "tell", given_ms, int(self._cap_s * 1000))
            known = self._known_of(call.key)
            if reply is not None:
                self._note_pause(call.key, known, reply.wait_ms / 1000, reply.said_ms / 1000)
            else:  # the store is away: this process pauses
                wait_s = min(said.pause_s or 1.0, self._cap_s)
                self._note_pause(call.key, known, wait_s, max(wait_s, said.pause_s))
            return True
        if call.is_probe:
            await self._ask(call, "ok", 0, int(call.limiter is None))
        if said.quotas and call.decision is not None and self._learns:
            await self._lower(call, call.decision, said.quotas)
        return False

    async def _lower(self, call: _Call, decision: Decision, quotas: tuple[Quota, ...]) -> None:
        """Count what others have used, where the upstream has less left than our window."""
        charges: list[Charge] = []
        for charge in decision.charged or ():
            limit = charge.limit
            for quota in quotas:
                of_window = quota.window_s is None or quota.window_s * 1000 == limit.interval_ms
                used = limit.amount - quota.remaining
                if quota.counts != "requests" or not of_window or used <= 0:
                    continue
                # Of several windows, nobody knows of which one a response without a window speaks.
                if quota.window_s is None and len(decision.charged or ()) > 1:
                    continue
                # `remaining` is that of the window with the fewest left.
                if quota.remaining < decision.remaining:
                    charges += with_cost([charge], used)
        if charges:
            self._lowered += 1
            await self._execute(Lower(tuple(charges), self._client_time()))

    # -- the store ---------------------------------------------------------------------------------

    async def _ask(self, call: _Call, what: Any, first: int = 0, second: int = 0) -> Any:
        """Ask or tell the pause of the key of a call; None where the store gives no answer."""
        name = pause_name(self._options.prefix, call.key)
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
            return None

    def _client_time(self) -> int | None:
        return self.store.clock.now_ms() if self._options.clock == "client" else None

    def _max_call_ms(self) -> int:
        """For how long a call is the probe, if it does not end."""
        return max(1000, int(self._max_wait * 1000))

    def _limiter_of(self, host: str) -> Any:
        """Return the limiter for calls of `host`; None where it has no limits of ours."""
        limits = self._limits.get(host)
        if limits is None and host not in self._limits:
            found = (v for p, v in self._limits.items() if fnmatch.fnmatchcase(host, p))
            limits = next(found, None)
        if limits is None:
            return None
        return self._pool.get(limits, self._options.on_store_error)

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
        if not is_new:
            return
        _LOG.info("%s has asked to wait for %.1f s; nobody calls it until then", key, said_s)
        for listener in self._listeners:
            try:
                listener(Pause(key, wait_s, said_s))
            except RAISED_BY_CALLBACKS:
                _LOG.exception("a listener of on_pause has failed: %r", listener)

    def _sleep(self, seconds: float) -> Any:
        raise NotImplementedError  # threads and tasks sleep in their ways

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown_name!r}, prefix={self._options.prefix!r})"


@only_async_with
class AsyncUpstreamLimits(BaseUpstreamLimits):
    """`UpstreamLimits` for tasks. Safe to share between tasks, and between event loops."""

    _pool_type = AsyncLimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what one call does, to be awaited."""
        return steps

    def _sleep(self, seconds: float) -> Any:
        return self.store.sleep(seconds)

    async def aclose(self) -> None:
        """Send what was counted, and close the connections. Later calls raise
        `ConfigurationError`.
        """
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
    `by_header("authorization")` one account. `cost` is a number, or a function of the request.

    A call waits for at most `max_wait` seconds, outside of the client's own timeouts; then it
    raises `UpstreamLimited`, and is not sent. With `learn`, a response 429, 503 or 529 that asks to
    wait (403 with `Retry-After` as well) pauses its key for the whole fleet, for `cap` seconds at
    most: where the upstream asks for more, calls fail at once until then. A pause ends with one
    call of the fleet, and the others follow if that was not refused. Fields that say that less is
    left than the fleet has counted lower its window; nothing raises it. `retries` is how often such
    a response is asked for again after the pause, if the body can be sent again.

    `on_store_error`, `timeout`, `prefix`, `clock`, `consistency`, `name` and `time` are those of
    `Limiter`. Raises `ConfigurationError` for arguments that can never work.
    """

    _pool_type = LimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run what one call does. It awaits nothing, as all that it asks has answered already."""
        try:
            steps.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        steps.close()
        raise ConfigurationError(
            "a function of UpstreamLimits has returned what waits for an event loop, and there is "
            "none here; use AsyncUpstreamLimits, or return the answer"
        )

    def _sleep(self, seconds: float) -> Any:
        self.store.clock.sleep(seconds)

    def close(self) -> None:
        """Send what was counted, and close the connections. Later calls raise
        `ConfigurationError`.
        """
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
