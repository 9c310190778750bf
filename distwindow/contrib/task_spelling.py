"""Finds options of a task that are nearly `limits`, `limit_key` or `limit_cost`.

Queues accept options of any name, and a misspelt one would leave the task without limits.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping

from ..core.errors import ConfigurationError, short_repr
from ..core.limit import Limit, parse_limits
from .task_options import TASK_OPTIONS

_SETTING_WORD = "distwindow"


def check_spelling(task: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigurationError` for an option that is nearly one of ours, where the queue accepts
    options of any name.
    """
    for option, value in options.items():
        near = misspelt(option, value)
        if near is not None:
            raise ConfigurationError(
                f"task {task!r} has the unknown option {option}={short_repr(value)}; did you mean "
                f"{near}?"
            )


def misspelt(option: str, value: object) -> str | None:
    """Return the option that `option` was probably meant to be; None if it is one of ours, or
    another's: the value must be of a kind that ours may have.
    """
    if option in TASK_OPTIONS:
        return None
    lower = option.lower()
    if lower.startswith(_SETTING_WORD):
        return _nearest(lower.removeprefix(_SETTING_WORD).strip("_"), cutoff=0.8)
    if lower != "rate_limit" and lower.replace("_", "").rstrip("s") in ("ratelimit", "limitrate"):
        # An application may have options of these names, so only what reads as limits is ours.
        # `rate_limit` is Celery's own.
        return "limits" if _reads_as_limits(value) else None
    near = _nearest(lower, cutoff=0.8 if option.startswith("limit") else 0.85)
    if near is None:
        return None
    if callable(value):
        # Only a key and a cost may be functions. A method of a task's class is no option.
        return near if near != "limits" and not _is_method(value) else None
    # `limit = 100` may be an option of the application's own, such as a number of rows.
    kinds = (str, list, tuple, Limit) if option == "limit" else (str, int, list, tuple, Limit)
    return near if isinstance(value, kinds) else None


def _nearest(lower: str, cutoff: float) -> str | None:
    by_words = {tuple(sorted(known.split("_"))): known for known in TASK_OPTIONS}
    swapped = by_words.get(tuple(sorted(lower.split("_"))))  # key_limit
    compact = {known.replace("_", ""): known for known in TASK_OPTIONS}
    exact = swapped or compact.get(lower.replace("_", ""))  # limitKey
    if exact is not None:
        return exact
    near = difflib.get_close_matches(lower, TASK_OPTIONS, n=1, cutoff=cutoff)
    return near[0] if near else None


def _reads_as_limits(value: object) -> bool:
    if not isinstance(value, (str, list, tuple, Limit)):
        return False
    try:
        return bool(parse_limits(value))
    except ValueError:
        return False


def _is_method(value: object) -> bool:
    try:
        names = list(inspect.signature(value).parameters)  # type: ignore[arg-type]  # is callable
    except (TypeError, ValueError):
        return False
    return names[:1] in (["self"], ["cls"])
