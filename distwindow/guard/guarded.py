"""The decorator `guarded` (Sentinel `@SentinelResource`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..core.errors import Blocked, ConfigurationError, short_repr
from ..decorator import (
    describe_function,
    function_name,
    is_async_callable,
)
from .async_guard import AsyncGuard
from .base import BaseGuard
from .guard import Guard
from .guarded_checks import (
    HOW_TO_WRITE,
    check_call_arguments,
    check_function,
    check_handlers,
    check_signatures,
)

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound=Callable[..., Any])


def _requires_resource(guarded: G) -> G:
    """Return the function `guarded` with an error for `@guarded` and `@guarded("name")`."""

    @functools.wraps(guarded)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and not ("resource" in kwargs and (args or "guard" in kwargs)):
            given = short_repr(args[0]) if args else ", ".join(kwargs)
            raise ConfigurationError(
                f"guarded({given}) needs a guard and the name of a resource; {HOW_TO_WRITE}"
            )
        return guarded(*args, **kwargs)

    return cast(G, checked)


@_requires_resource
def guarded(
    guard: Guard | AsyncGuard,
    resource: str | Callable[..., str],
    *,
    fallback: Callable[..., Any] | None = None,
    on_block: Callable[..., Any] | None = None,
    origin: str | Callable[..., str | None] | None = None,
    cost: int | Callable[..., int] = 1,
) -> Callable[[F], F]:
    """Return a decorator: each call of the function goes through `guard.entry(resource)`.

    A refused call returns what `on_block` returns for the same arguments; without `on_block`, what
    `fallback` returns; without both it raises the `Blocked`. A call whose function raises what the
    guard counts as a failure (`errors`, `ignore`) returns what `fallback` returns. Both are called
    while the exception is handled (`sys.exc_info`). A refusal that the function itself meets, in
    another entry, is neither: it is raised. So is a `StoreError` of the entry, for which no handler
    is called: the function has not failed, nobody has refused it, and a handler would hide that
    nothing is guarded.

    `resource`, `origin` and `cost` may be functions of the function's own arguments. With an
    `AsyncGuard` the function is a coroutine function, and the handlers may be of either kind.
    Raises `ConfigurationError` for what can never work, when it is applied.
    """
    if not isinstance(guard, BaseGuard):
        raise ConfigurationError(
            f"guarded({short_repr(guard)}, ...): the first argument is a Guard or an AsyncGuard"
        )
    check_call_arguments(resource, origin, cost)
    check_handlers(fallback, on_block)
    handlers = (fallback, on_block)
    call = (resource, origin, cost)

    def decorate(function: Any) -> Any:
        check_function(function)
        if isinstance(guard, AsyncGuard):
            made = _guard_async(guard, call, handlers, function)
        else:
            made = _guard(guard, call, handlers, function)
        check_signatures(
            function,
            {"resource": resource, "origin": origin, "cost": cost}
            | {"fallback": fallback, "on_block": on_block},
        )
        return made

    return decorate


_Handlers = tuple["Callable[..., Any] | None", "Callable[..., Any] | None"]


def _guard(
    guard: Guard, call: tuple[Any, ...], handlers: _Handlers, function: Callable[..., Any]
) -> Callable[..., Any]:
    if is_async_callable(function):
        raise ConfigurationError(
            f"{describe_function(function)}; use an AsyncGuard, as its call ends before its work "
            "begins"
        )
    for handler in handlers:
        if handler is not None and is_async_callable(handler):
            raise ConfigurationError(
                f"{function_name(handler)} is a coroutine function, which nothing awaits"
            )

    @functools.wraps(function)
    def guarded_function(*args: Any, **kwargs: Any) -> Any:
        entered, raised = False, None
        try:
            with guard.entry(*_resolve(call, args, kwargs)):
                entered = True
                try:
                    return function(*args, **kwargs)
                except BaseException as exc:
                    raised = exc
                    raise
        except BaseException as exc:
            handler = _handler_of(guard, handlers, exc, entered, exc is raised)
            if handler is None:
                raise
            return handler(*args, **kwargs)
        finally:
            raised = None  # an exception refers to this frame, and the frame to the exception

    return guarded_function


def _guard_async(
    guard: AsyncGuard, call: tuple[Any, ...], handlers: _Handlers, function: Callable[..., Any]
) -> Callable[..., Any]:
    if not is_async_callable(function):
        raise ConfigurationError(f"{describe_function(function)}; use a Guard")

    @functools.wraps(function)
    async def guarded_function(*args: Any, **kwargs: Any) -> Any:
        entered, raised = False, None
        try:
            async with guard.entry(*_resolve(call, args, kwargs)):
                entered = True
                try:
                    return await function(*args, **kwargs)
                except BaseException as exc:
                    raised = exc
                    raise
        except BaseException as exc:
            handler = _handler_of(guard, handlers, exc, entered, exc is raised)
            if handler is None:
                raise
            value = handler(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        finally:
            raised = None

    return guarded_function


def _handler_of(
    guard: BaseGuard, handlers: _Handlers, exc: BaseException, entered: bool, of_function: bool
) -> Callable[..., Any] | None:
    """Return what is called instead of raising `exc`; None: raise it."""
    fallback, on_block = handlers
    if of_function:
        return fallback if guard._failure_types.failed(exc) else None
    if isinstance(exc, Blocked) and not entered:
        return fallback if on_block is None else on_block
    return None


def _resolve(call: tuple[Any, ...], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of the entry of one call."""
    return tuple(value(*args, **kwargs) if callable(value) else value for value in call)
