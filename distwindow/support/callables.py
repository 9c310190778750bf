"""Functions as users write them: their names and kinds, the calls that they take, and the keys that
templates make of their arguments. What can never work is found before there is a call.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import re
import string
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError, short_repr

_FORMATTER = string.Formatter()
_KINDS = inspect.Parameter
_VARIABLE = (_KINDS.VAR_KEYWORD, _KINDS.VAR_POSITIONAL)
_MISSING = object()

RAISED_BY_CALLBACKS = (
    Exception,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
)
"""What an application's function may raise that distwindow calls, and that is logged instead of
raised: nothing of it may end a worker. (A cancellation of the task that calls it is raised where
that awaits, and never in a plain function.) Not here is what gevent raises in a greenlet from
outside, such as its `Timeout`.
"""


def is_async_callable(function: Any) -> bool:
    """True if what `function` returns is awaited; of partials, methods and `__call__`, too."""
    return any(inspect.iscoroutinefunction(form) for form in _function_and_call(function))


def is_async_generator(function: Any) -> bool:
    """True if `function` returns an asynchronous generator."""
    return any(inspect.isasyncgenfunction(form) for form in _function_and_call(function))


def function_name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or short_repr(function)


def stable_name(function: Any) -> str:
    """Return a name that all processes of a program have for `function`, and few other functions
    have: for a part of a key. That of a lambda and of an inner function has a digest of its code
    and of the texts and numbers that it is bound to.
    """
    if isinstance(function, functools.partial):
        bound = [*function.args, *function.keywords.values()]
        return f"{stable_name(function.func)}{_digest(_texts_and_numbers(bound))}"
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    code = getattr(function, "__code__", None)
    if code is None or not ("<lambda>" in name or "<locals>" in name):
        return name
    # One is empty that is bound later.
    bound = [each for each in function.__closure__ or () if each != types.CellType()]
    cells = [each.cell_contents for each in bound]
    name = name.rpartition("<locals>.")[2]
    return name + _digest(
        (code.co_code, code.co_names, _texts_and_numbers(code.co_consts), _texts_and_numbers(cells))
    )


def _texts_and_numbers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (str, bytes, int, float, type(None)))]


def _digest(value: object) -> str:
    return "#" + hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def describe_function(function: Any) -> str:
    if not is_async_callable(function) and not is_async_generator(function):
        return f"{function_name(function)} is no coroutine function"
    kind = "a coroutine function" if is_async_callable(function) else "an async generator"
    below, _ = _function_and_call(function)
    of_itself = inspect.iscoroutinefunction(below) or inspect.isasyncgenfunction(below)
    if not of_itself:
        kind = f"an object whose __call__ is {kind}"
    return f"{function_name(function)} is {kind}"


def check_decorated(decorator: str, function: Any) -> None:
    """Raise `ConfigurationError` for what `decorator` ("limit", for example) cannot decorate."""
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise ConfigurationError(
            f"{decorator} was put above @{kind} on {function_name(function.__func__)}; "
            f"write @{kind} above it and {decorator} below"
        )
    if inspect.isclass(function):
        raise ConfigurationError(
            f"{function_name(function)} is a class, and {decorator} would put a function in its "
            "place; put it above one of its methods, or above a function that makes the object"
        )
    if not callable(function):
        raise ConfigurationError(
            f"{short_repr(function)} is not a function, so {decorator} cannot decorate it"
        )


def check_call_ends_with_work(function: Any, instead: str) -> None:
    """Raise `ConfigurationError` for a generator function. `instead` is what to write inside it."""
    if is_async_generator(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{function_name(function)} is a generator function, whose call ends before its work "
            f"begins; use `{instead}` inside it"
        )


def check_not_async(name: str, function: Any) -> None:
    """Raise `ConfigurationError` if the value of `name`, a function, would have to be awaited."""
    if is_async_callable(function) or is_async_generator(function):
        raise ConfigurationError(
            f"{name}={function_name(function)} is asynchronous; write a plain function, because "
            "it is called where nothing is awaited"
        )


def check_handler(name: str, handler: Any, *, may_be_async: bool) -> None:
    """Raise `ConfigurationError` unless `handler` of a decorated function is None or callable."""
    if handler is None:
        return
    if not callable(handler):
        raise ConfigurationError(
            f"{name}={short_repr(handler)} is not a function; it is called with the arguments "
            "of the decorated function"
        )
    if not may_be_async:
        check_not_async(name, handler)


def check_signatures(function: Any, called_alike: Mapping[str, Any], hint: str = "") -> None:
    """Raise `ConfigurationError` for one of `called_alike` that some call of `function` does not
    fit: an argument with a default counts by position and by its name. Those that are no functions
    are left out. `hint` is the end of the message.
    """
    calls = _calls_of(function)
    for name, other in called_alike.items():
        if not callable(other) or not calls:
            continue
        signature = _signature(other)
        if signature is not None and not all(_fits(signature, call) for call in calls):
            raise ConfigurationError(
                f"{name}={function_name(other)} takes {_shown(signature)}, and is called with "
                f"every argument of a call of {function_name(function)}, which takes "
                f"{_shown(inspect.signature(function))}{hint}"
            )


_Call = tuple[int, frozenset[str]]
"""How many arguments are given by position, and the names of the others."""


def check_takes(name: str, function: Any, count: int, arguments: str = "") -> None:
    """Raise `ConfigurationError` for a function that does not take so many arguments by position.
    One whose signature is not known is not checked. `arguments` names them.
    """
    signature = _signature(function)
    if signature is not None and not _fits(signature, (count, frozenset())):
        arguments = arguments or f"{count} argument{'' if count == 1 else 's'}"
        raise ConfigurationError(
            f"{name}={function_name(function)} takes {_shown(signature)}, and is called with "
            f"{arguments}"
        )


def _calls_of(function: Any) -> list[_Call]:
    """Return the kinds of calls by position that `function` takes; empty: unknown or unlimited."""
    signature = _signature(function)
    if signature is None:
        return []
    parameters = list(signature.parameters.values())
    if any(p.kind in _VARIABLE for p in parameters):
        return []
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    least = sum(p.default is p.empty for p in positional)
    required = frozenset(p.name for p in named if p.default is p.empty)
    calls = []
    for count in range(least, len(positional) + 1):
        rest = [p for p in positional[count:] if p.kind is not p.POSITIONAL_ONLY]
        calls += [(count, required), (count, frozenset(p.name for p in [*rest, *named]))]
    return calls


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


def _function_and_call(function: Any) -> tuple[Any, Any]:
    """Return the function inside `functools.partial`, and the `__call__` of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        return function, None
    return function, inspect.getattr_static(type(function), "__call__", None)


class FunctionArguments:
    """The parameters of a function, to which the arguments of a call are bound.

    `subject` names the function in errors. `own` is how many leading parameters others fill, and
    `injected` are the names of further ones: the arguments of a call are not for these. `constants`
    are values that templates may name besides.
    Raises `ConfigurationError` for a function whose parameters Python does not know.
    """

    def __init__(
        self,
        subject: str,
        function: Callable[..., Any],
        own: int = 0,
        injected: Collection[str] = (),
        constants: Mapping[str, str] | None = None,
    ) -> None:
        self.subject = subject
        self.constants = constants or {}
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"{subject}: the names of its arguments cannot be read ({exc}); limit a plain "
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
        self.are_plain = not self._injected and set(kinds.values()) <= {
            _KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY,
        }  # fmt: skip
        """True if each argument has one name of its own, by which it may be given."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the arguments of a call, with defaults. Missing ones are left out: the function
        may work without. Raises `TypeError` for others that it does not take.
        """
        if self._injected:
            kwargs = {name: kwargs[name] for name in kwargs if name not in self._injected}
        bound = self.signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def by_name(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the arguments by name, those of `**others` included, and the constants."""
        named: dict[str, Any] = {**self.constants}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is _KINDS.VAR_KEYWORD:
                # `def f(a, /, **others)` may be called with another `a`, which is not this one.
                named |= {other: value[other] for other in value if other not in self.names}
            else:
                named[name] = value
        return named


class KeyTemplate:
    """A key that is text: `str.format` over the arguments of a call, however they are passed, with
    defaults. `{0}` is the first argument.

    `shown` is how errors name the template. Raises `ConfigurationError` for one that fills no key.
    """

    def __init__(self, template: str, arguments: FunctionArguments, shown: str) -> None:
        self._template = template
        self._shown = shown
        self._arguments = arguments
        self._fields = _checked_fields(template, arguments, shown)
        self._places = self._find_places()
        self._known = frozenset(arguments.names)

    @property
    def is_fixed(self) -> bool:
        """True if it has no fields, and so makes one key for all calls."""
        return not self._fields

    def fill(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the key of one call. Raises `TypeError` for arguments that the function does not
        take and for missing ones, and what `str.format` raises; it names the template.
        """
        places = self._places
        try:
            if (
                places is None
                or len(args) > len(self._arguments.positional)
                or kwargs.keys() - self._known
            ):
                return self._fill_bound(args, kwargs)
            named: dict[str, Any] = {}
            for name, place, default in places:
                value = args[place] if place < len(args) else kwargs.get(name, default)
                if value is _MISSING:
                    raise TypeError(f"the call has no argument {name!r}")
                named[name] = value
            return self._template.format(**named)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            exc.args = (f"{self._shown}: {exc}", *exc.args[1:])
            raise

    def _fill_bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        bound = self._arguments.bind(args, kwargs)
        by_position, named = bound.args, self._arguments.by_name(bound)
        for field in self._fields:
            known = int(field) < len(by_position) if field.isdigit() else field in named
            if not known:
                raise TypeError(f"the call has no argument {field!r}")
        return _FORMATTER.vformat(self._template, by_position, named)

    def _find_places(self) -> list[tuple[str, int, Any]] | None:
        """Return the name, the position and the default of each argument that the template names;
        None if a call has to be bound to find them. (To bind it takes ten times as long.)
        """
        arguments = self._arguments
        if not arguments.are_plain:
            return None
        places: list[tuple[str, int, Any]] = []
        for name in self._fields:
            if name not in arguments.names:
                if name not in arguments.constants:
                    return None  # the number of a position
                places.append((name, len(arguments.positional), arguments.constants[name]))
                continue
            default = arguments.signature.parameters[name].default
            place = [*arguments.positional, *arguments.names].index(name)
            if default is inspect.Parameter.empty:
                default = _MISSING
            places.append((name, place, default))
        return places


def fields_of(template: str) -> Iterator[tuple[str, str]]:
    """Yield what stands in the braces of a template, with its format. Raises `ValueError`."""
    for _, field, spec, _ in _FORMATTER.parse(template):
        if field is not None:
            yield field, spec or ""
            yield from fields_of(spec or "")


_PERCENT = re.compile(r"%(\(\w+\))?[sdr](?!\w)")
_STANDARD_SPEC = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(\.\d+)?([A-Za-z])")
_STANDARD_TYPES = frozenset("bcdeEfFgGnosxX")


def _checked_fields(template: str, arguments: FunctionArguments, shown: str) -> frozenset[str]:
    """Return the arguments that a template names, as names or as numbers of their positions."""
    try:
        names = [re.split(r"[.\[]", field, maxsplit=1)[0] for field, _ in fields_of(template)]
        if "" not in names:
            _TrialFormatter().vformat(template, (), {})
    except ValueError as exc:
        raise ConfigurationError(
            f"{shown} is no template: {exc}; write it as in "
            '"tenant:{tenant}", and a brace that is meant literally twice'
        ) from None
    known_names = {*arguments.names, *arguments.constants}
    for name in names:
        if name.isdigit():
            known = arguments.takes_any_number or int(name) < len(arguments.positional)
        else:
            known = name in known_names or (arguments.takes_any_name and bool(name))
        if not known:
            names_what = f"names {name!r}, which is" if name else "has empty braces, which name"
            raise ConfigurationError(
                f"{shown} {names_what} no argument of {arguments.subject}; its "
                f"arguments are {', '.join(arguments.names) or 'none'}; a brace that is meant "
                "literally is written twice"
            )
    problem = _problem_of(template)
    if problem is not None:
        raise ConfigurationError(f'{shown}: {problem}; write it as in "tenant:{{tenant}}"')
    return frozenset(names)


def _problem_of(template: str) -> str | None:
    """Return what would make a template fail, or be one key, for all calls; None if nothing is
    known to be wrong. The template can be parsed. Names of arguments are not checked here.
    """
    for field, spec in fields_of(template):
        for attribute in re.findall(r"\.([^.\[]*)", re.sub(r"\[[^\]]*\]", "", field)):
            if not attribute.isidentifier():
                return (
                    f"{attribute!r} is no name of an attribute, and a template can call nothing; "
                    "write a function of the arguments"
                )
        found = _STANDARD_SPEC.fullmatch(spec)
        # A single letter may be a format of a type of the application's own.
        if found and len(spec) > 1 and found[3] not in _STANDARD_TYPES:
            return f"{spec!r} is no format: it ends in the unknown type {found[3]!r}"
    # Not within a field: "%d" may stand in the format of a date.
    literal = "{}".join(text for text, *_ in _FORMATTER.parse(template))
    found = _PERCENT.search(literal)
    if found:
        return f"{found[0]!r} is not filled: write the name of an argument in braces"
    return None


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
