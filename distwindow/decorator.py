"""The decorator `limit`: the limited functions that it makes, and the checks when it is applied.

Without the checks a mistake would be silent: `@limiter.limit` without parentheses makes the
function the key, and nothing is ever limited, or even called. Therefore everything that cannot be
intended raises `ConfigurationError`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import CodeType, FunctionType
from typing import Any, TypeAlias, TypeVar, cast

from .core.decision import Decision
from .core.errors import ConfigurationError, RateLimitExceeded, short_repr
from .core.key import AnyKey, normalize_key
from .core.limit import Limit
from .operations.command_cache import check_cost
from .protocol.keys import ring_name_prefix

F = TypeVar("F", bound=Callable[..., Any])

_HOW_TO_WRITE = 'write @limiter.limit("key") or @limiter.limit(key_function) above the function'


_Acquire: TypeAlias = "Callable[[AnyKey, int], Decision]"
_AsyncAcquire: TypeAlias = "Callable[[AnyKey, int], Awaitable[Decision]]"


class LimitDecorator:
    """What `limiter.limit(key)` returns. It is called once for each function that is to be limited;
    `make` returns the limited function.
    """

    def __init__(self, key: Any, make: Callable[[Any], Any]) -> None:
        self._key = key
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self._has_name_of_key():
            raise ConfigurationError(self._key_message())
        function = args[0]
        if isinstance(function, (staticmethod, classmethod)):
            kind = type(function).__name__
            raise ConfigurationError(
                f"limit was put above @{kind} on {function_name(function.__func__)}; "
                f"write @{kind} above it and limit below"
            )
        if not callable(function):
            why = f"{short_repr(function)} is not callable, so it cannot be limited; "
            raise ConfigurationError(
                why + (self._key_message() if callable(self._key) else _HOW_TO_WRITE)
            )
        if inspect.isclass(function):
            raise ConfigurationError(_class_message(function))
        return self._make(function)

    def __set_name__(self, owner: type, name: str) -> None:
        """Raise where `@limiter.limit` without parentheses has replaced a method by this object.
        Python calls this when the class is created.
        """
        if getattr(self._key, "__name__", None) == name:
            raise ConfigurationError(self._key_message())

    def _has_name_of_key(self) -> bool:
        """True if this object has taken the name of its key function, as happens with
        `@limiter.limit` without parentheses.
        """
        found: Any = sys.modules.get(getattr(self._key, "__module__", None) or "")
        for part in getattr(self._key, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return found is self

    def _key_message(self) -> str:
        if not callable(self._key):
            return (
                f"the decorator limit({short_repr(self._key)}) takes one function; {_HOW_TO_WRITE}"
            )
        return (
            f"{function_name(self._key)} was given to limit as the key function, and is not "
            f"limited; if it was to be limited, {_HOW_TO_WRITE}"
        )


def requires_key(limit: F) -> F:
    """Return the method `limit` with an error for a call without a key."""

    @functools.wraps(limit)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and "key" not in kwargs:  # the first one is the limiter
            raise ConfigurationError(f"limit() needs a key: {_HOW_TO_WRITE}")
        return limit(*args, **kwargs)

    return cast(F, checked)


def check_arguments(
    key: Any, cost: Any, prefix: str, limits: tuple[Limit, ...], line: int, caller: CodeType
) -> None:
    """Raise `ConfigurationError` for a key or a cost with which no call could ever be decided.

    `line` and `caller`: the line and the code object that call `limit`.
    """
    if callable(key):
        if inspect.isclass(key) and _is_class_statement_there(key, line, caller):
            raise ConfigurationError(_class_message(key))
        if _is_decorated_there(key, line, caller) or _is_bare_decorator(line, caller):
            raise ConfigurationError(
                f"@limiter.limit without parentheses on {function_name(key)}: {_HOW_TO_WRITE}"
            )
        _check_not_async(key, "key")
    else:
        try:
            ring_name_prefix(prefix, normalize_key(key))
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"limit({short_repr(key)}): {exc}; the key is text, bytes, a Key, or a function of "
                "the limited function's arguments that returns one"
            ) from exc
    if callable(cost):
        _check_not_async(cost, "cost")
        return
    most = min(limit.amount for limit in limits)
    try:
        check_cost(cost, most)
    except ValueError as exc:
        raise ConfigurationError(
            f"limit(cost={short_repr(cost)}): {exc}; write a whole number from 1 to {most}, or a "
            "function of the limited function's arguments that returns one"
        ) from exc


def is_async_callable(function: Any) -> bool:
    """True if what `function` returns is awaited: for coroutine functions, methods and partials of
    them, and objects whose `__call__` is a coroutine function.
    """
    return any(inspect.iscoroutinefunction(form) for form in _function_and_call(function))


def is_async_generator(function: Any) -> bool:
    """True if `function` returns an asynchronous generator."""
    return any(inspect.isasyncgenfunction(form) for form in _function_and_call(function))


def limit_function(acquire: _Acquire, key: Any, cost: Any, function: Any) -> Any:
    """Return `function` with a call of `acquire(key, cost)` before each of its calls."""
    if is_async_callable(function) or is_async_generator(function):
        raise ConfigurationError(
            f"{describe_function(function)}; use AsyncLimiter.limit, "
            "as a blocking limiter would stop the event loop"
        )

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _raise_if_refused(acquire(_resolve(key, args, kwargs), _resolve(cost, args, kwargs)))
        return function(*args, **kwargs)

    return limited


def limit_async_function(acquire: _AsyncAcquire, key: Any, cost: Any, function: Any) -> Any:
    """Do as `limit_function`, for coroutine functions and asynchronous generators."""
    if is_async_generator(function):

        async def admit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _raise_if_refused(
                await acquire(_resolve(key, args, kwargs), _resolve(cost, args, kwargs))
            )

        return _limit_generator(function, admit)
    if not is_async_callable(function):
        raise ConfigurationError(f"{describe_function(function)}; use Limiter.limit")

    @functools.wraps(function)
    async def limited(*args: Any, **kwargs: Any) -> Any:
        _raise_if_refused(await acquire(_resolve(key, args, kwargs), _resolve(cost, args, kwargs)))
        return await function(*args, **kwargs)

    return limited


def _limit_generator(
    function: Callable[..., AsyncGenerator[Any, Any]],
    admit: Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[object]],
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Return `function` with generators that await `admit` first. What is sent to them and thrown
    into them is passed on to the generator of `function`, because `asynccontextmanager` throws.
    """

    @functools.wraps(function)
    async def limited(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        await admit(args, kwargs)
        inner = function(*args, **kwargs)
        try:
            item = await inner.__anext__()
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as exc:  # also `CancelledError`: `inner` handles all of them
                    item = await inner.athrow(exc)
                else:
                    item = await inner.asend(sent)
        except StopAsyncIteration:
            return

    return limited


def _resolve(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key or cost of one call, from what was given to the decorator."""
    return value(*args, **kwargs) if callable(value) else value


def _raise_if_refused(decision: Decision) -> None:
    if not decision.allowed:
        raise RateLimitExceeded(decision)


def function_name(function: Any) -> str:
    """Return the name of `function` for error messages."""
    return getattr(function, "__qualname__", None) or short_repr(function)


def describe_function(function: Any) -> str:
    """Return the name and the kind of `function` for error messages."""
    if not is_async_callable(function) and not is_async_generator(function):
        return f"{function_name(function)} is no coroutine function"
    kind = "a coroutine function" if is_async_callable(function) else "an async generator"
    below, _ = _function_and_call(function)
    of_itself = inspect.iscoroutinefunction(below) or inspect.isasyncgenfunction(below)
    if not of_itself:
        kind = f"an object whose __call__ is {kind}"
    return f"{function_name(function)} is {kind}"


def _class_message(found: type) -> str:
    return (
        f"{function_name(found)} is a class, and limit would put a function in its place; put it "
        'above one of its methods, as in @limiter.limit("key"), or above a function that makes the '
        "object"
    )


def _function_and_call(function: Any) -> tuple[Any, Any]:
    """Return the function inside `functools.partial`, and the `__call__` of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        return function, None
    return function, inspect.getattr_static(type(function), "__call__", None)


def _check_not_async(function: Any, argument: str) -> None:
    if is_async_callable(function) or is_async_generator(function):
        raise ConfigurationError(
            f"limit({argument}={function_name(function)}): the {argument} function may not be "
            f"asynchronous; if {function_name(function)} was to be limited, {_HOW_TO_WRITE}"
        )


def _is_bare_decorator(line: int, caller: CodeType) -> bool:
    """True if the source line that calls `limit` is `@limiter.limit`, without parentheses. Python
    3.10 names the line of the `def` below it; not if it has a `=`: that may be a call in a default.

    Finds functions that another decorator has wrapped without `functools.wraps`. False where the
    source cannot be read; then the first call of the function raises.
    """
    text = linecache.getline(caller.co_filename, line).rstrip()
    pattern = r"\s*@[\w.\s]+(#.*)?"
    if sys.version_info < (3, 11):
        pattern += r"|\s*(async\s+)?def\s[^=]*"
    return re.fullmatch(pattern, text) is not None


def _is_class_statement_there(key: type, line: int, caller: CodeType) -> bool:
    """True if `key` is the class of a `class` statement that the caller is executing."""
    bodies = [const for const in caller.co_consts if isinstance(const, CodeType)]
    return any(
        body.co_name == key.__name__ and body.co_firstlineno <= line <= _last_line(body)
        for body in bodies
    )


def _is_decorated_there(key: Any, line: int, caller: CodeType) -> bool:
    """True if `key` is the function of a `def` statement that the caller is executing.

    Then it is being decorated: its code is a constant of the caller's code, and the caller is at a
    line between the first decorator and the end of the function. A key function that was defined
    before is not at that line. False where another decorator has wrapped the function without
    `functools.wraps`; then the call of the decorator raises.
    """
    key = inspect.unwrap(key)
    if not isinstance(key, FunctionType) or key.__name__ == "<lambda>":
        return False
    code = key.__code__
    if not any(const is code for const in caller.co_consts):
        return False
    return code.co_firstlineno <= line <= _last_line(code)


def _last_line(code: CodeType) -> int:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    inner = [_last_line(const) for const in code.co_consts if isinstance(const, CodeType)]
    return max([code.co_firstlineno, *lines, *inner])
