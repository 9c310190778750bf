"""Limits of the requests and the tools of a FastMCP server, for all its processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ..away.outages import RETRY_AFTER_S
from ..away.policy import OnStoreError
from ..errors import ConfigurationError, StoreError, short_repr
from ..observer import Observer
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec
from ..runtime.options import ClockChoice, Consistency, Options
from . import http, needs
from .tasks import FailureLog

with needs("fastmcp"):
    import mcp
    from fastmcp.exceptions import FastMCPError, ToolError
    from fastmcp.server.middleware import Middleware
if TYPE_CHECKING:  # older versions have it elsewhere
    from fastmcp.server.middleware import CallNext, MiddlewareContext

__all__ = ["RateLimits"]
Context: TypeAlias = "MiddlewareContext[Any]"
OfContext: TypeAlias = "Callable[[Context], Any]"
_LOG = logging.getLogger("distwindow")
_REFUSED = -32000  # as FastMCP's own limits have it; JSON-RPC leaves it to servers
_MCP: Any = mcp
_MCPError: Any = getattr(mcp, "MCPError", None) or _MCP.McpError  # before mcp 2


class _Everybody(http.ClientAddress):
    def __call__(self, request: object) -> str:  # over stdio there is no address
        return "(all)"


class RequestLimit(http.RequestLimit):
    rate_limits: RateLimits

    async def check(self, context: Context) -> None:
        """Ask for a request; raise what FastMCP answers a refused one with."""
        cause: Exception
        limit, after_s = self.text, math.inf
        try:
            await self.decide(context, http.UnwatchedRequest())
            return
        except (FastMCPError, _MCPError):  # of a function, as its own answer
            raise
        except http.RateLimited as exc:
            cause, text, after_s, limit = exc, str(exc), exc.retry_after, str(exc.decision.limit)
        except StoreError as exc:
            cause, after_s = exc, RETRY_AFTER_S
            text = "the rate limit of this request cannot be checked now; try again in 1 s"
        except Exception as exc:  # a mistake; FastMCP 2 would send its text and log nothing
            cause = exc
            text = "the rate limit of this request cannot be checked: the server is misconfigured"
            if self.rate_limits.failures.unlogged_before((self.name, type(exc))) is not None:
                _LOG.exception("requests are refused: their limit %r raises %r", self.name, exc)
        if context.method == "tools/call":
            raise ToolError(text) from cause
        seconds = None if math.isinf(after_s) else math.ceil(after_s * 1000) / 1000
        data = {"retry_after": seconds, "limit": limit}
        if hasattr(mcp, "MCPError"):
            raise _MCPError(_REFUSED, text, data) from cause
        raise _MCPError(_MCP.ErrorData(code=_REFUSED, message=text, data=data)) from cause


class _Requests(Middleware):
    def __init__(self, limit: RequestLimit) -> None:
        self._limit = limit

    async def on_request(self, context: Context, call_next: CallNext[Any, Any]) -> Any:
        await self._limit.check(context)
        return await call_next(context)


class _Tools(Middleware):
    def __init__(self, limits: Mapping[str, RequestLimit | None]) -> None:
        self._limits = limits

    async def on_call_tool(self, context: Context, call_next: CallNext[Any, Any]) -> Any:
        tool, limits = context.message.name, self._limits
        fitting = (pattern for pattern in limits if fnmatchcase(tool, pattern))
        limit = limits[tool] if tool in limits else limits.get(next(fitting, ""))
        if limit is not None:
            await limit.check(context)
        return await call_next(context)


class RateLimits(http.AsyncRateLimits[RequestLimit]):
    """The limits of an MCP server, in all its processes, as `RateLimits` of a web application.

    `on_store_error` is what a request gets that the store has not decided: "allow", "deny",
    "raise" (refused, too; the `StoreError` is the cause), "local" (by the `share` of this process).
    `async with rate_limits:` asks the store once, so that a log line says if limits are
    not enforced, and closes it at its end. Raises `ConfigurationError` for what can never work.
    """

    limit_type, address_type = RequestLimit, _Everybody

    def __init__(
        self, store: Any, *, on_store_error: OnStoreError = http.NOT_GIVEN,
        prefix: str | None = None, timeout: float = 0.25, clock: ClockChoice = "server",
        consistency: Consistency = "direct", share: float | None = None, enabled: bool = True,
        require: bool = False, name: str | None = None, observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None, time: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        Options(on_store_error=on_store_error, consistency=consistency, share=share)  # or raises
        super().__init__(
            store, on_store_error=on_store_error, prefix=prefix, timeout=timeout, clock=clock,
            consistency=consistency, share=share, enabled=enabled, require=require, name=name,
            observer=observer, key_label=key_label, time=time,
        )  # fmt: skip
        self.failures = FailureLog(time.monotonic)

    def limit(self, *_: Any, **options: Any) -> NoReturn:
        """Raise `ConfigurationError`: neither this object nor a limit by itself is middleware."""
        add = "mcp.add_middleware(rate_limits."
        raise ConfigurationError(f'write {add}middleware("9/minute")) or {add}tools({{"*": ...}}))')

    __call__ = limit  # as FastMCP calls what add_middleware was given

    def middleware(
        self, limits: LimitSpec | OfContext, *, key: OfContext | None = None,
        cost: int | OfContext = 1, exempt: OfContext | None = None, name: str = "requests",
    ) -> Middleware:  # fmt: skip
        """Return the middleware that limits all requests: calls of tools, lists, `initialize`.

        `key` is a function of the `MiddlewareContext` that returns the client; without it, and
        where it returns None, all count together. `limits` and `cost` may be functions, too, and
        where `exempt` returns true nothing is asked; they may be asynchronous. Two with different
        limits need a `name` each. The answer to a refused call of a tool is a `ToolError`, and to
        others an error of code -32000 with `data`: `retry_after` (seconds) and `limit`.
        """
        options: dict[str, Any] = {"key": key, "cost": cost, "exempt": exempt}
        return _Requests(RequestLimit(self, limits, name=name or "", **options))

    def tools(
        self, limits: Mapping[str, LimitSpec | OfContext | None], *, key: OfContext | None = None,
        cost: int | OfContext = 1, exempt: OfContext | None = None, name: str = "tools/call",
    ) -> Middleware:  # fmt: skip
        """Return the middleware that limits calls of tools, and no other requests: `limits` by
        names, in which `*` stands for any characters. A call counts under its own name, or else
        under the first that fits; None is no limit. The rest is as for `middleware`.
        """
        tools = list(limits) if isinstance(limits, Mapping) else []
        if not tools or not all(each and isinstance(each, str) for each in (name, *tools)):
            given = f"{short_repr(limits)}, name={short_repr(name)}"
            raise ConfigurationError(f'write tools({{"search": "10/minute"}}), and not {given}')
        for tool in tools:
            first = next((each for each in tools if fnmatchcase(tool, each)), tool)
            if "*" in tool and tool != first:
                raise ConfigurationError(f"write {tool!r} before {first!r}, which fits all it fits")
        options: dict[str, Any] = {"key": key, "cost": cost, "exempt": exempt}
        of = {tool: RequestLimit(self, limit, name=f"{name} {tool}", **options)
              for tool, limit in limits.items() if limit is not None}  # fmt: skip
        return _Tools({tool: of.get(tool) for tool in tools})
