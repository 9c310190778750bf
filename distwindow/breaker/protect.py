"""The decorator `protect`: each call of a function goes through a circuit breaker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Protocol, TypeVar

from ..core.breaker_state import BreakerOpen
from ..core.errors import ConfigurationError, short_repr
from ..core.key import AnyKey
from ..decorator import (
    describe_function,
    function_name,
    is_async_callable,
    is_async_generator,
)
from .call import AsyncCall, Call

F = TypeVar("F", bound=Callable[..., Any])

_HOW_TO_WRITE = 'write @breaker.protect("key") or @breaker.protect(key_function)'


class _Breaker(Protocol):
    def call(self, key: AnyKey) -> Call[Any]: ...


class _AsyncBreaker(Protocol):
    def call(self, key: AnyKey) -> AsyncCall[Any]: ...


def protect_function(breaker: _Breaker, key: Any, fallback: Any, function: Any) -> Any:
    """Return `function` with its calls inside `breaker.call`."""
    _check(function, fallback)
    if is_async_callable(function):
        raise ConfigurationError(
            f"{describe_function(function)}; use AsyncCircuitBreaker.protect, as its call ends "
            "before its work begins"
        )
    if fallback is not None and is_async_callable(fallback):
        raise ConfigurationError(
            f"fallback={function_name(fallback)} is a coroutine function, which nothing awaits"
        )

    @functools.wraps(function)
    def protected(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # Only a refusal of this call leads to the fallback, and not a `BreakerOpen` that the
            # function itself raises.
            try:
                stack.enter_context(breaker.call(_resolve(key, args, kwargs)))
            except BreakerOpen:
                if fallback is None:
                    raise
            else:
                return function(*args, **kwargs)
        return fallback(*args, **kwargs)

    return protected


def protect_async_function(breaker: _AsyncBreaker, key: Any, fallback: Any, function: Any) -> Any:
    """Do as `protect_function`, for coroutine functions. The fallback may be of either kind."""
    _check(function, fallback)
    if not is_async_callable(function):
        raise ConfigurationError(f"{describe_function(function)}; use CircuitBreaker.protect")

    @functools.wraps(function)
    async def protected(*args: Any, **kwargs: Any) -> Any:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(breaker.call(_resolve(key, args, kwargs)))
            except BreakerOpen:
                if fallback is None:
                    raise
            else:
                return await function(*args, **kwargs)
        value = fallback(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return protected


class ProtectDecorator:
    """What `breaker.protect(key)` returns; `make` returns the protected function."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not callable(args[0]):
            raise ConfigurationError(
                f"the decorator protect takes one function; {_HOW_TO_WRITE} above the function"
            )
        return self._make(args[0])


def _check(function: Any, fallback: Any) -> None:
    """Raise `ConfigurationError` for what cannot be protected."""
    if inspect.isclass(function) or isinstance(function, (staticmethod, classmethod)):
        raise ConfigurationError(
            f"{short_repr(function)} is not a function; put protect below @staticmethod and "
            "@classmethod, and above methods of a class"
        )
    if is_async_generator(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{function_name(function)} is a generator function, whose call ends before its work "
            "begins; use `breaker.call(key)` inside it"
        )
    if fallback is not None and not callable(fallback):
        raise ConfigurationError(
            f"fallback={short_repr(fallback)} is not a function; it is called with the arguments "
            "of the refused call"
        )


def _resolve(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key of one call, from what was given to the decorator."""
    return key(*args, **kwargs) if callable(key) else key
