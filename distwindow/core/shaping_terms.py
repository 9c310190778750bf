"""The terms of a limit that shape traffic: how long a call may be held back (`max_wait`), and for
how long a limit warms up. Their checks, and how they are written in the string of a limit.

The names are those of Sentinel's FlowRule (maxQueueingTimeMs, warmUpPeriodSec) and of its
WarmUpController (coldFactor).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .errors import ConfigurationError

MAX_SHAPED_AMOUNT = 10**7
"""The largest amount of a paced or warming limit: its arithmetic stays exact in Lua's doubles."""
MAX_SHAPED_MS = 86_400_000
"""The longest `max_wait` and `warmup`, a day: more is more likely a mistake in the unit."""
MIN_PERIOD_MS = 1000
"""The least time between two refills of the tokens of a warm-up: Sentinel's second."""
MAX_COLD_FACTOR = 100
DEFAULT_COLD_FACTOR = 3
"""Sentinel's default."""

_DURATION = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)\s*[a-z]+"
TERMS_PATTERN = rf"""(?:\s+ (?:
    paced (?:\s+ (?P<max_wait>{_DURATION}) )?
  | (?:cold \s+ factor \s+ (?P<cold_factor>\d+) \s+)? warmup (?:\s+ (?P<warmup>{_DURATION}) )?
))"""
"""One term, in a verbose pattern. A duration may be missing, so that the error can say so."""
_TERM = re.compile(TERMS_PATTERN, re.VERBOSE | re.IGNORECASE | re.ASCII)
_UNITS_DESCENDING = (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


class ShapingTerms(NamedTuple):
    """The terms of one limit as they were given; None for those that were not. Seconds."""

    max_wait: float | None = None
    warmup: float | None = None
    cold_factor: int | None = None
    words: Mapping[str, str] = MappingProxyType({})
    """How they are written, by name, where they stand in a string: `paced 500ms`."""

    def or_else(self, others: ShapingTerms) -> ShapingTerms:
        """Return these terms, with those of `others` where there are none."""
        return ShapingTerms(
            others.max_wait if self.max_wait is None else self.max_wait,
            others.warmup if self.warmup is None else self.warmup,
            others.cold_factor if self.cold_factor is None else self.cold_factor,
            others.words if not self.words else self.words,
        )

    def shown(self, name: str, unit: str = "") -> str:
        """Return a term as the user has written it, for errors."""
        return self.words.get(name) or f"{name}={getattr(self, name)!r}{unit}"


class CheckedTerms(NamedTuple):
    """The terms of one limit, checked. `cold_factor` is None only where `warmup_ms` is."""

    max_wait_ms: int | None
    warmup_ms: int | None
    cold_factor: int | None


def parse_terms(text: str, units_ms: Mapping[str, int]) -> ShapingTerms:
    """Return the terms in `text`, the end of a limit's string, which `TERMS_PATTERN` matches."""
    found: dict[str, float] = {}
    words: dict[str, str] = {}
    factor: int | None = None
    for term in _TERM.finditer(text):
        name = "max_wait" if term[0].split()[0].lower() == "paced" else "warmup"
        word = "paced" if name == "max_wait" else "warmup"
        if term[name] is None:
            example = "paced 500ms" if name == "max_wait" else "warmup 10s"
            raise ConfigurationError(f'{word!r} needs a duration; write it like "{example}"')
        if name in found:
            raise ConfigurationError(f"{word!r} is written twice; leave one out")
        found[name] = _seconds(word, term[name], units_ms)
        words[name] = f"{word} {term[name]}"
        if term["cold_factor"]:
            factor = int(term["cold_factor"])
            words["cold_factor"] = f"cold factor {factor}"
    return ShapingTerms(found.get("max_wait"), found.get("warmup"), factor, words)


def _seconds(word: str, text: str, units_ms: Mapping[str, int]) -> float:
    number, unit = re.fullmatch(r"([-+\d.]+)\s*([a-z]+)", text, re.IGNORECASE).groups()  # type: ignore[union-attr]  # as `_DURATION` has matched
    unit_ms = units_ms.get(unit.lower()) or units_ms.get(unit.lower().removesuffix("s"))
    if unit_ms is None:
        raise ConfigurationError(
            f"{word} {text!r}: {unit!r} is not a unit of time; write ms, s, minutes or hours"
        )
    return float(number) * unit_ms / 1000


def check_terms(amount: int, interval_ms: int, terms: ShapingTerms) -> CheckedTerms:
    """Return the terms of a limit of `amount` permits per `interval_ms`, checked.

    Raises `ConfigurationError`, which names the term, for those that can not work.
    """
    max_wait_ms = warmup_ms = factor = None
    if terms.max_wait is not None:
        max_wait_ms = _whole_ms(terms, "max_wait", 0)
    if terms.warmup is not None:
        warmup_ms = _whole_ms(terms, "warmup", 1)
        factor = DEFAULT_COLD_FACTOR if terms.cold_factor is None else terms.cold_factor
        _check_cold_factor(terms, factor)
    elif terms.cold_factor is not None:
        raise ConfigurationError(
            f"cold_factor={terms.cold_factor!r} means nothing without a warm-up; give warmup, too"
        )
    if max_wait_ms is None and warmup_ms is None:
        return CheckedTerms(None, None, None)
    if amount > MAX_SHAPED_AMOUNT:
        raise ConfigurationError(
            f"an amount of {amount} is more than {MAX_SHAPED_AMOUNT}, the most of a limit that is "
            "paced or warms up; write the same rate with a shorter interval"
        )
    if warmup_ms is not None and factor is not None:
        if warmup_ms < max(MIN_PERIOD_MS, interval_ms):
            raise ConfigurationError(
                f"{terms.shown('warmup', ' s')} is shorter than one second, or than the interval "
                f"of {interval_ms / 1000:g} s, in which a limit counts what it admits; make warmup "
                "longer, or write the same rate with a shorter interval"
            )
        if min(warm_up_sizes(amount, interval_ms, warmup_ms, factor)) < 1:
            raise ConfigurationError(
                f"{terms.shown('warmup', ' s')} is too short for {amount} permits in "
                f"{interval_ms / 1000:g} s: not even one permit would be counted while the limit "
                "warms up; make warmup longer, or leave it out"
            )
        if max_wait_ms is None and amount < factor:
            name = "the cold factor" if terms.words else "cold_factor"
            raise ConfigurationError(
                f"an amount of {amount} is less than {name} {factor}, so a cold limit would admit "
                f"nothing and never warm up; raise the amount (with a longer interval, if need "
                f"be), lower {name}, or pace the limit"
            )
    return CheckedTerms(max_wait_ms, warmup_ms, factor)


def warm_up_sizes(amount: int, interval_ms: int, warmup_ms: int, factor: int) -> tuple[int, int]:
    """Return how many tokens there are at Sentinel's warning line, and how many more there are
    when the limit is cold (warningToken, and maxToken less that).
    """
    at_warning = warmup_ms * amount // interval_ms // (factor - 1)
    above = 2 * warmup_ms * amount // (interval_ms * (1 + factor))
    return at_warning, above


def terms_text(max_wait_ms: int | None, warmup_ms: int | None, factor: int | None) -> str:
    """Return the terms as the end of a limit's string; empty if there are none."""
    text = ""
    if warmup_ms is not None:
        if factor != DEFAULT_COLD_FACTOR:
            text += f" cold factor {factor}"
        text += f" warmup {_duration(warmup_ms)}"
    if max_wait_ms is not None:
        text += f" paced {_duration(max_wait_ms)}"
    return text


def _duration(ms: int) -> str:
    for unit, unit_ms in _UNITS_DESCENDING:
        if ms >= unit_ms and ms % unit_ms == 0:
            return f"{ms // unit_ms}{unit}"
    return "0ms"


def _whole_ms(terms: ShapingTerms, name: str, least_ms: int) -> int:
    seconds: object = getattr(terms, name)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigurationError(f"{name}={seconds!r} is not a number of seconds")
    shown = terms.shown(name, " s")
    if not math.isfinite(seconds) or not least_ms <= seconds * 1000 <= MAX_SHAPED_MS:
        raise ConfigurationError(f"{shown} is outside {least_ms / 1000:g} s to a day")
    ms = round(seconds * 1000)
    if abs(seconds * 1000 - ms) > 1e-6 * max(1.0, seconds):
        raise ConfigurationError(f"{shown} is not a whole number of milliseconds; round it to one")
    return ms


def _check_cold_factor(terms: ShapingTerms, factor: object) -> None:
    if isinstance(factor, bool) or not isinstance(factor, int) or not 1 < factor <= MAX_COLD_FACTOR:
        raise ConfigurationError(
            f"{terms.shown('cold_factor')} is not a whole number from 2 to {MAX_COLD_FACTOR}: a "
            "cold limit admits its amount divided by this"
        )
