"""Limits in the place of a dependency, where other libraries have decorators: each is an error when
the application is imported, which says what to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import Depends

from ...errors import ConfigurationError

M = TypeVar("M", bound=Callable[..., Any])
WRITE = 'write @app.get("/search", dependencies=[Depends(rate_limits.limit("5/minute"))])'


class DependencyCall(functools.partial[Coroutine[Any, Any, Any]]):
    """A call of a limit, which is FastAPI's, and gives each value by its name."""

    def __call__(self, /, *decorated: Any, **values: Any) -> Coroutine[Any, Any, Any]:
        if decorated or not values:
            raise ConfigurationError(f"a limit of FastAPI is no decorator; {WRITE}")
        return self.func(*self.args, **values)


class DependencyMethod:
    """The `__call__` of a dependency. FastAPI has to find a coroutine function in it, and such a
    function would tell nobody that he has called it as a decorator.
    """

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> DependencyCall:
        call: DependencyCall | None = instance.__dict__.get("_dependency_call")
        if call is None:
            call = instance._dependency_call = DependencyCall(self._function, instance)
        return call


class Dependency:
    """Base class of limits that are dependencies. They `_ask` for a request."""

    @property
    def dependency(self) -> NoReturn:
        """Found by FastAPI where a limit stands in a list of dependencies by itself."""
        raise ConfigurationError(f"dependencies=[...] has a limit by itself; {WRITE}")

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Asked for by FastAPI where a limit is the default of an argument by itself."""
        raise ConfigurationError(f"an argument has a limit as its default; {WRITE}")


class _Unsigned:
    """Stands for a dependency, and raises as soon as FastAPI looks at it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self) -> None: ...

    @property
    def __signature__(self) -> NoReturn:
        raise ConfigurationError(self._text)


class _Annotation:
    """An annotation as it is written. FastAPI would evaluate a `str`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self) -> None:
        """For Python 3.10, where `Annotated` takes nothing else."""

    def __repr__(self) -> str:
        return self._text


def no_dependency(method: M) -> M:
    """Return a method that makes dependencies, and is none itself: `Depends(rate_limits.limit)`."""
    name = f"rate_limits.{method.__name__}"
    stand_in = _Unsigned(f"{name} is not called, and a limit needs its limits; {WRITE}")

    @functools.wraps(method)
    def make(self: Any, *args: Any, **options: Any) -> Any:
        return method(self, *args, **options)

    own, first, *others = inspect.signature(method).parameters.values()
    signature = inspect.signature(method).replace(
        parameters=[
            own,
            first.replace(annotation=Annotated[_Annotation(first.annotation), Depends(stand_in)]),
            *(each.replace(annotation=_Annotation(each.annotation)) for each in others),
        ]
    )
    make.__signature__ = signature  # type: ignore[attr-defined]  # FastAPI and `help` read it
    return make  # type: ignore[return-value]  # it has the signature of what it wraps
