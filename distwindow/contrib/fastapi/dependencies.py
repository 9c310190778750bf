"""Limits as dependencies: several as one; and the mistakes of who writes one as the decorator that
other libraries have, each an error when the application is imported, which says what to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ...errors import ConfigurationError
from ...ring.decision import Decision
from .. import asgi, http

M = TypeVar("M", bound=Callable[..., Any])
WRITE = 'write @app.get("/search", dependencies=[Depends(rate_limits.limit("5/minute"))])'


def limited_request(connection: HTTPConnection, *limits: Any) -> http.LimitedRequest:
    """Return what was decided for a request."""
    limited: http.LimitedRequest | None = connection.scope.get(asgi.SCOPE_KEY)
    if limited is None:
        limited = connection.scope[asgi.SCOPE_KEY] = http.UnwatchedRequest()
    for limit in limits:
        if limit.settles and not limited.is_watched and not limit.shadow:
            limit.raise_without_middleware()
    return limited


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


class AllOf(Dependency):
    """Several limits as one dependency, asked together; see `RateLimits.all_of`."""

    def __init__(self, rate_limits: Any, limits: Sequence[Any]) -> None:
        self._rate_limits = rate_limits
        self.limits = limits
        given = [[*limit.__signature__.parameters.values()] for limit in limits]
        dependencies = [
            parameter.replace(name=f"{parameter.name}{n}")
            for n, parameters in enumerate(given)
            for parameter in parameters[2:]
        ]
        self.__signature__ = inspect.Signature([*given[0][:2], *dependencies])

    async def _ask(
        self, *, connection: HTTPConnection, response: Response, **values: Any
    ) -> Decision | None:
        """Ask these limits for a request; for FastAPI."""
        if self._rate_limits.is_exempt(connection.scope.get("endpoint")):
            return None
        limited = limited_request(connection, *self.limits)
        given: list[dict[str, Any]] = [{} for _ in self.limits]
        for name, value in values.items():
            option = name.rstrip("0123456789")
            given[int(name[len(option) :])][option] = value
        steps = http.decide_all(self.limits, connection, limited, None, given)
        decision: Decision | None = await self._rate_limits.decision_of(
            steps, connection, response, limited
        )
        return decision

    __call__ = DependencyMethod(_ask)
