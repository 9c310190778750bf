"""The names of the settings in Celery's configuration, and the check that each one given is read.

Celery accepts settings of any name, and one that it does not read would leave the tasks without
limits.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

from ...core.errors import ConfigurationError

CONF_PREFIX = "distwindow_"
CONF_KEYS = ("url", "prefix", "limits", "on_store_error", "max_parked", "max_hold", "timeout")


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
    read = {*written.values(), *(CONF_PREFIX + name for name in CONF_KEYS)}
    for key in keys:
        plain = key.lower().removeprefix(namespace.lower()).removeprefix("celery_")
        if key in read or not plain.startswith(CONF_PREFIX) or _is_code(conf.get(key)):
            continue
        name = plain.removeprefix(CONF_PREFIX)
        if name not in written:
            known = ", ".join(written.values())
            raise ConfigurationError(f"unknown setting {key!r}; the settings are {known}")
        is_set = name in given or conf.get(CONF_PREFIX + name) is not None
        if not (is_set and key.isupper()):
            raise ConfigurationError(
                f"the setting {key!r} is not read by Celery as it is written; write "
                f"{written[name]!r}"
            )


def _written(name: str, namespace: str) -> str:
    key = namespace + CONF_PREFIX + name
    return key.upper() if namespace.isupper() else key


def _is_code(value: object) -> bool:
    """True for what a configuration module has imported or defined."""
    return callable(value) or isinstance(value, types.ModuleType)
