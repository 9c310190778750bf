"""What a response of an upstream says about its limits: pauses, and what is left of a window.

`contrib/http/fields.py` writes such fields; this reads all forms that are sent:

    draft 03 to 06       RateLimit-Limit: 100, 100;w=60 | -Remaining: 42 | -Reset: 18
                         RateLimit-Policy: 100;w=60
    draft 07             RateLimit: limit=100, remaining=42, reset=18 | RateLimit-Policy: 100;w=60
    draft 08 and later   RateLimit: "default";r=42;t=18 | RateLimit-Policy: "default";q=100;w=60
    its proposal #166    RateLimit: default;a=42;w=18
    X-RateLimit-*        -Limit, -Remaining, -Reset (s, s or ms since the epoch, or a date)
    Discord              X-RateLimit-Reset-After
    OpenAI, Azure, Groq  x-ratelimit-{limit,remaining,reset}-{requests,tokens}: 6m0s, 12ms
    Azure                x-ratelimit-renewalperiod-{requests,tokens}
    Cerebras, Mistral    x-ratelimit-{limit,remaining,reset}-tokens-minute, and the like
    Anthropic            anthropic-ratelimit-{requests,tokens,...}-{limit,remaining,reset}: RFC 3339
    Shopify              X-Shopify-Shop-Api-Call-Limit: 39/40

An upstream may say anything. What is malformed, negative, or more than the limit is left out, and
a field that is too long for what it should say is not read, so that reading one takes no time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple

Get = Callable[[str], "str | None"]
"""Returns the value of a field, several lines joined by ", ". It is asked for names in lower case,
so that the `get` of a dictionary will do."""
PAUSES = frozenset({429, 503, 529})
"""Statuses that ask the client to wait; 403 does where it comes with `Retry-After` (GitHub)."""
_EPOCH_S = 1_000_000_000
"""A reset above this is a moment, and no duration."""
_EPOCH_MS = 100_000_000_000
"""A moment above this is in milliseconds."""
_MAX_LENGTH = 1000
"""Of a field. What is longer is not read."""


class Quota(NamedTuple):
    """What a response says of one window."""

    counts: str
    """What it counts: "requests", "tokens", "input-tokens" or another word of the upstream."""
    remaining: int
    limit: int | None = None
    window_s: float | None = None
    reset_s: float | None = None
    """Seconds until it is full again, or until some of it is free, as the upstream means it."""


class RateLimitInfo(NamedTuple):
    """What one response says of the limits of its upstream."""

    pause_s: float | None
    """Seconds for which nobody should send; 0 where it asks to wait and does not say how long; None
    where it does not ask to wait."""
    quotas: tuple[Quota, ...]


NO_INFO = RateLimitInfo(None, ())


def may_speak_of_limits(status: int, names: str) -> bool:
    """False where `read_response` has nothing to read, by the names of the fields, in one text: all
    that are about limits have "limit" in theirs. Most responses have none, and to ask for each of
    them costs more than all the rest of a call.
    """
    return status == 403 or status in PAUSES or "limit" in names.lower()


def read_response(status: int, get: Get, now_s: float) -> RateLimitInfo:
    """Return what a response says. `now_s` is the time here, seconds since the epoch; a date is
    relative to the `Date` of the response, so that a clock that is wrong there does not matter.
    """
    fields = _Fields(get, now_s)
    is_repeated = _number(fields.get("age") or "")  # by a cache
    found = () if is_repeated else _quotas(fields)
    quotas = tuple(quota for quota in found if quota is not None)
    return RateLimitInfo(_pause(status, fields, quotas), quotas)


class _Fields:
    """The fields of one response."""

    __slots__ = ("_at_s", "_get", "_now_s")

    def __init__(self, get: Get, now_s: float) -> None:
        self._get, self._now_s = get, now_s
        self._at_s: float | None = None

    def get(self, name: str) -> str | None:
        value = self._get(name)
        return None if value is None or len(value) > _MAX_LENGTH else value

    def seconds_until(self, text: str | None) -> float | None:
        """Return the seconds until a reset: `18`, `1795371126`, `6m0s`, `12ms`, or a date."""
        text = (text or "").strip()
        moment = number = _number(text)
        if number is None:
            if _DURATION.fullmatch(text):
                parts = _DURATION_PART.findall(text)
                return math.fsum(float(count) * _PARTS_S[unit] for count, unit in parts)
            moment = _date(text)
        elif number <= _EPOCH_S:
            return number
        elif number > _EPOCH_MS:
            moment = number / 1000
        return None if moment is None else max(0.0, moment - self._sent_at())

    def _sent_at(self) -> float:
        # Most responses have no date that would be needed: parsing this one takes longest of all.
        if self._at_s is None:
            self._at_s = _date((self.get("date") or "").strip()) or self._now_s
        return self._at_s


def _pause(status: int, fields: _Fields, quotas: tuple[Quota, ...]) -> float | None:
    if status != 403 and status not in PAUSES:
        return None
    given = _retry_after(fields)
    exhausted = [quota for quota in quotas if quota.remaining == 0]
    if status == 403 and given is None and not exhausted:
        return None  # it is about permissions, and no secondary limit of GitHub
    if not given:
        given = max((quota.reset_s for quota in exhausted if quota.reset_s), default=given)
    if given is None and status == 503:
        return None  # an outage, which says nothing of a limit
    return given or 0.0


def _retry_after(fields: _Fields) -> float | None:
    in_ms = _number(fields.get("retry-after-ms") or "")
    if in_ms:
        return in_ms / 1000
    # Azure sends 0 ms beside `Retry-After: 1`.
    said = fields.get("retry-after") or ""
    several = _NUMBERS.fullmatch(said) and [float(each) for each in said.split(",")]
    in_s = max(several) if several else fields.seconds_until(said)
    return in_ms if in_s is None else in_s


class _Names(NamedTuple):
    """The names of the fields of one window, and what it counts."""

    remaining: str
    limit: str
    reset: str
    counts: str = "requests"
    window_s: float | None = None


def _names(form: str, counts: str = "requests", window_s: float | None = None) -> _Names:
    remaining, limit, reset = (form.format(what) for what in ("remaining", "limit", "reset"))
    return _Names(remaining, limit, reset, counts, window_s)


_OF_ALL = [_names("ratelimit-{}"), _names("x-ratelimit-{}"), _names("x-rate-limit-{}")]
_OF_EACH = [
    *(_names(f"x-ratelimit-{{}}-{what}", what) for what in ("requests", "tokens")),
    _names("x-ratelimit-{}-project-tokens", "project-tokens"),
    *(
        _names(f"anthropic-ratelimit-{what}-{{}}", what)
        for what in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
    _names("x-ratelimit-{}-requests-minute", "requests", 60.0),
    _names("x-ratelimit-{}-req-minute", "requests", 60.0),
    _names("x-ratelimit-{}-requests-day", "requests", 86_400.0),
    _names("x-ratelimit-{}-tokens-minute", "tokens", 60.0),
]


def _quotas(fields: _Fields) -> Iterator[Quota | None]:
    """Yield what the fields say; None for what cannot be true."""
    if (value := fields.get("ratelimit")) is not None:
        yield from _of_draft(fields, value)
        return
    for names in _OF_ALL:
        if (quota := _separate(fields, names)) is not None:
            yield quota
            return
    for names in _OF_EACH:
        yield _separate(fields, names)
    used, slash, limit = (fields.get("x-shopify-shop-api-call-limit") or "").partition("/")
    if slash and (amount := _count(limit)) and (taken := _count(used)) is not None:
        yield Quota("requests", max(0, amount - taken), amount)


def _separate(fields: _Fields, names: _Names) -> Quota | None:
    """Return the quota whose parts stand in a field each."""
    remaining = fields.get(names.remaining)
    if remaining is None:
        return None
    # "100, 100;w=60" in the older drafts: the first is the limit that binds.
    limits = _items(fields.get(names.limit) or "")
    amount = _count(limits[0][0]) if limits else None
    window_s = names.window_s
    if names in _OF_ALL:
        policy = _items(fields.get("ratelimit-policy") or "") if names is _OF_ALL[0] else []
        window_s = _window_of(amount, limits + policy)
        reset = fields.get(names.reset + "-after") or fields.get(names.reset)
    else:
        if window_s is None:
            window_s = _number(fields.get(f"x-ratelimit-renewalperiod-{names.counts}") or "")
        reset = fields.get(names.reset)
    reset_s = fields.seconds_until(reset)
    return _checked(names.counts, remaining, amount, window_s, reset_s)


def _of_draft(fields: _Fields, value: str) -> Iterator[Quota | None]:
    """Yield the quotas of the field `RateLimit`."""
    items, policies = _items(value), _items(fields.get("ratelimit-policy") or "")
    pairs = {
        name.strip(): v for name, is_pair, v in (n.partition("=") for n, _ in items) if is_pair
    }
    if "remaining" in pairs:  # draft 07
        amount = _count(pairs.get("limit", ""))
        reset_s = fields.seconds_until(pairs.get("reset"))
        window_s = _window_of(amount, policies)
        yield _checked("requests", pairs["remaining"], amount, window_s, reset_s)
        return
    by_name = dict(policies)
    for name, parameters in items:
        policy = by_name.get(name, {})
        # Proposal #166 has `a` and `w` for `r` and `t`.
        left, reset = ("r", "t") if "r" in parameters else ("a", "w")
        yield _checked(
            policy.get("qu", "requests"), parameters.get(left, ""), _count(policy.get("q", "")),
            _number(policy.get("w", "")), fields.seconds_until(parameters.get(reset)),
        )  # fmt: skip


def _window_of(amount: int | None, policies: list[_Item]) -> float | None:
    """Return the window of this limit by policies of drafts up to 07: `100;w=60, 1000;w=3600`."""
    of_amount = (parameters for name, parameters in policies if _count(name) == amount)
    return next((_number(parameters["w"]) for parameters in of_amount if "w" in parameters), None)


def _checked(
    counts: str, remaining: str, limit: int | None, window_s: float | None, reset_s: float | None
) -> Quota | None:
    """Return the quota; None where it cannot be true. Azure sends -1, and 0 of 0, for unknown."""
    left = _count(remaining)
    if left is None or (limit is not None and (limit == 0 or left > limit)):
        return None
    return Quota(counts, left, limit, window_s or None, reset_s)


_Item = tuple[str, dict[str, str]]
# No two ways lead through these, so that none is tried a second time.
_ITEM = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^",])+', re.DOTALL)
_PART = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^";])+', re.DOTALL)


def _items(value: str) -> list[_Item]:
    """Return the items of a list of RFC 9651, each with its parameters, without quotes."""
    items = []
    for item in _ITEM.findall(value):
        name, *parts = _PART.findall(item) or [""]
        parameters = (part.partition("=") for part in parts)
        items.append((_unquoted(name), {key.strip(): _unquoted(v) for key, _, v in parameters}))
    return items


def _unquoted(text: str) -> str:
    return text.strip().strip('"')


_COUNT = re.compile(r"([0-9]{1,15})(?:\.[0-9]{1,15})?")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_NUMBERS = re.compile(r" *[0-9]{1,15}(?: *, *[0-9]{1,15})+ *")
"""A field that was sent several times."""
_DURATION_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|d|h|m|s)")
_DURATION = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,15})?(?:ms|d|h|m|s)){1,5}")
_PARTS_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
# Jira leaves out the seconds.
_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(\.[0-9]{1,15})?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def _count(text: str) -> int | None:
    """Return a whole number of at most 15 digits, such as Reddit's `98.0`; None for others."""
    found = _COUNT.fullmatch(text.strip())
    return int(found[1]) if found else None


def _number(text: str) -> float | None:
    """Return a number of seconds; None for what is none, negative, or not finite."""
    return float(text) if _NUMBER.fullmatch(text := text.strip()) else None


def _date(text: str) -> float | None:
    """Return a moment of RFC 3339 or of HTTP as seconds since the epoch; None for what is none."""
    try:
        if found := _RFC_3339.fullmatch(text):
            day, time, fraction, zone = found.groups()
            zone = "+00:00" if zone in "Zz" else zone
            return datetime.fromisoformat(f"{day}T{time}{zone}").timestamp() + float(fraction or 0)
        if not 16 <= len(text) <= 64:
            return None
        moment = parsedate_to_datetime(text)
        # Dates of HTTP are of Greenwich, also in the form that does not say so.
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
