"""What a response of an upstream says about its limits: pauses, and what is left of a window.

`contrib/http/fields.py` writes such fields; this reads all forms that are sent:

    draft 03 to 06       RateLimit-Limit: 100, 100;w=60 | -Remaining: 42 | -Reset: 18
    draft 07             RateLimit: limit=100, remaining=42, reset=18 | RateLimit-Policy: 100;w=60
    draft 08 and later   RateLimit: "default";r=42;t=18 | RateLimit-Policy: "default";q=100;w=60
    X-RateLimit-*        -Limit, -Remaining, -Reset (s, or s since the epoch)
    OpenAI, Azure, Groq  x-ratelimit-{limit,remaining,reset}-{requests,tokens}: 6m0s, 12ms
    Anthropic            anthropic-ratelimit-{requests,tokens,...}-{limit,remaining,reset}: RFC 3339

An upstream may say anything. What is malformed, negative, or more than the limit is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

Get = Callable[[str], "str | None"]
"""Returns the value of a field by its name, whatever the case, several lines joined by ", "."""
PAUSES = frozenset({429, 503, 529})
"""Statuses that ask the client to wait; 403 does where it comes with `Retry-After` (GitHub)."""
_EPOCH_S = 1_000_000_000
"""A reset above this is a moment, and no duration."""


class Quota(NamedTuple):
    """What a response says of one window."""

    counts: str
    """What it counts: "requests", "tokens", "input-tokens" or another word of the upstream."""
    remaining: int
    limit: int | None = None
    window_s: float | None = None
    reset_s: float | None = None
    """Seconds until it is full again, or until some of it is free, as the upstream means it."""


class Said(NamedTuple):
    """What one response says."""

    pause_s: float | None
    """Seconds for which nobody should send; 0 where it asks to wait and does not say how long; None
    where it does not ask to wait."""
    quotas: tuple[Quota, ...]


def read_response(status: int, get: Get, now_s: float) -> Said:
    """Return what a response says. `now_s` is the time here, seconds since the epoch; a date is
    taken relative to the `Date` of the response, so that a clock that is wrong there does not
    matter.
    """
    at_s = _date(get("Date")) or now_s
    quotas = () if _seconds(get("Age") or "") else tuple(_quotas(get, at_s))
    return Said(_pause(status, get, at_s, quotas), quotas)


def _pause(status: int, get: Get, at_s: float, quotas: tuple[Quota, ...]) -> float | None:
    given = _retry_after(get, at_s)
    if status == 403:  # a secondary limit of GitHub; without these fields it is about permissions
        exhausted = [quota for quota in quotas if quota.remaining == 0]
        if given is None and not exhausted:
            return None
    elif status not in PAUSES:
        return None
    if given is None:
        resets = [quota.reset_s for quota in quotas if quota.remaining == 0 and quota.reset_s]
        given = max(resets, default=None)
    if given is None and status == 503:
        return None  # an outage, which says nothing of a limit
    return given or 0.0


def _retry_after(get: Get, at_s: float) -> float | None:
    in_ms = _number(get("retry-after-ms") or "")
    if in_ms is not None:
        return in_ms / 1000
    value = (get("Retry-After") or "").strip()
    in_s = _number(value)
    if in_s is not None:
        return in_s
    moment = _date(value)
    return None if moment is None else max(0.0, moment - at_s)


def _quotas(get: Get, at_s: float) -> Iterator[Quota]:
    if (value := get("RateLimit")) is not None:
        yield from _of_draft(value, get("RateLimit-Policy") or "")
        return
    for names, counts in _SEPARATE:
        limit, remaining, reset = (get(name) for name in names)
        if remaining is None:
            continue
        # "100, 100;w=60" in the older drafts: the first is the limit that binds.
        text, _, policies = (limit or "").partition(",")
        amount = _count(text)
        window_s = next((w for q, w in _policies(policies) if q == amount), None)
        quota = _checked(counts, remaining, amount, window_s, _reset(reset, at_s))
        if quota is not None:
            yield quota
            if counts == "requests" and names in _OF_ALL:
                return


_WHAT = ("Limit", "Remaining", "Reset")
_OF_ALL = [
    tuple(f"{prefix}-{what}" for what in _WHAT)
    for prefix in ("RateLimit", "X-RateLimit", "X-Rate-Limit")
]
_SEPARATE: list[tuple[tuple[str, ...], str]] = [
    *((names, "requests") for names in _OF_ALL),
    *(
        (tuple(f"X-RateLimit-{what}-{counts}" for what in _WHAT), counts)
        for counts in ("requests", "tokens")
    ),
    *(
        (tuple(f"Anthropic-RateLimit-{counts}-{what}" for what in _WHAT), counts)
        for counts in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
]
"""The fields of one window each, and what it counts."""


def _of_draft(value: str, policy: str) -> Iterator[Quota]:
    """Return the quotas of the field `RateLimit`."""
    if re.match(r"\s*(limit|remaining|reset)\s*=", value):  # draft 07
        pairs = dict(re.findall(r"(limit|remaining|reset)\s*=\s*([^,;\s]+)", value))
        amount = _count(pairs.get("limit", ""))
        window_s = next((w for q, w in _policies(policy) if q == amount), None)
        reset_s = _number(pairs.get("reset", ""))
        quota = _checked("requests", pairs.get("remaining", ""), amount, window_s, reset_s)
        if quota is not None:
            yield quota
        return
    policies = dict(_items(policy))
    for name, parameters in _items(value):
        of_policy = policies.get(name, {})
        unit = of_policy.get("qu", "requests")
        quota = _checked(
            unit, parameters.get("r", ""), _count(of_policy.get("q", "")),
            _number(of_policy.get("w", "")), _number(parameters.get("t", "")),
        )  # fmt: skip
        if quota is not None:
            yield quota


_ITEM = re.compile(
    r'\s*(?:"((?:[^"\\]|\\.)*)"|([A-Za-z*][^\s;,]*))((?:\s*;\s*[a-z*][a-z0-9_\-.*]*'
    r'(?:=(?:"(?:[^"\\]|\\.)*"|[^;,\s]+))?)*)\s*(?:,|$)'
)
_PARAMETER = re.compile(r';\s*([a-z*][a-z0-9_\-.*]*)(?:=("(?:[^"\\]|\\.)*"|[^;,\s]+))?')


def _items(value: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Return the items of a list of RFC 9651 with their parameters, up to what is none."""
    at = 0
    while at < len(value) and (item := _ITEM.match(value, at)):
        at = item.end()
        parameters = {name: text.strip('"') for name, text in _PARAMETER.findall(item[3])}
        yield item[1] or item[2] or "", parameters


def _policies(value: str) -> Iterator[tuple[int, float]]:
    """Return (limit, window in s) of a policy of the drafts up to 07: `100;w=60, 1000;w=3600`."""
    for amount, window in re.findall(r"(\d+)\s*;[^,]*?\bw=(\d+)", value):
        yield int(amount), float(window)


def _checked(
    counts: str, remaining: str, limit: int | None, window_s: float | None, reset_s: float | None
) -> Quota | None:
    """Return the quota; None where it cannot be true. Azure sends -1, and 0 of 0, for unknown."""
    left = _count(remaining)
    if left is None or (limit is not None and (limit == 0 or left > limit)):
        return None
    return Quota(counts, left, limit, window_s or None, reset_s)


def _count(text: str) -> int | None:
    """Return a whole number of at most 15 digits; None for what is none, or negative."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def _number(text: str) -> float | None:
    """Return a number of seconds; None for what is none, negative, or not finite."""
    return (
        float(text) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text := text.strip()) else None
    )


_seconds = _number
_PARTS_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def _reset(text: str | None, at_s: float) -> float | None:
    """Return the seconds until a reset: `18`, `1795371126`, `6m0s`, `12ms`, or a moment of RFC 3339
    or of HTTP.
    """
    text = (text or "").strip()
    number = _number(text)
    if number is not None:
        return max(0.0, number - at_s) if number > _EPOCH_S else number
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)", text)
    if parts and "".join(map("".join, parts)) == text:
        return math.fsum(float(count) * _PARTS_S[unit] for count, unit in parts)
    moment = _date(text)
    return None if moment is None else max(0.0, moment - at_s)


def _date(text: str | None) -> float | None:
    """Return a moment as seconds since the epoch; None for what is none."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse((text or "").strip().replace("Z", "+00:00"))
            if moment.tzinfo is not None:
                return moment.timestamp()
        except (ValueError, OverflowError, TypeError):
            continue
    return None
