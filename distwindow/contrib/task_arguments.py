"""The arguments of a task's calls, and the keys that a template makes of them.

Shared by all integrations with task queues, Celery's included. What can be checked without a call
is checked when a template is made; the errors name the task.
"""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.errors import ConfigurationError, short_repr
from .template_checks import fields_of, problem_of, unused_names

_FORMATTER = string.Formatter()
_KINDS = inspect.Parameter
_VARIABLE = (_KINDS.VAR_KEYWORD, _KINDS.VAR_POSITIONAL)


class TaskArguments:
    """The parameters of a task's function, to which the arguments of a call are bound.

    `own` is how many leading parameters the queue itself passes, and `injected` are the names of
    further ones that it fills: a message has no arguments for them. Raises `ConfigurationError` for
    a function whose parameters Python does not know.
    """

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        own: int = 0,
        injected: Collection[str] = (),
    ) -> None:
        self.task = task
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"task {task!r}: the names of its arguments cannot be read ({exc}); limit a plain "
                "Python function that calls it"
            ) from None
        given = [p for p in list(signature.parameters.values())[own:] if p.name not in injected]
        self._injected = frozenset(injected)
        self.signature = signature.replace(parameters=given)
        kinds = {item.name: item.kind for item in given}
        self.takes_any_name = _KINDS.VAR_KEYWORD in kinds.values()
        self.takes_any_number = _KINDS.VAR_POSITIONAL in kinds.values()
        self.names = [name for name, kind in kinds.items() if kind not in _VARIABLE]
        self.positional = [name for name in self.names if kinds[name] is not _KINDS.KEYWORD_ONLY]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the arguments of a call, with defaults. Missing ones are left out: whether a call
        without them works is for the task to say. Raises `TypeError` for others that the task does
        not take.
        """
        if self._injected:
            kwargs = {name: kwargs[name] for name in kwargs if name not in self._injected}
        bound = self.signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def by_name(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the arguments by name, those of `**others` included, and the task's as `task`."""
        named: dict[str, Any] = {"task": self.task}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is _KINDS.VAR_KEYWORD:
                # `def f(a, /, **others)` may be called with another `a`, which is not this one.
                named |= {other: value[other] for other in value if other not in self.names}
            else:
                named[name] = value
        return named

    def check_callable(self, option: str, function: Callable[..., Any]) -> None:
        """Raise `ConfigurationError` if `function` must be awaited, or cannot take the arguments
        that the task takes.

        It is called with the bound arguments of a call: in the order of the parameters, with
        defaults, and only keyword-only ones by name. The arguments of functions without a
        signature, and of tasks with variable arguments, are not checked.
        """
        if _is_async(function):
            raise ConfigurationError(
                f"task {self.task!r}: {option} is a coroutine function; write a plain one, "
                "because it is called where nothing is awaited"
            )
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


class KeyTemplate:
    """A `limit_key` that is text: `str.format` over the arguments of a call, however they are
    passed, with defaults. `{0}` is the first argument, and `{task}` the task's name.

    Raises `ConfigurationError` for a template that could fill no key.
    """

    def __init__(self, template: str, arguments: TaskArguments) -> None:
        self._template = template
        self._arguments = arguments
        self._fields = _checked_fields(template, arguments)
        self.unused_names = unused_names(template, arguments.names)
        """The arguments that are words of a template without fields."""

    def fill(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the key of one call. Raises `TypeError` for arguments that the task does not take
        and for missing ones, and what `str.format` raises.
        """
        bound = self._arguments.bind(args, kwargs)
        by_position, named = bound.args, self._arguments.by_name(bound)
        for field in self._fields:
            known = int(field) < len(by_position) if field.isdigit() else field in named
            if not known:
                raise TypeError(f"the call has no argument {field!r}")
        return _FORMATTER.vformat(self._template, by_position, named)


def _checked_fields(template: str, arguments: TaskArguments) -> frozenset[str]:
    """Return the arguments that a template names, as names or as numbers of their positions."""
    if not template:
        raise ConfigurationError(
            f"task {arguments.task!r}: limit_key is empty; write a template such as "
            '"tenant:{tenant}", or leave it out to count all calls together'
        )
    shown = f"task {arguments.task!r}: limit_key={short_repr(template)}"
    try:
        names = [re.split(r"[.\[]", field, maxsplit=1)[0] for field, _ in fields_of(template)]
        if "" not in names:
            _TrialFormatter().vformat(template, (), {})
    except ValueError as exc:
        raise ConfigurationError(
            f"{shown} is no template: {exc}; write it as in "
            '"tenant:{tenant}", and a brace that is meant literally twice'
        ) from None
    for name in names:
        if name.isdigit():
            known = arguments.takes_any_number or int(name) < len(arguments.positional)
        else:
            known = name in [*arguments.names, "task"] or (arguments.takes_any_name and bool(name))
        if not known:
            raise ConfigurationError(
                f"{shown} names {name!r}, which is no argument of the task; its arguments are "
                f"{', '.join(arguments.names) or 'none'}"
            )
    problem = problem_of(template)
    if problem is not None:
        raise ConfigurationError(f'{shown}: {problem}; write it as in "tenant:{{tenant}}"')
    return frozenset(names)


class _AnyArgument:
    """Stands for an argument when a template is tried: has every attribute and every item."""

    def __getattr__(self, name: str) -> _AnyArgument:
        return self

    def __getitem__(self, name: object) -> _AnyArgument:
        return self

    def __format__(self, spec: str) -> str:
        return "1"  # may stand in another format, as the width in "{name:>{width}}"


class _TrialFormatter(string.Formatter):
    def get_value(self, key: object, args: object, kwargs: object) -> _AnyArgument:
        return _AnyArgument()


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object whose call is a coroutine
    )
