"""The settings of the gate: arguments of `RateLimits`, or `distwindow_...` in the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...core.errors import ConfigurationError, short_repr
from .setting_names import CONF_PREFIX

OnStoreError = Literal["hold", "run"]

OLDEST_CELERY = (5, 4)

_VISIBILITY_TIMEOUT_S = {"redis": 3600.0, "sqs": 1800.0}
"""What kombu's transports use where `visibility_timeout` is not set."""
_CONSUMER_TIMEOUT_S = 1800.0
"""RabbitMQ's `consumer_timeout` where it is not set; a worker cannot ask for it."""


@dataclass(frozen=True)
class Settings:
    """The settings of one worker, checked."""

    prefix: str = "distwindow"
    on_store_error: OnStoreError = "hold"
    max_parked: int = 1000
    """How many parked tasks a worker fetches beyond its prefetch count."""
    max_hold: float | None = None
    """How long, in seconds, a message is kept before it is sent back; None: by the broker."""
    timeout: float = 0.25
    """The deadline of one call to the limiter's store, in seconds."""

    def __post_init__(self) -> None:
        if self.on_store_error not in get_args(OnStoreError):
            raise ConfigurationError(
                f"distwindow_on_store_error={short_repr(self.on_store_error)} is neither "
                '"hold" nor "run"'
            )
        parked = self.max_parked
        if isinstance(parked, bool) or not isinstance(parked, int) or parked < 0:
            raise ConfigurationError(
                f"distwindow_max_parked={short_repr(parked)} is not a whole number of at least 0"
            )
        if self.max_hold is not None and not _is_seconds(self.max_hold):
            raise ConfigurationError(
                f"distwindow_max_hold={short_repr(self.max_hold)} is not a number of seconds above "
                "0, or None"
            )
        if not _is_seconds(self.timeout):
            raise ConfigurationError(
                f"distwindow_timeout={short_repr(self.timeout)} is not a number of seconds above 0"
            )


def make_settings(conf: Any, given: dict[str, Any]) -> Settings:
    """Return the settings of an application: what was given to `RateLimits`, else what its
    configuration says. Raises `ConfigurationError` for values that cannot work.
    """
    chosen = {}
    for name in ("prefix", "on_store_error", "max_parked", "max_hold", "timeout"):
        value = given.get(name)
        if value is None:
            value = conf.get(CONF_PREFIX + name)
        if value is not None:
            chosen[name] = value
    return Settings(**chosen)


def check_celery_version(version: tuple[Any, ...]) -> None:
    """Raise `ConfigurationError` for a Celery whose worker has not what the gate needs."""
    if tuple(version[:2]) < OLDEST_CELERY:
        oldest = ".".join(map(str, OLDEST_CELERY))
        found = ".".join(map(str, version[:3]))
        raise ConfigurationError(
            f"distwindow.contrib.celery needs Celery {oldest} or later, and this is {found}; "
            f"pip install 'celery>={oldest}'"
        )


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


def _is_seconds(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < math.inf
