"""Which exceptions out of a block count as failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import Blocked, ConfigurationError, DistwindowError, short_repr
from .callables import check_not_async, check_takes, function_name
from .locks import was_raised_by_signal_handler

LOG = logging.getLogger("distwindow")

ErrorTypes: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"
_Ignored: TypeAlias = "type[BaseException] | Callable[[Any], object]"
IgnoredErrors: TypeAlias = "_Ignored | tuple[_Ignored, ...]"
"""Types of exceptions, and functions that return true for an exception to be ignored."""

_logged: set[object] = set()
"""The code of each function whose error has been logged, as an outage would repeat it."""


class FailureTypes:
    """`errors` and `ignore`: the types of exceptions that count, and those that do not.

    Entries count every call as a success or an error, as with Sentinel's exceptionsToTrace and
    exceptionsToIgnore (AbstractSentinelAspectSupport). Breakers and guards judge the service that
    is called, about which an exception may say nothing. The first row that fits holds:

        the call ended with                        `is_error`   `failed`
        no exception                               False        False
        one of the types in `ignore`               False        None
        a refusal (`Blocked`) inside the block,    False        None: no call was made, or that of
        while `errors` names no error of                        another service (Sentinel's `Tracer`
        distwindow                                              traces no BlockException)
        another error of distwindow, while         as below     None: a store that is away is no
        `errors` names none of these                            answer
        one for which a function in `ignore`       False        None; asked only about what counts
        returns true                                            by the rows below
        one of `errors`                            True         True
        another `Exception`                        False        False: the service has answered
        any other `BaseException`                  False        None: a cancellation, for example

    A function that raises an error has not returned true: one that reads `exc.status` does not
    ignore an exception without it. The first such error of a function is logged.
    """

    __slots__ = ("_counts_own", "_ignored_types", "_is_ignored", "errors", "ignore")

    def __init__(self, errors: ErrorTypes, ignore: IgnoredErrors) -> None:
        self.errors = _types("errors", _as_tuple(errors))
        self.ignore = ignore
        given = _as_tuple(ignore)
        self._is_ignored = [x for x in given if callable(x) and not isinstance(x, type)]
        for function in self._is_ignored:
            check_not_async("ignore", function)
            check_takes("ignore", function, 1)
        types = tuple(x for x in given if not callable(x) or isinstance(x, type))
        self._ignored_types = _types("ignore", types)
        self._counts_own = any(issubclass(one, DistwindowError) for one in self.errors)

    def is_error(self, exc: BaseException | None) -> bool:
        """True if a call that ended with `exc` (None: with none) counts as an error."""
        if isinstance(exc, Blocked) and not self._counts_own:
            return False
        if not isinstance(exc, self.errors) or isinstance(exc, self._ignored_types):
            return False
        return not any(_returns_true(function, exc) for function in self._is_ignored)

    def failed(self, exc: BaseException | None) -> bool | None:
        """Return whether a call that ended with `exc` failed; None if that says nothing."""
        if exc is None:
            return False
        if isinstance(exc, self._ignored_types):
            return None
        if isinstance(exc, DistwindowError) and not self._counts_own:
            return None
        failed = isinstance(exc, self.errors)
        if not failed and not isinstance(exc, Exception):
            return None
        if any(_returns_true(function, exc) for function in self._is_ignored):
            return None
        return failed

    def changed(self, errors: ErrorTypes | None, ignore: IgnoredErrors | None) -> FailureTypes:
        """Return these settings with those of one entry, as far as they are given."""
        if errors is None and ignore is None:
            return self
        return FailureTypes(
            self.errors if errors is None else errors, self.ignore if ignore is None else ignore
        )


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _types(name: str, types: tuple[Any, ...]) -> tuple[type[BaseException], ...]:
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            or_function = " or a function of one" if name == "ignore" else ""
            raise ConfigurationError(
                f"{name}={short_repr(one)} is not a type of exception{or_function}; give one, or "
                "a tuple of them"
            )
    return types


def _returns_true(function: Callable[[Any], object], exc: BaseException) -> bool:
    try:
        return bool(function(exc))
    except Exception as error:
        if was_raised_by_signal_handler(error):
            raise  # it is for the caller, and no error of the function
        code = getattr(function, "__code__", type(function))
        if code not in _logged:
            _logged.add(code)
            LOG.exception(
                "ignore=%s has failed on %s, which is not ignored", function_name(function),
                short_repr(exc),
            )  # fmt: skip
        return False
