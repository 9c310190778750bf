"""Decorators `limit` and `protect`: their key, and the functions that `limit` makes.

A mistake in a decorator would be silent: a key that is the same for everybody limits all together,
and a function in the place of the key is never called. So everything that cannot be intended is an
error when the decorator is applied.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from ..errors import ConfigurationError, RateLimitExceeded, short_repr
from ..ring.decision import Decision
from ..ring.key import normalize_key, ring_name_prefix
from ..ring.limit import Limit, max_cost, reads_as_limit
from ..runtime.command_cache import check_cost
from ..support.callables import (
    FunctionArguments,
    KeyTemplate,
    check_decorated,
    check_not_async,
    check_signatures,
    describe_function,
    function_name,
    is_async_callable,
    is_async_generator,
)

F = TypeVar("F", bound=Callable[..., Any])

_OfCall: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], Any]"
"""Returns the key or the cost of a call from its arguments."""


class DecoratorKey:
    """The key that a decorator was given: `text`, a template over the arguments of the decorated
    function (bytes and a `Key` are taken as they are), or `key`, a function of these arguments.

    `decorator` is how users write it, such as "limiter.limit". Raises `TypeError` unless one of
    both is given, and for a function as the text; `ConfigurationError` for what is no key.
    """

    def __init__(self, decorator: str, prefix: str, text: Any, key: Any) -> None:
        self._name = decorator.partition(".")[2]
        self._prefix = prefix
        how = f'@{decorator}("key:{{argument}}") or @{decorator}(key=function)'
        if callable(text):
            raise TypeError(
                f"the first argument of {self._name} is the text of a key, and not a function "
                f"({function_name(text)}): write {how}"
            )
        if (text is None) == (key is None):
            given = "both were given" if text is not None else "there is none"
            raise TypeError(f"{self._name} takes one key, and {given}: write {how}")
        if reads_as_limit(text):
            raise ConfigurationError(
                f"{self._name}({text!r}) is given a limit in the place of a key; the object has "
                f"the limits, and this is the key: {how}"
            )
        self._key = text if key is None else key
        if callable(self._key):
            check_not_async(f"{self._name}: key", self._key)
        elif not isinstance(self._key, str):
            self._check(self._key)

    def bind(self, function: Any) -> _OfCall:
        """Return what gives the key of a call of `function`. Raises `ConfigurationError` for a
        template that names no argument of it, and for a key function that cannot take these.
        """
        key = self._key
        if callable(key):
            check_signatures(function, {f"{self._name}: key": key})
            return lambda args, kwargs: key(*args, **kwargs)
        if isinstance(key, str):
            if "{" not in key and "}" not in key:
                self._check(key)
            else:
                name = function_name(function)
                shown = f"{self._name}({short_repr(key)}) of {name}"
                template = KeyTemplate(key, FunctionArguments(name, function), shown)
                if not template.is_fixed:
                    return template.fill
                key = template.fill((), {})  # literal braces alone
        return lambda args, kwargs: key

    def _check(self, key: Any) -> None:
        try:
            ring_name_prefix(self._prefix, normalize_key(key))
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"{self._name}({short_repr(key)}): {exc}; the key is text, in which {{name}} "
                "stands for an argument, bytes, a Key, or key=function"
            ) from exc


def check_decorator_cost(cost: Any, limits: tuple[Limit, ...]) -> None:
    """Raise `ConfigurationError` for a cost with which no call could ever be admitted."""
    if callable(cost):
        check_not_async("limit: cost", cost)
        return
    most = max_cost(limits)
    try:
        check_cost(cost, most)
    except ValueError as exc:
        raise ConfigurationError(
            f"limit(cost={short_repr(cost)}): {exc}; write a whole number from 1 to {most}, or a "
            "function of the limited function's arguments that returns one"
        ) from exc


def limit_function(limiter: Any, key: DecoratorKey, cost: Any, function: Any) -> Any:
    """Return `function` with a call of `limiter` before each of its calls."""
    key_of, cost_of = _bind(key, cost, function)
    if is_async_callable(function) or is_async_generator(function):
        raise ConfigurationError(
            f"{describe_function(function)}; use AsyncLimiter.limit, "
            "as a blocking limiter would stop the event loop"
        )

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        decision = limiter.decider.admit(key_of(args, kwargs), cost_of(args, kwargs))
        _raise_if_refused(decision)
        return function(*args, **kwargs)

    return limited


def limit_async_function(limiter: Any, key: DecoratorKey, cost: Any, function: Any) -> Any:
    """Do as `limit_function`, for coroutine functions and asynchronous generators."""
    key_of, cost_of = _bind(key, cost, function)
    if is_async_generator(function):

        async def admit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = limiter.decider.admit(key_of(args, kwargs), cost_of(args, kwargs))
            _raise_if_refused(await call)

        return _limit_generator(function, admit)
    if not is_async_callable(function):
        raise ConfigurationError(f"{describe_function(function)}; use Limiter.limit")

    @functools.wraps(function)
    async def limited(*args: Any, **kwargs: Any) -> Any:
        call = limiter.decider.admit(key_of(args, kwargs), cost_of(args, kwargs))
        _raise_if_refused(await call)
        return await function(*args, **kwargs)

    return limited


def _bind(key: DecoratorKey, cost: Any, function: Any) -> tuple[_OfCall, _OfCall]:
    """Return what gives the key, and the cost, of a call of `function`."""
    check_decorated("limit", function)
    check_signatures(function, {"limit: cost": cost})
    if callable(cost):
        return key.bind(function), lambda args, kwargs: cost(*args, **kwargs)
    return key.bind(function), lambda args, kwargs: cost


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


def _raise_if_refused(decision: Decision) -> None:
    if not decision.allowed:
        raise RateLimitExceeded(decision)
