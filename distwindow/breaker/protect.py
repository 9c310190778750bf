"""The decorator `protect`: each call of a function goes through a circuit breaker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Protocol, TypeVar

from ..callables import (
    check_call_ends_with_work,
    check_decorated,
    check_signatures,
    describe_function,
    is_async_callable,
)
from ..core.breaker_state import BreakerOpen
from ..core.errors import ConfigurationError
from ..core.key import AnyKey
from ..decorator import DecoratorKey
from .call import AsyncCall, Call

F = TypeVar("F", bound=Callable[..., Any])


class _Breaker(Protocol):
    def call(self, key: AnyKey) -> Call[Any]: ...


class _AsyncBreaker(Protocol):
    def call(self, key: AnyKey) -> AsyncCall[Any]: ...


def protect_function(breaker: _Breaker, key: DecoratorKey, fallback: Any, function: Any) -> Any:
    """Return `function` with its calls inside `breaker.call`."""
    _check(function, fallback)
    if is_async_callable(function):
        raise ConfigurationError(
            f"{describe_function(function)}; use AsyncCircuitBreaker.protect, as its call ends "
            "before its work begins"
        )
    key_of = key.bind(function)

    @functools.wraps(function)
    def protected(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # Only a refusal of this call leads to the fallback, and not a `BreakerOpen` that the
            # function itself raises.
            try:
                stack.enter_context(breaker.call(key_of(args, kwargs)))
            except BreakerOpen:
                if fallback is None:
                    raise
            else:
                return function(*args, **kwargs)
        return fallback(*args, **kwargs)

    return protected


def protect_async_function(
    breaker: _AsyncBreaker, key: DecoratorKey, fallback: Any, function: Any
) -> Any:
    """Do as `protect_function`, for coroutine functions. The fallback may be of either kind."""
    _check(function, fallback)
    if not is_async_callable(function):
        raise ConfigurationError(f"{describe_function(function)}; use CircuitBreaker.protect")
    key_of = key.bind(function)

    @functools.wraps(function)
    async def protected(*args: Any, **kwargs: Any) -> Any:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(breaker.call(key_of(args, kwargs)))
            except BreakerOpen:
                if fallback is None:
                    raise
            else:
                return await function(*args, **kwargs)
        value = fallback(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return protected


def _check(function: Any, fallback: Any) -> None:
    """Raise `ConfigurationError` for what cannot be protected."""
    check_decorated("protect", function)
    check_call_ends_with_work(function, "breaker.call")
    check_signatures(function, {"protect: fallback": fallback})
