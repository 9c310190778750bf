"""Which exceptions count as failures of the service that is called."""

from __future__ import annotations

from typing import Any, TypeAlias

from ..core.errors import ConfigurationError, DistwindowError, short_repr

ErrorTypes: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"


class FailureTypes:
    """`errors` are failures; `ignore` says nothing of the service, even if it is among `errors`.

    Neither do distwindow's own errors, unless `errors` names them: a refusal inside the block, by a
    limiter or by another breaker, or a store that is away, is no answer of the service.

    Every other `Exception` is an answer of the service, and so a success. Any other
    `BaseException` (a cancellation, `KeyboardInterrupt`) says nothing, unless it is in `errors`.
    """

    def __init__(self, errors: ErrorTypes, ignore: ErrorTypes) -> None:
        self.errors = _types("errors", errors)
        self.ignore = _types("ignore", ignore)
        self._counts_own = any(issubclass(one, DistwindowError) for one in self.errors)

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


def _types(name: str, given: Any) -> tuple[type[BaseException], ...]:
    types = given if isinstance(given, tuple) else (given,)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigurationError(
                f"{name}={short_repr(given)}: {short_repr(one)} is not a type of exception; give "
                "one type or a tuple of types"
            )
    return types
