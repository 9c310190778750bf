"""The strings of limits: their parts, and units of time."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from .errors import ConfigurationError
from .shaping_terms import TERMS_PATTERN, ShapingTerms, parse_terms

UNITS_MS = {
    "ms": 1, "msec": 1, "millisecond": 1,
    "s": 1000, "sec": 1000, "second": 1000,
    "m": 60_000, "min": 60_000, "minute": 60_000,
    "h": 3_600_000, "hr": 3_600_000, "hour": 3_600_000,
    "d": 86_400_000, "day": 86_400_000,
    "w": 604_800_000, "week": 604_800_000,
}  # fmt: skip
_VARIABLE_UNIT_DAYS = {"month": 30, "year": 365}
"""Days to write in place of what is no unit, because its length differs."""
MAX_INTERVAL_MS = 3660 * 86_400_000
"""The longest interval, ten years: a longer one is more likely a mistake in the unit."""

_LIMIT_TEXT = re.compile(
    r"""\s* (?P<amount>\d[\d_]*) \s* (?:/|\bper\b) \s*
        (?:(?P<count>\d+(?:\.\d+)?) \s*)? (?P<unit>[a-z]+)
        (?:\s+ (?P<bound>leap|strict))? (?:\s+ (?P<buckets>\d+) \s+ buckets?)?
        (?P<terms>"""
    + re.sub(r"\?P<\w+>", "", TERMS_PATTERN)
    + r"""*) \s*""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


class LimitText(NamedTuple):
    """The parts of a limit's string; None for what is not written."""

    amount: int
    interval_ms: int
    bound: Literal["leap", "strict"] | None
    buckets: int | None
    terms: ShapingTerms


def parse_limit_text(text: str) -> LimitText | None:
    """Return the parts of the string of a limit; None if it is not one.

    Raises `ConfigurationError` for a unit or a term that can not work.
    """
    found = _LIMIT_TEXT.fullmatch(text)
    if found is None:
        return None
    unit = found["unit"].lower()
    unit_ms = UNITS_MS.get(unit) or UNITS_MS.get(unit.removesuffix("s"))
    days = float(found["count"] or 1) * _VARIABLE_UNIT_DAYS.get(unit.removesuffix("s"), 0)
    if 0 < days * UNITS_MS["day"] <= MAX_INTERVAL_MS:
        raise ConfigurationError(
            f"a {unit.removesuffix('s')} has no fixed length; write days, such as "
            f'"{found["amount"]}/{days:g} days"'
        )
    if unit_ms is None:
        raise ConfigurationError(
            f"{found['unit']!r} is not a unit of time; write ms, second, minute, hour, day or week"
        )
    interval_ms = interval_ms_of(float(found["count"] or 1) * unit_ms / 1000)
    bound: Literal["leap", "strict"] | None = None
    if found["bound"]:
        bound = "strict" if found["bound"].lower() == "strict" else "leap"
    buckets = None if found["buckets"] is None else int(found["buckets"])
    terms = parse_terms(found["terms"], UNITS_MS)
    return LimitText(int(found["amount"]), interval_ms, bound, buckets, terms)


def first_unknown_words(text: str) -> str | None:
    """Return what follows the longest beginning of `text` that is a limit; None if none is."""
    words = text.split()
    for count in range(len(words) - 1, 0, -1):
        if _LIMIT_TEXT.fullmatch(" ".join(words[:count])):
            return " ".join(words[count:])
    return None


def interval_ms_of(per: float) -> int:
    """Return `per` seconds as ms. Allows a float's rounding error, but no fraction of a ms."""
    if isinstance(per, bool) or not isinstance(per, (int, float)) or not math.isfinite(per):
        raise ConfigurationError(f"per={per!r} is not an interval; write seconds, such as per=60")
    interval_ms = round(per * 1000)
    if abs(per * 1000 - interval_ms) > 1e-6 * max(1.0, per):
        raise ConfigurationError(
            f"per={per!r} s is not a whole number of milliseconds; round it to three decimals"
        )
    return interval_ms
