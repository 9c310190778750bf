"""Limits of ASGI applications, for the whole fleet. Needs no framework.

    rate_limits = RateLimits("redis://localhost:6379/0", on_store_error="allow")
    app = RateLimitMiddleware(app, rate_limits, "100/minute")

The middleware changes the header fields of the response, and forwards all else as it comes.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn, TypeVar

from ..errors import ConfigurationError, RateLimitExceeded, short_repr
from ..ring.decision import Decision
from ..support.async_use import Unawaited, UnawaitedCoroutine
from . import http
from .http import EXPOSED_HEADERS, RateLimited, messages
from .http.messages import STARTS, Message, Response, Settlements, WatchedRequest
from .http.scopes import Scope, method_of, root_template, scope_of

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]
"""Frameworks have types of their own for scope, receive and send."""

SCOPE_KEY = "distwindow"
"""The key of the scope under which a request has what was decided for it."""


class ClientAddress(http.ClientAddress):
    __doc__ = http.ClientAddress.__doc__

    def peer(self, request: Any) -> str | None:
        client = getattr(request, "scope", request).get("client")  # `scope_of`
        return client[0] if client else None

    def header_values(self, request: Any, name: str) -> Sequence[str]:
        wanted, headers = name.encode("latin-1"), scope_of(request)["headers"]
        return [value.decode("latin-1") for key, value in headers if key == wanted]


client_address = ClientAddress()
"""The default key: the address of the peer of the socket, or with the `trusted_proxies` of
`RateLimits`, of who is behind them."""


class RequestLimit(http.RequestLimit):
    """One limit; `await limit.check(connection)` asks it in a handler."""

    rate_limits: AsgiRateLimits[Any]

    def method_of(self, request: Any) -> str:
        """See `http.RequestLimit.method_of`; "WEBSOCKET" for one."""
        return method_of(scope_of(request))

    def name_of(self, request: Any) -> str:
        """Return method and path template, where the framework has put these into the scope."""
        scope = scope_of(request)
        path = getattr(scope.get("route"), "path", None) or scope.get("path_template")
        return self.name_of_route(scope, path)

    def name_of_route(self, scope: Scope, path: Any) -> str:
        """Return the name of the limit at a path template."""
        if not isinstance(path, str) or not path:
            raise ConfigurationError(
                "the route of this request cannot be read, and without a name all routes would be "
                'one limit; give the limit a name: limit("10/minute", name="search")'
            )
        return f"{method_of(scope)} {root_template(scope)}{path}"

    def check(self, connection: Any, cost: int | None = None) -> Unawaited[Decision | None]:
        """Ask this limit for a request, or for one message of a websocket. `connection` is a
        scope, or what has one. Return the decision, None if it is not limited; raise
        `RateLimited` if it is refused.

        `cost` replaces that of the limit. A refusal gives back what was charged for the request
        before. Once the response has begun, and without the middleware, each call is by itself.
        """
        return self.rate_limits.check(connection, self, cost=cost)

    def raise_without_middleware(self) -> NoReturn:
        """Raise for a limit that `settles`, where no middleware sees the response."""
        raise ConfigurationError(
            "count_when and cost_after have to see a response, and here is none: put the "
            f"middleware around the application ({self.rate_limits.install_hint}), and ask no "
            "messages of websockets"
        )


L = TypeVar("L", bound=RequestLimit)


class AsgiRateLimits(http.AsyncRateLimits[L]):
    """`RateLimits` for requests that are a scope, or have one."""

    install_hint = "RateLimitMiddleware(app, rate_limits)"
    request_type: ClassVar[type[Any] | None] = None
    """Makes out of a scope what functions of the middleware are called with; None: the scope."""

    @cached_property
    def settlements(self) -> Settlements:
        return Settlements()

    async def aclose(self) -> None:
        """See `AsyncRateLimits.aclose`. A server that ends closes this where it has cancelled what
        is still being answered: that is settled before.
        """
        await self.settlements.end_all()
        await super().aclose()

    def key_function(self, key: Callable[..., Any] | None) -> Callable[..., Any]:
        """See `BaseRateLimits`; `client_address` is the default, too."""
        return super().key_function(None if key is client_address else key)

    def check(
        self, connection: Any, *limits: L, cost: int | None = None
    ) -> Unawaited[Decision | None]:
        """Ask `limits`, which this object has made, for one request, or for one message of a
        websocket: all or none, in one round trip where that can be. Return the decision on all; see
        `RequestLimit.check`. It has no truth value before it is awaited.
        """
        for limit in limits:
            if not isinstance(limit, RequestLimit):
                raise ConfigurationError(
                    "check asks limits that rate_limits.limit(...) has made, not "
                    f"{short_repr(limit)}"
                )
        if not isinstance(scope_of(connection), MutableMapping):
            raise ConfigurationError(
                f"check asks for a request or a websocket, not for {short_repr(connection)}"
            )
        asked: Any = self._check(connection, limits, cost)
        asked.__qualname__ = "RateLimits.check"  # Python warns by it if nobody awaits it
        return UnawaitedCoroutine(asked)

    async def _check(
        self, connection: Any, limits: tuple[L, ...], cost: int | None
    ) -> Decision | None:
        limited = scope_of(connection).get(SCOPE_KEY)
        if limited is None or not limited.is_watched or limited.status_code:
            limited = http.UnwatchedRequest()
        for limit in limits:
            if limit.settles and not limited.is_watched and not limit.shadow:
                limit.raise_without_middleware()
        return await http.decide_all(limits, connection, limited, cost, again=True)


class RateLimits(AsgiRateLimits[RequestLimit]):
    __doc__ = http.AsyncRateLimits.__doc__
    limit_type = RequestLimit
    address_type = ClientAddress


class RateLimitMiddleware:
    """Writes the header fields of what was decided for a request, and answers what was refused.

    With `limits`, it asks these itself, before there is a route: one limit for the application.
    The options are those of `RateLimits.limit`, whose functions take the scope. `exempt_paths` are
    paths below the root path, or end in `/*`. Without `limits` it decides nothing. HEAD is exempt
    where GET is. Fields call it "default", unless it has a `name`.
    """

    def __init__(
        self,
        app: App,
        rate_limits: AsgiRateLimits[Any],
        limits: Any = None,
        *,
        exempt_paths: Sequence[str] = (),
        exempt_methods: Sequence[str] = ("OPTIONS",),
        name: str | None = None,
        key: Callable[..., Any] | None = None,
        cost: int | Callable[..., Any] = 1,
        exempt: Callable[..., Any] | None = None,
        on_store_error: Any = None,
        count_when: Callable[..., Any] | None = None,
        cost_after: Callable[..., Any] | None = None,
        priority: bool = False,
        unit: Any = "requests",
        shadow: bool = False,
    ) -> None:
        if not isinstance(rate_limits, AsgiRateLimits):
            raise ConfigurationError(
                f"rate_limits={short_repr(rate_limits)} is no RateLimits of "
                "distwindow.contrib.asgi or .fastapi"
            )
        if isinstance(exempt_paths, str) or isinstance(exempt_methods, str):
            raise ConfigurationError("exempt_paths and exempt_methods are lists of str, not a str")
        self.app = app
        self.rate_limits = rate_limits
        self._exempt_paths = {path for path in exempt_paths if not path.endswith("/*")}
        self._exempt_trees = tuple(path[:-1] for path in exempt_paths if path.endswith("/*"))
        self._exempt_methods = frozenset(method.upper() for method in exempt_methods)
        self._has_exempt_paths = bool(exempt_paths)
        self._limit: http.RequestLimit | None = None
        if limits is not None:
            self._limit = limit = rate_limits.limit(
                limits, name=name, key=key, cost=cost, exempt=exempt, on_store_error=on_store_error,
                count_when=count_when, cost_after=cost_after, priority=priority, unit=unit,
                shadow=shadow,
            )  # fmt: skip
            limit.name_of = lambda request: "default"  # there is no route yet

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" and self.rate_limits.is_required:
            receive = functools.partial(messages.receive_start, self.rate_limits, receive, send)
        if scope["type"] not in ("http", "websocket") or not self.rate_limits.enabled:
            await self.app(scope, receive, send)
            return
        limit = self._limit
        if limit is not None and (
            method_of(scope) in self._exempt_methods
            or (self._has_exempt_paths and self._is_exempt_path(scope))
        ):
            limit = None
        request_type = self.rate_limits.request_type
        request = scope if limit is None or request_type is None else request_type(scope)
        limited: WatchedRequest | None = scope.get(SCOPE_KEY)
        if limited is not None:  # inside another one, which writes the fields of both
            if limit is not None:
                await http.decided(limit.decide(request, limited), limited)
            await self.app(scope, receive, send)
            return
        limited = scope[SCOPE_KEY] = WatchedRequest()
        self.rate_limits.settlements.begin(limited)

        def send_with_fields(message: Message) -> Any:
            if limited.is_answered:
                return _send_nothing()
            if not limited.status_code:
                if limited or sys.exc_info()[1] is not None:
                    exceeded = limited.refusal_to_send(message)
                    if exceeded is not None:
                        return self._refuse(scope, send, limited, exceeded)
                if message["type"] in STARTS:
                    message = limited.begin(message)
            elif limited.needs_response:
                limited.go_on(message)
                if limited.is_complete:
                    return self._send_and_settle(send, limited, message)
            return send(message)

        try:
            if limit is not None:
                known = limit.decide_at_once(request, limited)
                if not isinstance(known, Decision):
                    await http.decided(known, limited)
            await self.app(scope, receive, send_with_fields)
        except RateLimitExceeded as exceeded:
            if limited.is_answered:
                return
            if limited.status_code:
                raise  # the response has begun: nothing can be said to the client any more
            await self._refuse(scope, send, limited, exceeded)
        finally:
            settled = self.rate_limits.settlements.end(limited)
            if settled is not None:
                await settled

    def _refuse(self, scope: Scope, send: Send, limited: WatchedRequest, exceeded: Any) -> Any:
        messages = limited.refuse(scope, self.rate_limits.refusal_of(exceeded))
        return self._send_and_settle(send, limited, *messages)

    async def _send_and_settle(
        self, send: Send, limited: WatchedRequest, *messages: Message
    ) -> None:
        """Send the last messages of a response, which decides about charges."""
        settled = self.rate_limits.settlements.end(limited)
        if settled is not None:
            await asyncio.sleep(0)  # What is given back is sent before the client can ask again.
        for message in messages:
            await send(message)
        if settled is not None:
            await settled

    def _is_exempt_path(self, scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
            path = path[len(root) :]  # some servers have it in the path, and some do not
        return path in self._exempt_paths or path.startswith(self._exempt_trees)


async def _send_nothing() -> None:
    """Take the place of what a framework sends after a refusal that was sent already."""


__all__ = [
    "EXPOSED_HEADERS",
    "ClientAddress",
    "RateLimitMiddleware",
    "RateLimited",
    "RateLimits",
    "Response",
    "client_address",
    "method_of",
    "scope_of",
]
