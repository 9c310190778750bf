"""Limits: what they are, and how they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

from ..errors import ConfigurationError, short_repr

_DURATION = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)\s*[a-z]+"
_TERMS_PATTERN = rf"""(?:\s+ (?:
    paced (?:\s+ (?P<max_wait>{_DURATION}) )?
  | (?:cold \s+ factor \s+ (?P<cold_factor>\d+) \s+)? warmup (?:\s+ (?P<warmup>{_DURATION}) )?
))"""
"""One term, in a verbose pattern. A duration may be missing, so that the error can say so."""
UNITS_MS = {
    "ms": 1, "msec": 1, "millisecond": 1,
    "s": 1000, "sec": 1000, "second": 1000,
    "m": 60_000, "min": 60_000, "minute": 60_000,
    "h": 3_600_000, "hr": 3_600_000, "hour": 3_600_000,
    "d": 86_400_000, "day": 86_400_000,
    "w": 604_800_000, "week": 604_800_000,
}  # fmt: skip
# `per` is in seconds, as users write it; names that end in `_ms` are whole ms.
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
"""Names of the arguments where they stand in a string."""
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
    # What follows from these is kept, because each call needs it.
    bucket_ms: int = field(compare=False)
    """The length of one bucket in ms."""
    span: int = field(compare=False)
    """The number of buckets that are summed: `buckets`, and one more when strict."""

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
        if isinstance(amount, str) and "://" in amount:  # not shown: it may hold a password
            raise ConfigurationError(
                "a URL is not a limit: the URL is the limiter's first argument and the limits are "
                f"the second; {_EXAMPLES}"
            )
        given = {
            "amount": amount, "per": per, "bound": bound, "buckets": buckets,
            "max_wait": max_wait, "warmup": warmup, "cold_factor": cold_factor,
        }  # fmt: skip
        try:
            checked = _checked(given)
        except ConfigurationError as exc:
            if isinstance(amount, str):
                raise ConfigurationError(f"limit {short_repr(amount)}: {exc}") from None
            raise
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def per(self) -> float:
        """The interval in seconds."""
        return self.interval_ms / 1000

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
        if self.warmup_ms is not None:
            factor = self.cold_factor
            text += "" if factor == DEFAULT_COLD_FACTOR else f" cold factor {factor}"
            text += f" warmup {_duration(self.warmup_ms)}"
        return text if self.max_wait_ms is None else f"{text} paced {_duration(self.max_wait_ms)}"

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
    if not isinstance(spec, Iterable) or isinstance(spec, (bytes, dict)):
        raise ConfigurationError(f"{short_repr(spec)} is not a limit; {_EXAMPLES}")
    for part in [spec] if isinstance(spec, str) else spec:
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


def reads_as_limit(value: object) -> bool:
    """Return whether `value` is a limit as text, such as "5/minute"."""
    try:
        return isinstance(value, str) and bool(Limit(value))
    except ConfigurationError:
        return False


def expires_in_ms(limit: Limit, now_ms: int) -> int:
    """Return the ms until the bucket of `now_ms` expires: an uncalled window is empty then."""
    return limit.span * limit.bucket_ms - now_ms % limit.bucket_ms


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a limit by the arguments that were given, of which `amount` may be
    the string of a limit. Raises `ConfigurationError` for what can not work.
    """
    words: dict[str, str] = {}
    if isinstance(given["amount"], str):
        written, words = _parse(given["amount"])
        for name, article in _ARGUMENTS.items():
            if name in written and given[name] is not None:
                raise ConfigurationError(
                    f"the string already has {article}; leave out {name}={given[name]!r}"
                )
        given = given | written
    amount = given["amount"]
    bound: Bound = "leap" if given["bound"] is None else given["bound"]
    interval_ms = _interval_ms_of(1.0 if given["per"] is None else given["per"])
    buckets = _number_of_buckets(amount, interval_ms, given["buckets"], bound)
    return {
        "amount": amount,
        "interval_ms": interval_ms,
        "buckets": buckets,
        "bound": bound,
        **_checked_terms(amount, interval_ms, given, words),
        "bucket_ms": interval_ms // buckets,
        "span": buckets + (bound == "strict"),
    }


def _parse(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that a limit's string has, and the terms among them as it has them."""
    if len(text) > _MAX_CHARS:  # errors would repeat it, and Python converts no number so long
        raise ConfigurationError(f"it has {len(text)} characters; {_EXAMPLES}")
    found = _LIMIT_TEXT.fullmatch(text)
    if found is None:
        raise ConfigurationError(_what_to_write(text))
    unit = found["unit"].lower()
    days = float(found["count"] or 1) * _VARIABLE_UNIT_DAYS.get(unit.removesuffix("s"), 0)
    if 0 < days * UNITS_MS["day"] <= MAX_INTERVAL_MS:
        raise ConfigurationError(
            f"a {unit.removesuffix('s')} has no fixed length; write days, such as "
            f'"{found["amount"]}/{days:g} days"'
        )
    if (unit_ms := _unit_ms(unit)) is None:
        raise ConfigurationError(
            f"{found['unit']!r} is not a unit of time; write ms, second, minute, hour, day or week"
        )
    written: dict[str, Any] = {
        "amount": int(found["amount"]),
        "per": float(found["count"] or 1) * unit_ms / 1000,
    }
    if found["bound"]:
        written["bound"] = found["bound"].lower()
    if found["buckets"]:
        written["buckets"] = int(found["buckets"])
    words = _add_terms(written, found["terms"])
    for name, highest in (("amount", MAX_AMOUNT), ("buckets", MAX_BUCKETS)):
        if not 1 <= written.get(name, 1) <= highest:
            shown = "number of buckets" if name == "buckets" else name
            raise ConfigurationError(f"the {shown}, {written[name]}, is outside 1 to {highest}")
    return written, words


def _what_to_write(text: str) -> str:
    """Return what to write in place of `text`, which is not a limit."""
    if _THOUSANDS.search(text):
        return _comma_message(text)
    if re.search(_SEPARATORS, text):
        return f"not understood; {_EXAMPLES}; write several limits as a list"
    if short := re.match(r"\s*\d+[km]\b", text, re.IGNORECASE):
        return f"{short[0].strip()!r} is not understood; write the number in full"
    if (meant := _text_meant(text)) is not None:
        return f"not understood; write it as {meant!r}"
    words = text.split()
    for count in range(len(words) - 1, 0, -1):  # the longest beginning that is a limit
        if _LIMIT_TEXT.fullmatch(" ".join(words[:count])):
            return f"{' '.join(words[count:])!r} is not understood; {_ORDER}"
    return f"not understood; {_EXAMPLES}"


def _split(text: str) -> Iterable[Limit]:
    """Yield the limits of one string."""
    for part in [text] if _THOUSANDS.search(text) else re.split(_SEPARATORS, text):
        try:
            yield Limit(part)
        except ConfigurationError as exc:
            where = f" (in {short_repr(text)})" if part != text else ""
            raise ConfigurationError(f"{exc}{where}") from None


def _comma_message(text: str) -> str:
    """Return what to write in place of amounts with commas, or of what they are without."""
    without_commas = _THOUSANDS.sub("", text).strip()
    try:
        for part in re.split(_SEPARATORS, without_commas):
            Limit(part)
    except ConfigurationError as exc:
        return f"write amounts without a comma; {exc}"
    return f"write amounts without a comma: {without_commas!r}"


def _check_whole(name: str, value: object, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise ConfigurationError(f"{name}={value!r} is not a whole number from 1 to {highest}")


def _number_of_buckets(amount: int, interval_ms: int, buckets: int | None, bound: Bound) -> int:
    """Check the parts of a limit, and return its number of buckets."""
    if bound not in get_args(Bound):
        raise ConfigurationError(f'bound={bound!r} is neither "leap" nor "strict"')
    _check_whole("amount", amount, MAX_AMOUNT)
    if not 1 <= interval_ms <= MAX_INTERVAL_MS:
        raise ConfigurationError(
            f"an interval of {interval_ms / 1000:g} s is outside 0.001 s to ten years"
        )
    if buckets is None:
        return _largest_divisor(interval_ms, _DEFAULT_BUCKETS[bound])
    _check_whole("buckets", buckets, MAX_BUCKETS)
    if interval_ms % buckets:
        raise ConfigurationError(
            f"{buckets} buckets do not divide an interval of {interval_ms} ms evenly; "
            f"the nearest that do: {_nearest_divisors(interval_ms, buckets)}"
        )
    return buckets


def _largest_divisor(number: int, highest: int) -> int:
    candidates = range(min(number, highest), 0, -1)
    return next(divisor for divisor in candidates if number % divisor == 0)


def _nearest_divisors(number: int, around: int) -> str:
    below = _largest_divisor(number, min(around, MAX_BUCKETS))
    above = next((n for n in range(around, min(number, MAX_BUCKETS) + 1) if number % n == 0), None)
    return str(below) if above is None else f"{below} or {above}"


_VARIABLE_UNIT_DAYS = {"month": 30, "year": 365}
"""Days to write in place of what is no unit, because its length differs."""
MAX_INTERVAL_MS = 3660 * 86_400_000
"""The longest interval, ten years: a longer one is more likely a mistake in the unit."""
_LIMIT_TEXT = re.compile(
    r"""\s* (?P<amount>\d+(?:_\d+)*) \s* (?:/|\bper\b) \s*
        (?:(?P<count>\d+(?:\.\d+)?) \s*)? (?P<unit>[a-z]+)
        (?:\s+ (?P<bound>leap|strict))? (?:\s+ (?P<buckets>\d+) \s+ buckets?)?
        (?P<terms>"""
    + re.sub(r"\?P<\w+>", "", _TERMS_PATTERN)
    + r"""*) \s*""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


def _unit_ms(unit: str) -> int | None:
    """Return the ms of a unit of time; None if it is none."""
    return UNITS_MS.get(unit.lower()) or UNITS_MS.get(unit.lower().removesuffix("s"))


_OTHER_TEXT = re.compile(
    r"""\s* (\d{1,12}(?:\.\d{1,6})?) \s* [a-z]*? \s* (?:/|\bper\b|\ba\b) \s*
        (\d{0,6}) \s* ([a-z]+.*)""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
"""An amount with a fraction, or with what is counted: "0.5/second", "100 requests per minute"."""


def _text_meant(text: str) -> str | None:
    """Return the string of a limit that `text` means, which is not one; None if it is not known."""
    found = _OTHER_TEXT.fullmatch(text)
    if found is None:
        return None
    amount = Fraction(found[1])
    count = int(found[2] or 1) * amount.denominator
    meant = f"{amount.numerator}/{'' if count == 1 else f'{count} '}{found[3]}"
    return meant if _LIMIT_TEXT.fullmatch(meant) else None


def _interval_ms_of(per: float) -> int:
    """Return `per` seconds as ms. Allows a float's rounding error, but no fraction of a ms."""
    if isinstance(per, bool) or not isinstance(per, (int, float)) or not math.isfinite(per):
        raise ConfigurationError(f"per={per!r} is not an interval; write seconds, such as per=60")
    interval_ms = round(per * 1000)
    if abs(per * 1000 - interval_ms) > 1e-6 * max(1.0, per):
        raise ConfigurationError(
            f"per={per!r} s is not a whole number of milliseconds; round it to three decimals"
        )
    return interval_ms


MAX_SHAPED_AMOUNT = 10**7
"""The largest amount of a paced or warming limit: its arithmetic stays exact in Lua's doubles."""
MAX_SHAPED_MS = 86_400_000
"""The longest `max_wait` and `warmup`, a day: more is more likely a mistake in the unit."""
MIN_PERIOD_MS = 1000
"""The least time between two refills of the tokens of a warm-up: Sentinel's second."""
MAX_COLD_FACTOR = 100
DEFAULT_COLD_FACTOR = 3
"""Sentinel's default."""
_TERM = re.compile(_TERMS_PATTERN, re.VERBOSE | re.IGNORECASE | re.ASCII)


def _add_terms(written: dict[str, Any], text: str) -> dict[str, str]:
    """Add the terms in `text`, the end of a limit's string, to `written`, in seconds. Return each
    as it stands there.
    """
    words: dict[str, str] = {}
    for term in _TERM.finditer(text):
        is_pace = term[0].split()[0].lower() == "paced"
        name, word = ("max_wait", "paced") if is_pace else ("warmup", "warmup")
        if term[name] is None:
            example = "paced 500ms" if is_pace else "warmup 10s"
            raise ConfigurationError(f'{word!r} needs a duration; write it like "{example}"')
        if name in words:
            raise ConfigurationError(f"{word!r} is written twice; leave one out")
        written[name], words[name] = _seconds(word, term[name]), f"{word} {term[name]}"
        if term["cold_factor"]:
            written["cold_factor"] = int(term["cold_factor"])
            words["cold_factor"] = f"cold factor {written['cold_factor']}"
    return words


def _seconds(word: str, text: str) -> float:
    number, unit = re.fullmatch(r"([-+\d.]+)\s*([a-z]+)", text, re.IGNORECASE).groups()  # type: ignore[union-attr]  # as `_DURATION` has matched
    if (unit_ms := _unit_ms(unit)) is None:
        raise ConfigurationError(
            f"{word} {text!r}: {unit!r} is not a unit of time; write ms, s, minutes or hours"
        )
    return float(number) * unit_ms / 1000


def _checked_terms(
    amount: int, interval_ms: int, given: Mapping[str, Any], words: Mapping[str, str]
) -> dict[str, int | None]:
    """Return the terms of a limit: for how long a call may be held back, and for how long the
    limit warms up (maxQueueingTimeMs and warmUpPeriodSec of Sentinel's FlowRule; coldFactor of its
    WarmUpController). Errors show them as in `words`, where the user has written a string.
    """
    max_wait_ms = warmup_ms = None
    factor = given["cold_factor"]
    if given["max_wait"] is not None:
        max_wait_ms = _whole_ms(given["max_wait"], "max_wait", 0, words)
    if given["warmup"] is not None:
        warmup_ms = _whole_ms(given["warmup"], "warmup", 1, words)
        factor = DEFAULT_COLD_FACTOR if factor is None else factor
        is_whole = isinstance(factor, int) and not isinstance(factor, bool)
        if not is_whole or not 1 < factor <= MAX_COLD_FACTOR:
            raise ConfigurationError(
                f"{_shown('cold_factor', factor, words)} is not a whole number from 2 to "
                f"{MAX_COLD_FACTOR}: a cold limit admits its amount divided by this"
            )
    elif factor is not None:
        raise ConfigurationError(
            f"cold_factor={factor!r} means nothing without a warm-up; give warmup, too"
        )
    is_shaped = max_wait_ms is not None or warmup_ms is not None
    if is_shaped and amount > MAX_SHAPED_AMOUNT:
        raise ConfigurationError(
            f"an amount of {amount} is more than {MAX_SHAPED_AMOUNT}, the most of a limit that is "
            "paced or warms up; write the same rate with a shorter interval"
        )
    if warmup_ms is not None:
        shown = _shown("warmup", given["warmup"], words, " s")
        if warmup_ms < max(MIN_PERIOD_MS, interval_ms):
            raise ConfigurationError(
                f"{shown} is shorter than one second, or than the interval "
                f"of {interval_ms / 1000:g} s, in which a limit counts what it admits; make warmup "
                "longer, or write the same rate with a shorter interval"
            )
        if min(warm_up_sizes(amount, interval_ms, warmup_ms, factor)) < 1:
            raise ConfigurationError(
                f"{shown} is too short for {amount} permits in "
                f"{interval_ms / 1000:g} s: not even one permit would be counted while the limit "
                "warms up; make warmup longer, or leave it out"
            )
        if max_wait_ms is None and amount < factor:
            name = "the cold factor" if words else "cold_factor"
            raise ConfigurationError(
                f"an amount of {amount} is less than {name} {factor}, so a cold limit would admit "
                f"nothing and never warm up; raise the amount (with a longer interval, if need "
                f"be), lower {name}, or pace the limit"
            )
    return {"max_wait_ms": max_wait_ms, "warmup_ms": warmup_ms, "cold_factor": factor}


def _shown(name: str, value: object, words: Mapping[str, str], unit: str = "") -> str:
    return words.get(name) or f"{name}={value!r}{unit}"


def warm_up_sizes(amount: int, interval_ms: int, warmup_ms: int, factor: int) -> tuple[int, int]:
    """Return how many tokens there are at Sentinel's warning line, and how many more there are
    when the limit is cold (warningToken, and maxToken less that).
    """
    at_warning = warmup_ms * amount // interval_ms // (factor - 1)
    above = 2 * warmup_ms * amount // (interval_ms * (1 + factor))
    return at_warning, above


def _duration(ms: int) -> str:
    for unit in ("h", "m", "s", "ms"):
        if ms >= UNITS_MS[unit] and ms % UNITS_MS[unit] == 0:
            return f"{ms // UNITS_MS[unit]}{unit}"
    return "0ms"


def _whole_ms(seconds: object, name: str, least_ms: int, words: Mapping[str, str]) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigurationError(f"{name}={seconds!r} is not a number of seconds")
    shown = _shown(name, seconds, words, " s")
    if not math.isfinite(seconds) or not least_ms <= seconds * 1000 <= MAX_SHAPED_MS:
        raise ConfigurationError(f"{shown} is outside {least_ms / 1000:g} s to a day")
    ms = round(seconds * 1000)
    if abs(seconds * 1000 - ms) > 1e-6 * max(1.0, seconds):
        raise ConfigurationError(f"{shown} is not a whole number of milliseconds; round it to one")
    return ms


def max_cost(limits: Iterable[Limit]) -> int:
    """Return the highest cost that a call under `limits` can have: the smallest amount."""
    return min([limit.amount for limit in limits])
