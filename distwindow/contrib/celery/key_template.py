"""The limit key of a task, and its cost: made from the task's own arguments.

What can be checked without a call is checked when the worker starts.
"""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigurationError, short_repr
from ...core.key import AnyKey, Key, encode_key

_FORMATTER = string.Formatter()
_KINDS = inspect.Parameter


class TaskArguments:
    """The parameters of a task's function, to which the arguments of a message are bound."""

    def __init__(self, task: str, run: Callable[..., Any]) -> None:
        self.task = task
        self.signature = inspect.signature(run)
        kinds = {name: item.kind for name, item in self.signature.parameters.items()}
        self.takes_any_name = _KINDS.VAR_KEYWORD in kinds.values()
        self.takes_any_number = _KINDS.VAR_POSITIONAL in kinds.values()
        variable = (_KINDS.VAR_KEYWORD, _KINDS.VAR_POSITIONAL)
        self.names = [name for name, kind in kinds.items() if kind not in variable]
        self.positional = [name for name in self.names if kinds[name] is not _KINDS.KEYWORD_ONLY]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, with defaults. Raises `TypeError` as the call would."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            named.update(value if kind is _KINDS.VAR_KEYWORD else {name: value})
        return named

    def check_callable(self, option: str, function: Callable[..., Any]) -> None:
        """Raise `ConfigurationError` if `function` cannot take the arguments that the task takes.

        Functions without a signature, and tasks with variable arguments, are not checked.
        """
        if self.takes_any_name or self.takes_any_number:
            return
        try:
            theirs = inspect.signature(function)
        except (TypeError, ValueError):
            return
        only_named = [name for name in self.names if name not in self.positional]
        try:
            theirs.bind(*self.positional, **dict.fromkeys(only_named))
        except TypeError as exc:
            raise ConfigurationError(
                f"task {self.task!r}: {option} is called with the task's own arguments "
                f"({', '.join(self.names) or 'none'}), and cannot take them: {exc}"
            ) from None


class LimitKey:
    """`limit_key`: None for the task's name, a template over its arguments, or a callable."""

    def __init__(self, spec: object, arguments: TaskArguments) -> None:
        self._spec = spec
        self._arguments = arguments
        if spec is None:
            return
        if isinstance(spec, str):
            self._check_template(spec)
        elif callable(spec):
            arguments.check_callable("limit_key", spec)
        else:
            raise ConfigurationError(
                f"task {arguments.task!r}: limit_key={short_repr(spec)} is neither a template such "
                'as "tenant:{tenant}" nor a function of the task\'s arguments'
            )

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnyKey:
        """Return the key of one task. Raises whatever the template or the callable raises, and
        `ValueError` or `TypeError` for what is no key.
        """
        spec = self._spec
        if spec is None:
            return self._arguments.task
        key: Any
        if isinstance(spec, str):
            named = self._arguments.bind(args, kwargs)
            named.setdefault("task", self._arguments.task)
            key = _FORMATTER.vformat(spec, args, named)
        else:
            assert callable(spec)
            key = spec(*args, **kwargs)
        if not isinstance(key, Key):
            encode_key(key)
        valid: AnyKey = key
        return valid

    def _check_template(self, template: str) -> None:
        arguments, shown = self._arguments, f"limit_key={short_repr(template)}"
        if not template:
            raise ConfigurationError(f"task {arguments.task!r}: limit_key is empty")
        try:
            fields = list(_fields(template))
        except ValueError as exc:
            raise ConfigurationError(
                f"task {arguments.task!r}: {shown} is no template: {exc}; write it as in "
                '"tenant:{tenant}", and a brace that is meant literally twice'
            ) from None
        for field in fields:
            name = re.split(r"[.\[]", field, maxsplit=1)[0]
            if name.isdigit():
                known = arguments.takes_any_number or int(name) < len(arguments.positional)
            else:
                known = name in [*arguments.names, "task"] or (
                    arguments.takes_any_name and bool(name)
                )
            if not known:
                raise ConfigurationError(
                    f"task {arguments.task!r}: {shown} names {name!r}, which is no argument of the "
                    f"task; its arguments are {', '.join(arguments.names) or 'none'}"
                )


class LimitCost:
    """`limit_cost`: a number of permits, or a function of the task's arguments."""

    def __init__(self, spec: object, arguments: TaskArguments) -> None:
        self._spec = spec
        if callable(spec):
            arguments.check_callable("limit_cost", spec)
        elif isinstance(spec, bool) or not isinstance(spec, int) or spec < 1:
            raise ConfigurationError(
                f"task {arguments.task!r}: limit_cost={short_repr(spec)} is neither a whole number "
                "of at least 1 nor a function of the task's arguments"
            )
        self.fixed: int | None = spec if isinstance(spec, int) else None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the cost of one task. Raises whatever the callable raises, and `ValueError` for
        what is no cost.
        """
        if self.fixed is not None:
            return self.fixed
        assert callable(self._spec)
        cost = self._spec(*args, **kwargs)
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
            raise ValueError(f"limit_cost returned {short_repr(cost)}, no whole number above 0")
        return cost


def _fields(template: str) -> Iterator[str]:
    """Yield what stands in the braces of a template, those within a format included."""
    for _, field, spec, _ in _FORMATTER.parse(template):
        if field is not None:
            yield field
            yield from _fields(spec or "")
