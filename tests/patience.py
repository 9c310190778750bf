"""Calls of tests wait longer for a store than by default.

Within the default of 0.25 s a machine that is busy may not get to answer. A test that is about
timeouts names its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import distwindow

PATIENT_S = 10.0
"""Longer than any stall of a machine that tests should outlast, s."""

_DEFAULTS: list[dict[str, Any]] = [
    defaults
    for name in distwindow.__all__
    for cls in [getattr(distwindow, name)]
    if isinstance(cls, type)
    for base in cls.__mro__  # both limiters inherit theirs
    for defaults in [getattr(vars(base).get("__init__"), "__kwdefaults__", None)]
    if defaults is not None and "timeout" in defaults
]
"""The default arguments of the constructors that have a timeout."""


@contextmanager
def patient() -> Iterator[None]:
    """Have limiters, guards, breakers and concurrency limits of this process wait `PATIENT_S`."""
    before = [defaults["timeout"] for defaults in _DEFAULTS]
    for defaults in _DEFAULTS:
        defaults["timeout"] = PATIENT_S
    try:
        yield
    finally:
        for defaults, timeout in zip(_DEFAULTS, before, strict=True):
            defaults["timeout"] = timeout
