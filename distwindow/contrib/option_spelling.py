"""Misspelled options of a task, for queues that take any option. Knows no queue and no store."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigurationError, short_repr
from ..core.limit import Limit
from .task_limits import OPTIONS


def check_spelling(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for an option of the task `name` that is nearly one of ours: it
    would be kept as an option of the application's own, and the task would have no limit.
    """
    for option, value in options.items():
        if option in OPTIONS or not option.startswith("limit"):
            continue
        near = difflib.get_close_matches(option, OPTIONS, n=1, cutoff=0.8)
        # `limit=100` may be an option of the application's own, such as a number of rows.
        kinds = (str, list, tuple, Limit) if option == "limit" else (str, int, list, tuple, Limit)
        if near and isinstance(value, kinds):
            raise ConfigurationError(
                f"task {name!r} has the unknown option {option}={short_repr(value)}; "
                f"did you mean {near[0]}?"
            )
