"""Checks of arguments. Each raises a `ConfigurationError` that names the argument."""

from __future__ import annotations

import math

from ..core.errors import ConfigurationError, short_repr

MAX_INT = 10**13
"""The largest int of a rule: floats and Lua's numbers are exact up to here."""


def is_finite(value: float) -> bool:
    """True for a number that a float can hold: an int may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_threshold(name: str, value: float) -> None:
    """Raise unless `value` is a finite number of at least 0."""
    if type(value) is int and not is_finite(value):
        raise ConfigurationError(f"{name} is larger than any float: {short_repr(value)}")
    if type(value) not in (int, float) or not is_finite(value) or value < 0:
        raise ConfigurationError(
            f"{name} must be a finite number of at least 0, not {short_repr(value)}"
        )


def check_int(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise unless `value` is an int of at least `least`, and at most `most`, if that is given."""
    # Not isinstance: True is not a number.
    if type(value) is not int or value < least:
        raise ConfigurationError(
            f"{name} must be an int of at least {least}, not {short_repr(value)}"
        )
    if most is not None and value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {short_repr(value)}")


def check_word(rule: str, field: str, value: object, words: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `words`."""
    if value not in words:
        listed = ", ".join(repr(word) for word in words)
        raise ConfigurationError(
            f"{rule}: {field} must be one of {listed}, not {short_repr(value)}"
        )
