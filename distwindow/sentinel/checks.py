"""Checks of arguments. Each raises a `ConfigurationError` that names the argument."""

from __future__ import annotations

import math

from ..core.errors import ConfigurationError


def check_threshold(name: str, value: float) -> None:
    """Raise unless `value` is a finite number of at least 0."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"{name} must be a finite number of at least 0, not {value!r}")


def check_int(name: str, value: int, least: int) -> None:
    """Raise unless `value` is an int of at least `least`."""
    # Not isinstance: True is not a number.
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{name} must be an int of at least {least}, not {value!r}")
