"""The limits of one task: the checks of its options, and the key and the cost of each call.

Shared by the integrations with task queues. Knows no queue and no store.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from ..core.errors import ConfigurationError, short_repr
from ..core.key import AnyKey, Key, encode_key
from ..core.limit import Limit, LimitSpec, parse_limits
from ..operations.command_cache import check_cost

OPTIONS = ("limits", "limit_key", "limit_cost")
"""The options of a task, named as for Celery."""

_log = logging.getLogger("distwindow")
_BUILT_BY_PYTHON = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class TaskLimits:
    """Which limits a task has, and under which key and for what cost a call of it counts.

    `key` is a template over the names of the task's arguments (`"tenant:{tenant}"`), or a callable
    that is given the call's arguments; None: all calls of the task count under its `name`. Tasks
    with the same limits and the same key share their permits. `cost` is a whole number of permits,
    or a callable as well. `own` is how many leading parameters the queue itself passes.

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
    ) -> None:
        self.name = name
        try:
            self.limits = _plain_limits(limits)
            self.most = min(limit.amount for limit in self.limits)
            self._key = _key_function(name, function, own, key)
            self._cost = _cost_function(cost, self.most)
        except ValueError as exc:
            raise ConfigurationError(f"task {name!r}: {exc}") from exc

    def __repr__(self) -> str:
        return f"TaskLimits({self.name!r}, {'; '.join(map(str, self.limits))!r})"

    def key_and_cost(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[AnyKey, int]:
        """Return the key and the cost of one call.

        A call whose key cannot be computed counts under the task's name, and one whose cost cannot
        be charged costs the whole limit: it is neither lost nor uncounted. Both are logged.
        """
        key: AnyKey = self.name
        cost = self.most
        try:
            key = _checked_key(self._key(*args, **kwargs))
        except Exception as exc:
            self._report("limit_key", f"counted under {self.name!r}", exc)
        try:
            computed = self._cost(*args, **kwargs)
            check_cost(computed, self.most)
            cost = computed
        except Exception as exc:
            self._report("limit_cost", f"charged the whole limit, {self.most}", exc)
        return key, cost

    def _report(self, option: str, instead: str, exc: Exception) -> None:
        _log.error(
            "%s of task %r failed for a call, which is %s instead: %s: %s; mend the option",
            option, self.name, instead, type(exc).__name__, exc,
        )  # fmt: skip


def read_options(
    name: str, function: Callable[..., Any], options: Mapping[str, Any], *, own: int = 0
) -> TaskLimits | None:
    """Return the limits of the task `name` from its options; None if it has none.

    Raises `ConfigurationError` for wrong ones, and for a key or a cost without limits.
    """
    given = {option: options[option] for option in OPTIONS if options.get(option) is not None}
    if not given:
        return None
    if "limits" not in given:
        raise ConfigurationError(
            f"task {name!r} has {' and '.join(given)} but no limits; add limits, such as "
            'limits="100/minute"'
        )
    return TaskLimits(
        name, function, given["limits"], given.get("limit_key"), given.get("limit_cost", 1), own=own
    )


def _plain_limits(spec: LimitSpec) -> tuple[Limit, ...]:
    limits = parse_limits(spec)
    for limit in limits:
        if limit.is_shaped:
            raise ConfigurationError(
                f"{str(limit)!r} is paced or warms up, and a worker starts a task as soon as it is "
                'admitted; write a plain limit, with a short interval for an even flow ("1/50ms")'
            )
    return limits


def _key_function(
    name: str, function: Callable[..., Any], own: int, key: Any
) -> Callable[..., AnyKey]:
    if key is None:
        return lambda *args, **kwargs: name
    if callable(key):
        return _not_async("limit_key", key)
    if isinstance(key, str) and key:
        return _template(key, _signature(function, own))
    raise ConfigurationError(
        f"limit_key={short_repr(key)} is neither text, such as "
        '"tenant:{tenant}", nor a function of the arguments'
    )


def _signature(function: Callable[..., Any], own: int) -> inspect.Signature:
    """Return the signature of a task without the `own` first parameters, which its queue passes."""
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[own:])


def _template(template: str, signature: inspect.Signature) -> Callable[..., str]:
    """Return the function that fills `template` with the arguments of a call."""
    named = [p.name for p in signature.parameters.values() if p.kind not in _BUILT_BY_PYTHON]
    others = [
        p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD
    ]
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as exc:
        raise ConfigurationError(
            f"limit_key={template!r}: {exc}; write a brace that is meant as one twice"
        ) from None
    for field in fields:
        if not field.isidentifier():
            raise ConfigurationError(
                f"limit_key={template!r}: {{{field}}} is not the name of an argument; use a "
                "function for anything else, such as lambda user, **_: user.id"
            )
        if field not in named and not others:
            has = f"its arguments are {', '.join(named)}" if named else "it has none"
            raise ConfigurationError(
                f"limit_key={template!r} names {field!r}, which is no argument of the task; {has}"
            )

    def fill(*args: Any, **kwargs: Any) -> str:
        # Partially, because the queue may add arguments of its own (dependencies) only later.
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        for name in others:
            values |= values.get(name, {})
        return template.format(**values)

    return fill


def _cost_function(cost: Any, most: int) -> Callable[..., int]:
    if callable(cost):
        return _not_async("limit_cost", cost)
    try:
        check_cost(cost, most)
    except ValueError as exc:
        raise ConfigurationError(f"limit_{exc}") from exc
    return lambda *args, **kwargs: int(cost)


def _not_async(option: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{option} is a coroutine function; use a plain one")
    return function


def _checked_key(key: AnyKey) -> AnyKey:
    if not isinstance(key, Key):
        encode_key(key)  # raises for what is no key
    return key
