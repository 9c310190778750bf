"""The settings of `RateLimits`, checked, and their names in Celery's configuration."""

from __future__ import annotations

import math
import types
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from ...errors import ConfigurationError, short_repr
from ...rules.shadow import is_in_shadow
from ...runtime.options import ClockChoice, Options
from ..limiter_pool import LimiterPool
from ..tasks import WhileStoreIsAway

CONF_PREFIX = "distwindow_"
OLDEST_CELERY = (5, 4)
_VISIBILITY_TIMEOUT_S = {"redis": 3600.0, "sqs": 1800.0}
"""The time that kombu's transports use where `visibility_timeout` is not set."""
_CONSUMER_TIMEOUT_S = 1800.0
"""RabbitMQ's `consumer_timeout` where it is not set; a worker cannot ask for it."""


@dataclass(frozen=True)
class Settings:
    """The settings of one worker, checked."""

    prefix: str = "distwindow"
    on_store_error: WhileStoreIsAway = "hold"
    max_parked: int = 1000
    """How many parked tasks a worker fetches beyond its prefetch count."""
    max_hold: float | None = None
    """How long, in seconds, a message is kept before it is sent back; None: by the broker."""
    timeout: float = 0.25
    """The deadline of one call to the limiter's store, in seconds."""
    clock: ClockChoice = "server"
    """As for `Limiter`, which checks it."""
    observer: Any = None
    """Who is told of tasks by their names, with `key_label` of their limit keys."""
    key_label: Any = None

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_parked, int) and not isinstance(self.max_parked, bool)
        checks = {
            "on_store_error": (
                self.on_store_error in get_args(WhileStoreIsAway), 'neither "hold" nor "run"'
            ),
            "max_parked": (
                is_whole and self.max_parked >= 0, "not a whole number of at least 0"
            ),
            "max_hold": (
                self.max_hold is None or _is_seconds(self.max_hold),
                "not a number of seconds above 0, or None",
            ),
            "timeout": (_is_seconds(self.timeout), "not a number of seconds above 0"),
        }  # fmt: skip
        for name, (is_right, wrong) in checks.items():
            if not is_right:
                shown = short_repr(getattr(self, name))
                raise ConfigurationError(f"{CONF_PREFIX}{name}={shown} is {wrong}")

    def limiters(self, store: Any) -> LimiterPool:
        """Return the limiters of a worker, with what adds up for its observer. Raises
        `ConfigurationError` for what can never work.
        """
        options = Options(
            prefix=self.prefix, timeout=self.timeout, clock=self.clock, name="distwindow-celery"
        )
        limiters = LimiterPool(store, options)
        observed = replace(
            options, observer=self.observer, key_label=self.key_label, shadow=is_in_shadow()
        )
        limiters.observe(observed, "queue")
        return limiters


SETTINGS = tuple(field.name for field in fields(Settings))
CONF_KEYS = ("url", "limits", *SETTINGS)


def make_settings(conf: Any, given: dict[str, Any]) -> Settings:
    """Return the settings of an application: what was given to `RateLimits`, else what its
    configuration says. Raises `ConfigurationError` for values that cannot work.
    """
    chosen = {}
    for name in SETTINGS:
        value = given.get(name)
        if value is None:
            value = conf.get(CONF_PREFIX + name)
        if value is not None:
            chosen[name] = value
    return Settings(**chosen)


def max_hold_s(settings: Settings, driver: str, transport_options: dict[str, Any]) -> float:
    """Return how long a message may be kept unacknowledged: half of the time after which the broker
    gives it to another worker. `driver` is the `driver_type` of kombu's transport.
    """
    if settings.max_hold is not None:
        return float(settings.max_hold)
    if driver in ("memory", "filesystem"):
        return math.inf  # these give a message to nobody else while the worker lives
    set_by_user = transport_options.get("visibility_timeout")
    if set_by_user:
        return float(set_by_user) / 2
    return _VISIBILITY_TIMEOUT_S.get(driver, _CONSUMER_TIMEOUT_S) / 2


def check_celery_version(version: tuple[Any, ...]) -> None:
    """Raise `ConfigurationError` for a Celery whose worker has not what the gate needs."""
    if tuple(version[:2]) < OLDEST_CELERY:
        oldest = ".".join(map(str, OLDEST_CELERY))
        found = ".".join(map(str, version[:3]))
        raise ConfigurationError(
            f"distwindow.contrib.celery needs Celery {oldest} or later, and this is {found}; "
            f"pip install 'celery>={oldest}'"
        )


def check_conf_keys(conf: Any, given: Collection[str] = ()) -> None:
    """Raise `ConfigurationError` for a `distwindow_...` setting that does not exist, and for one
    that Celery does not read as it is written, such as `DISTWINDOW_LIMITS` where the configuration
    has no namespace, or another.

    Celery accepts settings of any name, and one that it does not read would leave the tasks without
    limits. `given` are the settings that `RateLimits` was given. A name in capitals of a setting
    that is set otherwise is left alone: it may be the application's own.
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


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf
