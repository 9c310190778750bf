"""The names of the settings in Celery's configuration, and the check that each one given is read.

Celery accepts settings of any name, and a misspelt one would leave the tasks without limits.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Collection
from typing import Any

from ...core.errors import ConfigurationError

CONF_PREFIX = "distwindow_"
CONF_KEYS = ("url", "prefix", "limits", "on_store_error", "max_parked", "max_hold", "timeout")

_OUR_NAME = re.compile(r"(?P<before>.*?)dist_?windows?(?P<name>_.+|.+)")
_COMPACT = {(CONF_PREFIX + name).replace("_", ""): name for name in CONF_KEYS}


def check_conf_keys(conf: Any, given: Collection[str] = ()) -> None:
    """Raise `ConfigurationError` for a `distwindow_...` setting that does not exist, and for one
    that Celery does not read as it is written, such as `DISTWINDOW_LIMITS` where the configuration
    has no namespace, or another.

    `given` are the settings that `RateLimits` was given. A name in capitals of a setting that is
    set otherwise is left alone: it may be the application's own.
    """
    keys = [str(key) for key in conf]
    # Only a configuration that was read, as here, knows its namespace ("CELERY_").
    namespace = str(getattr(conf, "prefix", None) or "")
    written = {name: _written(name, namespace) for name in CONF_KEYS}
    read = {key for key in keys if key in {*written.values(), *_lower_case()}}
    for key in keys:
        if key in read or _is_code(conf.get(key)):
            continue
        before, name = _likely_setting(key, namespace)
        if name is None:
            continue
        if name not in written:
            known = ", ".join(written.values())
            raise ConfigurationError(f"unknown setting {key!r}; the settings are {known}")
        is_set = name in given or conf.get(CONF_PREFIX + name) is not None
        if not (is_set and key.isupper() and not before):
            raise ConfigurationError(
                f"the setting {key!r} is not read by Celery as it is written; write "
                f"{written[name]!r}"
            )


def _lower_case() -> set[str]:
    return {CONF_PREFIX + name for name in CONF_KEYS}


def _written(name: str, namespace: str) -> str:
    key = namespace + CONF_PREFIX + name
    return key.upper() if namespace.isupper() else key


def _likely_setting(key: str, namespace: str) -> tuple[str, str | None]:
    """Return what stands before the setting's name, the namespace left away, and the name of the
    setting that `key` is or resembles; None if it is the application's own.
    """
    lower = key.lower().removeprefix(namespace.lower())
    found = _OUR_NAME.fullmatch(lower)
    before = found["before"] if found else ""
    compact = lower[len(before) :].replace("_", "")
    exact = _COMPACT.get(compact)
    if exact is not None:
        return before, exact
    if before not in ("", "celery_"):
        return before, None
    if lower.startswith(before + CONF_PREFIX):
        return before, lower[len(before + CONF_PREFIX) :]
    near = difflib.get_close_matches(compact, _COMPACT, n=1, cutoff=0.9)
    return before, _COMPACT[near[0]] if near else None


def _is_code(value: object) -> bool:
    """True for what a configuration module has imported or defined."""
    return callable(value) or isinstance(value, types.ModuleType)
