"""Several limits as one dependency of FastAPI."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import Response

from ...ring.decision import Decision
from .. import asgi, http
from .misplaced import Dependency, DependencyMethod


def limited_request(connection: HTTPConnection, *limits: Any) -> http.LimitedRequest:
    """Return what was decided for a request."""
    limited: http.LimitedRequest | None = connection.scope.get(asgi.SCOPE_KEY)
    if limited is None:
        limited = connection.scope[asgi.SCOPE_KEY] = http.UnwatchedRequest()
    for limit in limits:
        if limit.settles and not limited.is_watched:
            limit.raise_without_middleware()
    return limited


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
