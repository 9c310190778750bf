"""Which exceptions out of a block count as failures."""

from __future__ import annotations

from typing import Any, TypeAlias

from .errors import Blocked, ConfigurationError, DistwindowError, short_repr

ErrorTypes: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"


class FailureTypes:
    """`errors` and `ignore`: the types of exceptions that count, and those that do not.

    Entries count every call as a success or an error, as with Sentinel's exceptionsToTrace and
    exceptionsToIgnore (AbstractSentinelAspectSupport). Breakers and guards judge the service that
    is called, about which an exception may say nothing. The first row that fits holds:

        the call ended with                        `is_error`   `failed`
        no exception                               False        False
        one of `ignore`                            False        None
        a refusal (`Blocked`) inside the block,    False        None: no call was made, or that of
        while `errors` names no error of                        another service (Sentinel's `Tracer`
        distwindow                                              traces no BlockException)
        another error of distwindow, while         as below     None: a store that is away is no
        `errors` names none of these                            answer
        one of `errors`                            True         True
        another `Exception`                        False        False: the service has answered
        any other `BaseException`                  False        None: a cancellation, for example
    """

    __slots__ = ("_counts_own", "errors", "ignore")

    def __init__(self, errors: ErrorTypes, ignore: ErrorTypes) -> None:
        self.errors = _types("errors", errors)
        self.ignore = _types("ignore", ignore)
        self._counts_own = any(issubclass(one, DistwindowError) for one in self.errors)

    def is_error(self, exc: BaseException | None) -> bool:
        """True if a call that ended with `exc` (None: with none) counts as an error."""
        if isinstance(exc, Blocked) and not self._counts_own:
            return False
        return isinstance(exc, self.errors) and not isinstance(exc, self.ignore)

    def failed(self, exc: BaseException | None) -> bool | None:
        """Return whether a call that ended with `exc` failed; None if that says nothing."""
        if exc is None:
            return False
        if isinstance(exc, self.ignore):
            return None
        if isinstance(exc, DistwindowError) and not self._counts_own:
            return None
        if isinstance(exc, self.errors):
            return True
        return False if isinstance(exc, Exception) else None

    def changed(self, errors: ErrorTypes | None, ignore: ErrorTypes | None) -> FailureTypes:
        """Return these settings with those of one entry, as far as they are given."""
        if errors is None and ignore is None:
            return self
        return FailureTypes(
            self.errors if errors is None else errors, self.ignore if ignore is None else ignore
        )


def _types(name: str, given: Any) -> tuple[type[BaseException], ...]:
    types = given if isinstance(given, tuple) else (given,)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigurationError(
                f"{name}={short_repr(given)}: {short_repr(one)} is not a type of exception; give "
                "one type or a tuple of types"
            )
    return types
