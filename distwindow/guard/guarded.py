"""The decorator `guarded` (Sentinel `@SentinelResource`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..errors import Blocked, ConfigurationError, short_repr
from ..runtime.options import check_origin
from ..support.callables import (
    check_call_ends_with_work,
    check_decorated,
    check_handler,
    check_not_async,
    check_signatures,
    describe_function,
    is_async_callable,
)
from .guard import AsyncGuard, BaseGuard, Guard, check_cost, check_name

F = TypeVar("F", bound=Callable[..., Any])

_HOW_TO_WRITE = 'write @guarded(guard, "name") above the function'


def _requires_resource(guarded: F) -> F:
    """Return the function `guarded` with an error for `@guarded` and `@guarded("name")`."""

    @functools.wraps(guarded)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and not ("resource" in kwargs and (args or "guard" in kwargs)):
            given = short_repr(args[0]) if args else ", ".join(kwargs)
            raise ConfigurationError(
                f"guarded({given}) needs a guard and the name of a resource; {_HOW_TO_WRITE}"
            )
        return guarded(*args, **kwargs)

    return cast(F, checked)


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
    is called: the function has neither failed nor been refused, and nothing is guarded then.

    `resource`, `origin` and `cost` may be functions of the function's own arguments. With an
    `AsyncGuard` the function is a coroutine function, and the handlers may be of either kind.
    Raises `ConfigurationError` for what can never work, when it is applied.
    """
    if not isinstance(guard, BaseGuard):
        raise ConfigurationError(
            f"guarded({short_repr(guard)}, ...): the first argument is a Guard or an AsyncGuard"
        )
    _check_call_arguments(resource, origin, cost)
    is_async = isinstance(guard, AsyncGuard)
    check_handler("fallback", fallback, may_be_async=is_async)
    check_handler("on_block", on_block, may_be_async=is_async)
    handlers = (fallback, on_block)
    call = (resource, origin, cost)

    def decorate(function: Any) -> Any:
        check_decorated("guarded", function)
        check_call_ends_with_work(function, "guard.entry")
        made = _guarded_function(guard, call, handlers, function)
        check_signatures(
            function,
            {"resource": resource, "origin": origin, "cost": cost}
            | {"fallback": fallback, "on_block": on_block},
            "; the exception that is handled is sys.exc_info()[1]",
        )
        return made

    return decorate


def _check_call_arguments(resource: Any, origin: Any, cost: Any) -> None:
    """Raise for arguments of the entry with which no call could begin."""
    for name, value, check in (
        ("resource", resource, lambda value: check_name("resource", value)),
        ("origin", origin, check_origin),
        ("cost", cost, check_cost),
    ):
        if callable(value):
            check_not_async(name, value)
            continue
        try:
            check(value)
        except (TypeError, ValueError) as exc:
            hint = f"; {_HOW_TO_WRITE}" if name == "resource" else ""
            raise ConfigurationError(f"guarded: {exc}{hint}") from exc


_Handlers = tuple["Callable[..., Any] | None", "Callable[..., Any] | None"]


def _guarded_function(
    guard: Any, call: tuple[Any, ...], handlers: _Handlers, function: Callable[..., Any]
) -> Callable[..., Any]:
    is_async = isinstance(guard, AsyncGuard)
    if is_async_callable(function) != is_async:
        instead = "an AsyncGuard, as its call ends before its work begins"
        raise ConfigurationError(
            f"{describe_function(function)}; use {'a Guard' if is_async else instead}"
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

    @functools.wraps(function)
    async def guarded_coroutine_function(*args: Any, **kwargs: Any) -> Any:
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

    return guarded_coroutine_function if is_async else guarded_function


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
