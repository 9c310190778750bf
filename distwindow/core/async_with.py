"""`with` in the place of `async with`: an error that says what to write."""

from __future__ import annotations

from typing import NoReturn, TypeVar

T = TypeVar("T")


def only_async_with(cls: type[T]) -> type[T]:
    """Have a class raise a `TypeError` that says what to write where it is entered by `with`. Type
    checkers see nothing of this, and report such a `with`.
    """
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
