"""The options of limiters, concurrency limits, breakers and guards, and checks that they share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigurationError, short_repr
from ..ring.clock import SYSTEM, Clock, check_clock
from ..ring.key import check_prefix
from ..support.failure_types import ErrorTypes, IgnoredErrors

ClockChoice = Literal["server", "client"]
Consistency = Literal["direct", "leased", "eventual"]

OTHER_ORIGINS = "(other)"
"""The name under which the origins are counted for which there was no room."""

MAX_ORIGIN_LENGTH = 128
"""Characters. Each origin is kept in the store as it is."""
_MAX_ORIGINS = 1000
_LONGEST_TIMEOUT_S = 100
"""Above it a timeout is taken for one in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The keyword arguments of one object, checked. Its constructor makes this once, and what it is
    made of takes it whole. The classes document the options, and have the defaults that hold; these
    here are for those that have no such option. Times are in seconds.
    """

    prefix: str = "distwindow"
    timeout: float = 0.25
    clock: ClockChoice = "server"
    name: str | None = None
    time: Clock = SYSTEM
    on_store_error: Any = "raise"
    on_unknown: Any = None
    consistency: Consistency = "direct"
    sync_interval: float = 0.1
    share: float | None = None
    flush_interval: float = 0.25
    max_local_keys: int = 100_000
    max_wait: float = 0.5
    borrow_share: float = 0.5
    errors: ErrorTypes = Exception
    ignore: IgnoredErrors = ()
    max_origins: int = 100
    observer: Any = None
    metric_name: str | None = None
    key_label: Any = None
    shadow: str = ""

    def __post_init__(self) -> None:
        check_prefix(self.prefix)
        for name, fits, what in _NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is None and name == "share":
                continue
            if not (is_number and -1e308 < value < 1e308 and fits(value)):
                raise ConfigurationError(f"{name}={value!r} is not {what}")
        self._check_store()
        self._check_consistency()
        max_keys = self.max_local_keys
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(
                f"max_local_keys={max_keys!r} is not a whole number of at least 1"
            )
        # Not isinstance: True is not a number of origins.
        if type(self.max_origins) is not int or not 1 <= self.max_origins <= _MAX_ORIGINS:
            raise ConfigurationError(
                f"max_origins={short_repr(self.max_origins)} is not a whole number from 1 to "
                f"{_MAX_ORIGINS}"
            )

    def _check_store(self) -> None:
        if self.timeout > _LONGEST_TIMEOUT_S:
            raise ConfigurationError(
                f"timeout={self.timeout!r} is in seconds, and a call that waits so long for its "
                f"store helps nobody; {self.timeout / 1000:g} would be as many ms"
            )
        if self.clock not in get_args(ClockChoice):
            # A URL may hold a password.
            shown = "..." if "://" in str(self.clock) else short_repr(self.clock)
            raise ConfigurationError(f'clock={shown} is neither "server" nor "client"')
        name: Any = self.name
        if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[!-~]+", name)):
            raise ConfigurationError(f"name={name!r} is not a word of printable ASCII")
        check_clock(self.time)

    def _check_consistency(self) -> None:
        consistency, share = self.consistency, self.share
        if consistency not in get_args(Consistency):
            raise ConfigurationError(
                f"consistency={consistency!r} is none of direct, leased, eventual"
            )
        if consistency == "leased" and self.clock == "client":
            raise ConfigurationError(
                'consistency="leased" needs clock="server": a lease ends with its bucket, and the '
                "clocks of clients do not agree when that is"
            )
        if share is not None and consistency != "eventual" and not self.uses_local_share:
            raise ConfigurationError(
                f'share={share!r} means nothing with consistency="{consistency}": it caps what one '
                'process admits with "eventual", or with on_store_error="local" without the store'
            )

    @property
    def uses_local_share(self) -> bool:
        """True if calls may be decided by a share of this process while the store is away."""
        return "local" in (self.on_store_error, self.on_unknown)


_ABOVE_0 = (lambda seconds: seconds > 0), "a number of seconds above 0"
_NUMBERS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("timeout", *_ABOVE_0),
    ("sync_interval", *_ABOVE_0),
    ("flush_interval", *_ABOVE_0),
    ("share", lambda share: 0 < share <= 1, "a part of the limit, above 0 and at most 1"),
    ("max_wait", lambda seconds: seconds >= 0, "a number of seconds of at least 0"),
    ("borrow_share", lambda share: 0 <= share <= 1, "a part of the limit, from 0 to 1"),
)
"""The options that are numbers: which values fit, and what they are."""


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


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout of `acquire` as a float; None where there is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
