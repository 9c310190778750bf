"""Limits: a number of permits per interval, counted in buckets, under a bound.

`per` is in seconds, as users write it; names that end in `_ms` are whole ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from .errors import ConfigurationError, short_repr
from .limit_text import (
    MAX_INTERVAL_MS,
    UNITS_MS,
    LimitText,
    first_unknown_words,
    interval_ms_of,
    parse_limit_text,
)
from .shaping_terms import ShapingTerms, check_terms, terms_text

Bound = Literal["leap", "strict"]

MAX_AMOUNT = 10**12
"""The largest amount of a limit: sums stay exact in Lua's doubles and have plain digits."""

MAX_BUCKETS = 512
"""The most buckets of a limit: beyond some 500 a Redis hash loses its compact encoding."""

_DEFAULT_BUCKETS: dict[Bound, int] = {"leap": 10, "strict": 60}

_SEPARATORS = r"[;,|]"
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""Never matches between two limits, because each ends in a letter."""
_ARGUMENTS = {
    "per": "an interval",
    "bound": "a bound",
    "buckets": "a number of buckets",
    "max_wait": "a pace",
    "warmup": "a warm-up",
    "cold_factor": "a cold factor",
}
"""What the arguments are called where they stand in a string."""
_UNITS_DESCENDING = ("week", "day", "hour", "minute", "second", "ms")
_EXAMPLES = (
    'write it like "100/second", "10 per 2 hours", "100/5m", "5000/day strict 24 buckets" or '
    '"100/second warmup 10s paced 500ms"'
)
_MAX_CHARS = 200
"""The longest string of a limit."""
_ORDER = (
    'what may follow the interval is, in this order: "strict", "24 buckets", "cold factor 3", '
    '"warmup 10s", "paced 500ms"'
)


@dataclass(frozen=True, slots=True, init=False)
class Limit:
    """At most `amount` permits per interval, counted in `buckets` buckets.

    `Limit("100/second")` or `Limit(100, per=1.0, buckets=10, bound="leap")`, `per` in seconds.
    `bound="leap"` is Sentinel's: never more than `amount` in a window that is aligned to the
    buckets, and up to twice that in any other. `bound="strict"` sums one bucket more and never
    admits more than `amount` in any window. `buckets` must divide the interval in ms; by default it
    is the largest divisor up to 10 (`leap`) or 60 (`strict`). `Limit(str(limit)) == limit`.

    `Limit("100/second paced 500ms")` or `max_wait=0.5` lets calls through one by one at the pace of
    the limit: a call is admitted with the seconds to wait, or refused where it would have to wait
    for longer than `max_wait`. `Limit("100/second warmup 10s")` or `warmup=10.0` (seconds) admits
    `amount / cold_factor` after idle time, and the whole amount only after about `warmup` of
    demand; `cold_factor` is 3 by default, in a string `"cold factor 5 warmup 10s"`. Both together:
    the pace warms up. These are Sentinel's ThrottlingController, WarmUpController and
    WarmUpRateLimiterController, for the whole fleet (docs/howto/pacing.md).

    What a string leaves out may be given as an argument; what it says must not be given again.

    Raises `ConfigurationError` with the value, what is wrong with it, and what to write.
    """

    amount: int
    interval_ms: int
    buckets: int
    bound: Bound
    max_wait_ms: int | None
    """For how long a call is held back at most to keep the pace, ms; None: it is not paced."""
    warmup_ms: int | None
    """For how long the limit warms up, ms; None: it is always warm."""
    cold_factor: int | None
    """By what the amount is divided when the limit is cold; None: it is always warm."""

    def __init__(
        self,
        amount: int | str,
        per: float | None = None,
        buckets: int | None = None,
        bound: Bound | None = None,
        *,
        max_wait: float | None = None,
        warmup: float | None = None,
        cold_factor: int | None = None,
    ) -> None:
        text, terms = amount, ShapingTerms(max_wait, warmup, cold_factor)
        if isinstance(text, str) and "://" in text:  # not shown, because it may hold a password
            raise ConfigurationError(
                "a URL is not a limit: the URL is the limiter's first argument and the limits are "
                f"the second; {_EXAMPLES}"
            )
        try:
            if isinstance(amount, str):
                written = _parse(amount)
                _check_given_once("per", per, written.interval_ms)
                _check_given_once("bound", bound, written.bound)
                _check_given_once("buckets", buckets, written.buckets)
                for name in ("max_wait", "warmup", "cold_factor"):
                    _check_given_once(name, getattr(terms, name), getattr(written.terms, name))
                amount, interval_ms = written.amount, written.interval_ms
                terms = terms.or_else(written.terms)
                bound = written.bound if bound is None else bound
                buckets = written.buckets if buckets is None else buckets
            else:
                interval_ms = interval_ms_of(1.0 if per is None else per)
            bound = "leap" if bound is None else bound
            buckets = _number_of_buckets(amount, interval_ms, buckets, bound)
            checked = check_terms(amount, interval_ms, terms)
        except ConfigurationError as exc:
            if isinstance(text, str):
                raise ConfigurationError(f"limit {short_repr(text)}: {exc}") from None
            raise
        object.__setattr__(self, "amount", amount)
        object.__setattr__(self, "interval_ms", interval_ms)
        object.__setattr__(self, "buckets", buckets)
        object.__setattr__(self, "bound", bound)
        for name, value in zip(checked._fields, checked, strict=True):
            object.__setattr__(self, name, value)

    @property
    def per(self) -> float:
        """The interval in seconds."""
        return self.interval_ms / 1000

    @property
    def bucket_ms(self) -> int:
        """The length of one bucket in ms."""
        return self.interval_ms // self.buckets

    @property
    def span(self) -> int:
        """How many buckets are summed: `buckets`, and one more when strict."""
        return self.buckets + (self.bound == "strict")

    @property
    def is_shaped(self) -> bool:
        """True if the limit is paced or warms up."""
        return self.max_wait_ms is not None or self.warmup_ms is not None

    def __str__(self) -> str:
        unit = next(unit for unit in _UNITS_DESCENDING if self.interval_ms % UNITS_MS[unit] == 0)
        count = self.interval_ms // UNITS_MS[unit]
        text = f"{self.amount}/{unit}" if count == 1 else f"{self.amount}/{count} {unit}"
        text += "s" if count > 1 and unit != "ms" else ""
        text += " strict" if self.bound == "strict" else ""
        default = _largest_divisor(self.interval_ms, _DEFAULT_BUCKETS[self.bound])
        text += "" if self.buckets == default else f" {self.buckets} buckets"
        return text + terms_text(self.max_wait_ms, self.warmup_ms, self.cold_factor)

    def __repr__(self) -> str:
        return f"Limit({str(self)!r})"


LimitSpec: TypeAlias = "Limit | str | Iterable[Limit | str]"
"""One limit or several: `Limit` objects, strings, or several limits in one string."""


def parse_limits(spec: LimitSpec) -> tuple[Limit, ...]:
    """Return the limits of `spec`, the shortest interval first.

    Raises `ConfigurationError` for an empty spec, for what is not a limit, and for two limits over
    the same buckets, of which the larger could never refuse a call.
    """
    if isinstance(spec, Limit):
        return (spec,)
    parts: list[Limit] = []
    for part in [spec] if isinstance(spec, str) else _iterate(spec):
        if isinstance(part, Limit):
            parts.append(part)
        elif isinstance(part, str):
            parts.extend(_split(part))
        else:
            raise ConfigurationError(f"{short_repr(part)} is not a limit; {_EXAMPLES}")
    if not parts:
        raise ConfigurationError(f"no limit was given; {_EXAMPLES}")
    parts.sort(key=lambda limit: (limit.interval_ms, limit.bucket_ms, limit.span))
    for first, second in pairwise(parts):
        if (first.bucket_ms, first.span) == (second.bucket_ms, second.span):
            raise ConfigurationError(
                f"limits {str(first)!r} and {str(second)!r} count the same buckets, where each "
                "call would be counted twice; leave one out, or give it another number of buckets"
            )
    return tuple(parts)


def expires_in_ms(limit: Limit, now_ms: int) -> int:
    """Return how long after `now_ms` the bucket of `now_ms` expires: when the window of `limit` is
    empty if no more calls come.
    """
    return limit.span * limit.bucket_ms - now_ms % limit.bucket_ms


def _split(text: str) -> Iterable[Limit]:
    """Yield the limits of one string."""
    for part in [text] if _THOUSANDS.search(text) else re.split(_SEPARATORS, text):
        try:
            yield Limit(part)
        except ConfigurationError as exc:
            where = f" (in {short_repr(text)})" if part != text else ""
            raise ConfigurationError(f"{exc}{where}") from None


def _iterate(spec: object) -> Iterable[object]:
    if isinstance(spec, Iterable) and not isinstance(spec, (bytes, dict)):
        return spec
    raise ConfigurationError(f"{short_repr(spec)} is not a limit; {_EXAMPLES}")


def _number_of_buckets(amount: int, interval_ms: int, buckets: int | None, bound: Bound) -> int:
    """Check the parts of a limit, and return its number of buckets."""
    if bound not in get_args(Bound):
        raise ConfigurationError(f'bound={bound!r} is neither "leap" nor "strict"')
    _check_whole("amount", amount, 1, MAX_AMOUNT)
    if not 1 <= interval_ms <= MAX_INTERVAL_MS:
        raise ConfigurationError(
            f"an interval of {interval_ms / 1000:g} s is outside 0.001 s to ten years"
        )
    if buckets is None:
        return _largest_divisor(interval_ms, _DEFAULT_BUCKETS[bound])
    _check_whole("buckets", buckets, 1, MAX_BUCKETS)
    if interval_ms % buckets:
        raise ConfigurationError(
            f"{buckets} buckets do not divide an interval of {interval_ms} ms evenly; "
            f"the nearest that do: {_nearest_divisors(interval_ms, buckets)}"
        )
    return buckets


def _parse(text: str) -> LimitText:
    """Return the parts of a limit's string; raise `ConfigurationError` if it is not one."""
    if len(text) > _MAX_CHARS:  # errors would repeat it, and Python converts no number so long
        raise ConfigurationError(f"it has {len(text)} characters; {_EXAMPLES}")
    written = parse_limit_text(text)
    if written is None:
        if _THOUSANDS.search(text):
            raise ConfigurationError(_comma_message(text))
        if re.search(_SEPARATORS, text):
            raise ConfigurationError(f"not understood; {_EXAMPLES}; write several limits as a list")
        unknown = first_unknown_words(text)
        if unknown is not None:
            raise ConfigurationError(f"{unknown!r} is not understood; {_ORDER}")
        raise ConfigurationError(f"not understood; {_EXAMPLES}")
    return written


def _check_given_once(name: str, given: object, written: object) -> None:
    """Raise `ConfigurationError` for an argument that stands in the string as well."""
    if given is not None and written is not None:
        raise ConfigurationError(
            f"the string already has {_ARGUMENTS[name]}; leave out {name}={given!r}"
        )


def _comma_message(text: str) -> str:
    """Return what to write instead of limits with commas in their amounts: the same without commas,
    or, where that is not a limit either, what to write instead of that.
    """
    without_commas = _THOUSANDS.sub("", text).strip()
    try:
        for part in re.split(_SEPARATORS, without_commas):
            Limit(part)
    except ConfigurationError as exc:
        return f"write amounts without a comma; {exc}"
    return f"write amounts without a comma: {without_commas!r}"


def _check_whole(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigurationError(
            f"{name}={value!r} is not a whole number from {lowest} to {highest}"
        )


def _largest_divisor(number: int, highest: int) -> int:
    candidates = range(min(number, highest), 0, -1)
    return next(divisor for divisor in candidates if number % divisor == 0)


def _nearest_divisors(number: int, around: int) -> str:
    below = _largest_divisor(number, min(around, MAX_BUCKETS))
    above = next((n for n in range(around, min(number, MAX_BUCKETS) + 1) if number % n == 0), None)
    return str(below) if above is None else f"{below} or {above}"
