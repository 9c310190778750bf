"""The checks of `guarded`: what can never work is a `ConfigurationError` when it is applied."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import ConfigurationError, short_repr
from ..decorator import function_name, is_async_callable, is_async_generator
from ..entry_options import check_origin
from .base import check_cost, check_name

HOW_TO_WRITE = 'write @guarded(guard, "name") above the function'


def check_call_arguments(resource: Any, origin: Any, cost: Any) -> None:
    """Raise for arguments of the entry with which no call could begin."""
    for name, value, check in (
        ("resource", resource, lambda value: check_name("resource", value)),
        ("origin", origin, check_origin),
        ("cost", cost, check_cost),
    ):
        if not callable(value):
            try:
                check(value)
            except (TypeError, ValueError) as exc:
                hint = f"; {HOW_TO_WRITE}" if name == "resource" else ""
                raise ConfigurationError(f"guarded: {exc}{hint}") from exc
        elif is_async_callable(value):
            raise ConfigurationError(
                f"{name}={function_name(value)} is a coroutine function, which nothing awaits"
            )


def check_handlers(fallback: Any, on_block: Any) -> None:
    """Raise unless the handlers can be called."""
    for name, handler in (("fallback", fallback), ("on_block", on_block)):
        if handler is not None and not callable(handler):
            raise ConfigurationError(
                f"{name}={short_repr(handler)} is not a function; it is called with the arguments "
                "of the guarded function"
            )


def check_function(function: Any) -> None:
    """Raise for what cannot be guarded."""
    if inspect.isclass(function) or isinstance(function, (staticmethod, classmethod)):
        raise ConfigurationError(
            f"{short_repr(function)} is not a function; put guarded below @staticmethod and "
            "@classmethod, and above methods of a class"
        )
    if not callable(function):
        raise ConfigurationError(f"{short_repr(function)} is not a function; {HOW_TO_WRITE}")
    if is_async_generator(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{function_name(function)} is a generator function, whose call ends before its work "
            "begins; use `guard.entry` inside it"
        )


def check_signatures(function: Any, called_alike: Mapping[str, Any]) -> None:
    """Raise for one of `called_alike` that no call of `function` fits. Those that are no functions
    are left out.
    """
    calls = _calls_of(function)
    for name, other in called_alike.items():
        if not callable(other) or not calls:
            continue
        signature = _signature(other)
        if signature is not None and not any(_fits(signature, call) for call in calls):
            raise ConfigurationError(
                f"{name}={function_name(other)} takes {_shown(signature)}, and is called with the "
                f"arguments of {function_name(function)}, which takes "
                f"{_shown(inspect.signature(function))}; the exception that is handled is "
                "sys.exc_info()[1]"
            )


_Call = tuple[int, frozenset[str]]
"""How many arguments are given by position, and the names of the others."""


def _calls_of(function: Any) -> list[_Call]:
    """Return the kinds of calls that `function` takes with arguments by position; empty if these
    are not known, or without number.
    """
    signature = _signature(function)
    if signature is None:
        return []
    parameters = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    least = sum(p.default is p.empty for p in positional)
    return list(_kinds_of_calls(range(least, len(positional) + 1), named))


def _kinds_of_calls(counts: range, named: list[inspect.Parameter]) -> Iterator[_Call]:
    required = frozenset(p.name for p in named if p.default is p.empty)
    for count in counts:
        yield count, required
        yield count, frozenset(p.name for p in named)


def _fits(signature: inspect.Signature, call: _Call) -> bool:
    count, names = call
    try:
        signature.bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _shown(signature: inspect.Signature) -> str:
    """Return a signature without annotations."""
    empty = inspect.Signature.empty
    plain = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=empty))


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return None
