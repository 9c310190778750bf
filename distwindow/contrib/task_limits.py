"""The limits of one task of a queue: the checks of its options, and the charge of each call.

Shared by the integrations whose queue has no gate of its own. Knows no queue and no store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.errors import ConfigurationError
from ..core.key import AnyKey
from ..core.limit import Limit, LimitSpec, parse_limits
from .task_options import (
    TASK_OPTIONS,
    KeyAndCost,
    TaskArguments,
    check_has_limits,
    check_option_names,
)

_log = logging.getLogger("distwindow")


class TaskLimits:
    """Which limits a task has, and under which key and for what cost a call of it counts.

    `key` and `cost` are those of `KeyAndCost`, and `own` and `injected` those of `TaskArguments`.
    Tasks with the same limits and the same key share their permits.

    Raises `ConfigurationError` for what could never work.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        limits: LimitSpec,
        key: str | Callable[..., AnyKey] | None = None,
        cost: int | Callable[..., int] = 1,
        *,
        own: int = 0,
        injected: Collection[str] = (),
    ) -> None:
        self.name = name
        if limits is None:
            raise ConfigurationError(f'task {name!r} has no limits; write limits="100/minute"')
        try:
            self.limits = _plain_limits(limits)
        except ValueError as exc:
            raise ConfigurationError(f"task {name!r}: {exc}") from exc
        self._smallest = min(limit.amount for limit in self.limits)
        arguments = TaskArguments(name, function, own, injected)
        self._key_and_cost = KeyAndCost(arguments, key, cost, self.limits, _log)

    def __repr__(self) -> str:
        return f"TaskLimits({self.name!r}, {'; '.join(map(str, self.limits))!r})"

    def key_and_cost(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[AnyKey, int]:
        """Return the key and the cost of one call, as `KeyAndCost.of`; never a cost that could not
        be admitted.
        """
        key, cost = self._key_and_cost.of(args, kwargs, self._smallest)
        return key, min(cost, self._smallest)


def read_options(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    own: int = 0,
    injected: Collection[str] = (),
) -> TaskLimits | None:
    """Return the limits of the task `name` from its options; None if it has none.

    Raises `ConfigurationError` for wrong ones, and for a key or a cost without limits.
    """
    check_option_names(name, options)
    check_has_limits(name, options, 'add limits, such as limits="100/minute"')
    given = {option: options[option] for option in TASK_OPTIONS if options.get(option) is not None}
    if not given:
        return None
    key, cost = given.get("limit_key"), given.get("limit_cost", 1)
    return TaskLimits(name, function, given["limits"], key, cost, own=own, injected=injected)


def _plain_limits(spec: LimitSpec) -> tuple[Limit, ...]:
    limits = parse_limits(spec)
    for limit in limits:
        if limit.is_shaped:
            raise ConfigurationError(
                f"{str(limit)!r} is paced or warms up, and a worker starts a task as soon as it is "
                'admitted; write a plain limit, with a short interval for an even flow ("1/50ms")'
            )
    return limits
