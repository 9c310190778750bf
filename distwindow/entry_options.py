"""The settings of entries: which exceptions count as errors, and the origin of a call."""

from __future__ import annotations

from typing import Any, TypeAlias

from .core.errors import ConfigurationError, short_repr
from .core.minute_view import OTHER_ORIGINS

ErrorTypes: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"

MAX_ORIGIN_LENGTH = 128
"""Characters. Each origin is kept in the store as it is."""
_MAX_ORIGINS = 1000


class CountedErrors:
    """Which exceptions out of a block count as errors of the call: those in `errors` that are not
    in `ignore`. A call that ends with any other exception counts as a success, as with Sentinel's
    exceptionsToTrace and exceptionsToIgnore (AbstractSentinelAspectSupport), of which the latter
    prevails, too.
    """

    __slots__ = ("errors", "ignore")

    def __init__(self, errors: ErrorTypes, ignore: ErrorTypes) -> None:
        self.errors = _types("errors", errors)
        self.ignore = _types("ignore", ignore)

    def is_error(self, exc: BaseException | None) -> bool:
        """True if a call that ended with `exc` (None: with none) counts as an error."""
        return isinstance(exc, self.errors) and not isinstance(exc, self.ignore)

    def changed(self, errors: ErrorTypes | None, ignore: ErrorTypes | None) -> CountedErrors:
        """Return these settings with those of one entry, as far as they are given."""
        if errors is None and ignore is None:
            return self
        return CountedErrors(
            self.errors if errors is None else errors, self.ignore if ignore is None else ignore
        )


def check_origin(origin: object) -> str:
    """Return the origin of an entry; an empty string for None. Raises `TypeError` for what is no
    str, and `ValueError` for a str that cannot be one.
    """
    if origin is None:
        return ""
    if not isinstance(origin, str):
        raise TypeError(f"origin={short_repr(origin)} is not a str, or None")
    if not origin:
        raise ValueError("origin='' is empty; leave it out for a call without an origin")
    if len(origin) > MAX_ORIGIN_LENGTH:
        raise ValueError(
            f"origin={short_repr(origin)} has {len(origin)} characters; at most "
            f"{MAX_ORIGIN_LENGTH} are allowed"
        )
    if origin == OTHER_ORIGINS:
        raise ValueError(
            f"origin={origin!r} is the name under which origins beyond max_origins are counted; "
            "choose another"
        )
    return origin


def check_max_origins(max_origins: object) -> int:
    """Return `max_origins`; raise `ConfigurationError` if it cannot be one."""
    # Not isinstance: True is not a number of origins.
    if type(max_origins) is not int or not 1 <= max_origins <= _MAX_ORIGINS:
        raise ConfigurationError(
            f"max_origins={short_repr(max_origins)} is not a whole number from 1 to {_MAX_ORIGINS}"
        )
    return max_origins


def _types(name: str, given: Any) -> tuple[type[BaseException], ...]:
    types = given if isinstance(given, tuple) else (given,)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigurationError(
                f"{name}={short_repr(given)}: {short_repr(one)} is not a type of exception; give "
                "one type or a tuple of types"
            )
    return types
