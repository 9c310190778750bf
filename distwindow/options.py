"""The settings of entries: the origin of a call, and how many origins are told apart."""

from __future__ import annotations

import math

from .errors import ConfigurationError, short_repr

OTHER_ORIGINS = "(other)"
"""The name under which the origins are counted for which there was no room."""

MAX_ORIGIN_LENGTH = 128
"""Characters. Each origin is kept in the store as it is."""
_MAX_ORIGINS = 1000


def check_origin(origin: object) -> str:
    """Return the origin of an entry, of a limiter or a guard; an empty string for None. Raises
    `TypeError` for what is no str, and `ValueError` for a str that cannot be one.
    """
    if origin is None:
        return ""
    if not isinstance(origin, str):
        raise TypeError(f"origin={short_repr(origin)} is not a str, or None")
    if not origin:
        raise ValueError(
            "origin='' is empty; give None, or leave it out, for a call without an origin"
        )
    if len(origin) > MAX_ORIGIN_LENGTH:
        raise ValueError(
            f"origin={short_repr(origin)} has {len(origin)} characters; at most "
            f"{MAX_ORIGIN_LENGTH} are allowed"
        )
    if not origin.isascii():
        try:
            origin.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(
                f"origin={short_repr(origin)} cannot be encoded as UTF-8: {exc.reason}"
            ) from exc
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


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout of `acquire` as a float; None where there is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
