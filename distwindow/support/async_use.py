"""Mistakes that would pass unnoticed, or with an error from deep inside: `with` in the place of
`async with`, a condition without its `await`, a block as a condition, another event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..errors import ConfigurationError

T = TypeVar("T")
R = TypeVar("R", covariant=True)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise `ConfigurationError` where asyncio has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "no event loop of asyncio runs here, which asynchronous calls need; under trio, call a "
            "Limiter in a thread: await trio.to_thread.run_sync(limiter.acquire, key)"
        ) from None


async def result_of(answer: Any) -> Any:
    """Return what a limiter has answered, or what is awaited of an `AsyncLimiter`."""
    return (await answer) if hasattr(answer, "__await__") else answer


def run_at_once(steps: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that awaits nothing, as its limiter has answered already."""
    try:
        steps.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError(f"{steps!r} has waited for an event loop")


class Unawaited(Coroutine[Any, Any, R]):
    """An answer that is awaited, and then used in a condition.

    Without `await` a coroutine would be true, and `if limiter.try_acquire(key):` would admit all
    calls. This has no truth value. Otherwise it is as a coroutine: `asyncio.create_task`, `gather`
    and `wait_for` take it. Nothing begins before it is awaited.
    """

    __slots__ = ("_steps",)
    _steps: Generator[Any, Any, R]

    def __await__(self) -> Generator[Any, Any, R]:
        raise NotImplementedError  # each kind of call has steps of its own

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "this call has not been awaited, so it has no answer yet, and as a condition it would "
            "admit everything: write `await` before it"
        )

    if not TYPE_CHECKING:  # type checkers find the mistake by the class

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"this call has not been awaited, so it has no answer yet, and no {name!r}: write "
                "`await` before it"
            )

    def send(self, value: Any) -> Any:
        """Go on, as a coroutine does; for tasks."""
        if not hasattr(self, "_steps"):
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise in it, as in a coroutine; for tasks."""
        if not hasattr(self, "_steps"):
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """End it, as a coroutine."""
        if hasattr(self, "_steps"):
            self._steps.close()


class UnawaitedCoroutine(Unawaited[R]):
    """`Unawaited` for the call that a coroutine makes."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, R]:
        return self._coroutine.__await__()

    def close(self) -> None:
        self._coroutine.close()


class EnteredBlock:
    """Is entered by `with`, and only then asks. As a condition it would be true, and admit all."""

    __slots__ = ()

    _written: str
    """The code to write in place of the condition."""

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is a block, which asks nothing before it is entered, and as a "
            f"condition it would admit everything: write {self._written}"
        )


def only_async_with(cls: type[T]) -> type[T]:
    """Make `with` of a class a `TypeError` that says what to write; type checkers report it."""
    cls.__enter__ = _enter  # type: ignore[attr-defined]  # see above
    cls.__exit__ = _exit  # type: ignore[attr-defined]  # `with` looks for both first
    return cls


def _enter(self: object) -> NoReturn:
    raise TypeError(
        f"{type(self).__name__} is entered by `async with`, because that awaits the store: write "
        "`async with` in place of `with`, in an `async def`; where there are no tasks, use the "
        "class without Async, such as Limiter in place of AsyncLimiter"
    )


def _exit(self: object, *exc: object) -> None: ...
