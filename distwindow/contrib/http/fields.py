"""The header fields and the problem body of responses, as draft-ietf-httpapi-ratelimit-headers has
them. This module alone knows the draft.

    RateLimit-Policy: "search-1m";q=10;w=60, "search-1h";q=1000;w=3600
    RateLimit: "search-1m";r=0;t=23
    Retry-After: 23                                     refusals only
    X-RateLimit-Limit: 10                               older fields, which no standard has
    X-RateLimit-Remaining: 0
    X-RateLimit-Reset: 1795371126                       s since the epoch, by the store's clock
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import quote

from ...ring.decision import Decision
from ...ring.limit import UNITS_MS, Limit

DRAFT = 11
"""The version of the draft that is written."""
Headers = Literal["ietf", "x-ratelimit", "both", "none"]
"""Which fields are written, besides `Retry-After`."""
EXPOSED_HEADERS = (
    "RateLimit-Policy", "RateLimit", "Retry-After",
    "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset",
)  # fmt: skip
"""The fields, for `Access-Control-Expose-Headers`: scripts of other origins see no others."""
_TYPES = "https://iana.org/assignments/http-problem-types#"
PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "violated-policies": {"type": "array", "items": {"type": "string"}},
    },
}
PROBLEM_MEDIA_TYPE = "application/problem+json"
Unit = Literal["requests", "content-bytes"]
"""What a limit counts. Other units need an entry in the registry of the draft."""


class Policies:
    """The limits of one name, as the fields name them."""

    __slots__ = (
        "_all", "_only_string", "_strings", "given", "has_ietf", "has_x", "names", "raw_policy",
        "text",
    )  # fmt: skip

    def __init__(self, name: str, limits: tuple[Limit, ...], unit: Unit, headers: Headers) -> None:
        self.given = name, limits, unit, headers
        self._all: Sequence[Policies] = (self,)
        """Those that were asked together."""
        self.has_ietf = headers in ("ietf", "both")
        self.has_x = headers in ("x-ratelimit", "both")
        self.write()

    def write(self, in_full: bool = False) -> None:
        """Make the names, and what has them. With `in_full` the limits are in them."""
        name, limits, unit, headers = self.given
        several = len(limits) > 1

        def name_of(limit: Limit) -> str:
            if in_full:
                return f"{name} {limit}"
            return f"{name}-{_interval_text(limit)}" if several else name

        self.names = {limit: name_of(limit) for limit in limits}
        self._strings = {limit: _string(shown).encode() for limit, shown in self.names.items()}
        self._only_string = b"" if several else self._strings[limits[0]]
        quota_unit = "" if unit == "requests" else f';qu="{unit}"'
        self.text = ", ".join(
            f"{text.decode()};q={limit.amount}{quota_unit}{_window(limit)}"
            for limit, text in self._strings.items()
        )
        """The items of `RateLimit-Policy`."""
        self.raw_policy = (b"ratelimit-policy", self.text.encode()) if headers == "ietf" else None
        """The field, as ASGI has it; None if others are written, too."""

    def in_full(self) -> Policies:
        """Return the same with names that other limits of the name do not have."""
        if len(self._all) > 1:
            return self.with_all([each.in_full() for each in self._all])
        own = Policies(*self.given)
        own.write(in_full=True)
        return own

    def with_all(self, asked: Sequence[Policies]) -> Policies:
        """Return these for a decision on all that were `asked`: `RateLimit` names these, which
        bind, and `RateLimit-Policy` all.
        """
        shown = distinct_policies(asked)
        own = copy.copy(next(each for each in shown if each.given == self.given))
        own._all, own.text = shown, ", ".join(each.text for each in shown)
        if own.raw_policy is not None:
            own.raw_policy = (own.raw_policy[0], own.text.encode())
        return own

    def all_names(self) -> list[str]:
        """Return the names of all that were asked together."""
        return [name for each in self._all for name in each.names.values()]

    def raw_item(self, decision: Decision) -> bytes:
        """Return the item of `RateLimit` for a decision by these limits. `t` is after how many
        whole seconds the same call is admitted, or of an admitted one, when all permits are free
        again, which promises less than there is.
        """
        # A hash of a limit takes longer than all the rest, and a name three times as long as an
        # index: 0 is `allowed`, 4 `remaining`, 6 `reset_after`.
        name = self._only_string or self._strings[decision.limit]
        after_s = decision[6] if decision[0] else decision.retry_after
        return b"%b;r=%d;t=%d" % (name, decision[4], math.ceil(after_s))


class PolicyNames:
    """The policies of one application by their names. Where two that differ have one name, each
    response has them with their limits, also one to a request of which only one was asked.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, dict[tuple[int, tuple[Limit, ...]], Policies]] = {}
        """By name, and by the owner and the limits: those of one owner never meet."""

    def add(self, owner: object, policies: Policies) -> None:
        """Add those of one limit."""
        name, limits, *_ = policies.given
        if len(self._by_name) >= _MAX_NAMES and name not in self._by_name:
            self._by_name.clear()
        of_name = self._by_name.setdefault(name, {})
        if len(of_name) >= _MAX_NAMES:
            of_name.clear()
        of_name[id(owner), limits] = policies
        known = list(of_name.items())
        if any(other != id(owner) and others != limits for (other, others), _ in known):
            for _, each in known:
                each.write(in_full=True)


_MAX_NAMES = 1000
"""How many names are known, and how many policies of one: a function may return any number."""


class LimitAnswer:
    """What one limit has decided for one request, as the fields need it."""

    __slots__ = ("decision", "policies")

    def __init__(self, decision: Decision, policies: Policies) -> None:
        self.decision = decision
        self.policies = policies

    @property
    def is_shown(self) -> bool:
        """False where no limit of who asks has decided: the store was away, say."""
        return self.decision.source != "policy"


def distinct(answers: Sequence[LimitAnswer]) -> Sequence[LimitAnswer]:
    """Return `answers` with the limits in their names where two that differ have one name."""
    shown = distinct_policies([each.policies for each in answers])
    return [
        each if policies is each.policies else LimitAnswer(each.decision, policies)
        for each, policies in zip(answers, shown, strict=True)
    ]


def distinct_policies(asked: Sequence[Policies]) -> Sequence[Policies]:
    """Return `asked` with the limits in their names where two that differ have one name."""
    by_text = {each.text: each for each in asked}
    names = [name for policies in by_text.values() for name in policies.all_names()]
    return asked if len(set(names)) == len(names) else [each.in_full() for each in asked]


def retry_after(decision: Decision) -> int:
    """Return the value of `Retry-After` for a refusal: whole seconds, at least 1."""
    return max(1, math.ceil(decision.retry_after))


def fields_to_set(
    answers: Sequence[LimitAnswer], status: int, get: Callable[[str], str | None]
) -> dict[str, str]:
    """Return the header fields to set in a response, by name.

    `answers` is what was decided for its request, in order; `get` returns the present value of a
    field, of several lines joined by ", ", and None where there is none. What a list has already is
    kept, and what it has of ours is not doubled. Fields of other kinds are left as they are, but
    for a `Retry-After` that is earlier.
    """
    values: dict[str, str] = {}
    refused: Decision | None = None
    by_ietf: list[LimitAnswer] = []
    by_x: list[LimitAnswer] = []
    for each in distinct(answers) if len(answers) > 1 else answers:
        decision = each.decision
        if not decision.allowed:
            refused = decision
        if decision.source != "policy" and decision.retry_after < math.inf:  # as `is_shown` says
            if each.policies.has_ietf:
                by_ietf.append(each)
            if each.policies.has_x:
                by_x.append(each)
    if by_ietf:
        binding = by_ietf[0]
        policies = binding.policies.text
        if len(by_ietf) > 1:
            binding = min(by_ietf, key=_binding_order)
            policies = ", ".join(dict.fromkeys(each.policies.text for each in by_ietf))
        if not (300 <= status < 400 and binding.decision.remaining == 0):
            item = binding.policies.raw_item(binding.decision).decode()
            for name, value in (("RateLimit-Policy", policies), ("RateLimit", item)):
                present = get(name)
                if present is None:
                    values[name] = value
                elif value not in present:  # a refusal that was raised brings its fields itself
                    values[name] = f"{present}, {value}"
    if by_x:
        decision = min(by_x, key=_binding_order).decision
        if get("X-RateLimit-Limit") is None and not (
            300 <= status < 400 and decision.remaining == 0
        ):
            after_s = decision.reset_after if decision.allowed else decision.retry_after
            values["X-RateLimit-Limit"] = str(decision.limit.amount)
            values["X-RateLimit-Remaining"] = str(decision.remaining)
            values["X-RateLimit-Reset"] = str(math.ceil(decision.now_ms / 1000 + after_s))
    # Not where the handler went on without.
    if refused is not None and refused.retry_after < math.inf and status >= 400:
        present = get("Retry-After")
        ours = retry_after(refused)
        if present is None or _seconds_of(present, refused.now_ms) < ours:
            values["Retry-After"] = str(ours)
    return values


def problem(answer: LimitAnswer, unit: str) -> dict[str, Any]:
    """Return the problem details (RFC 9457) of a refusal: 429, or 503 where the store was away, or
    a call that the request needs was not sent. `unit` is in the plural.
    """
    decision = answer.decision
    if not answer.is_shown:
        is_store_away = decision.reason == "store_down"
        what = "the rate limit of" if is_store_away else "another service that is needed for"
        why = "cannot be checked now" if is_store_away else "takes no calls now"
        return {
            "type": f"{_TYPES}temporary-reduced-capacity",
            "title": "Request cannot be satisfied due to temporary server capacity constraints",
            "status": 503,
            "detail": f"{what} this request {why}; try again in {retry_after(decision)} s",
            "violated-policies": list(answer.policies.names.values()),
        }
    limit = decision.limit
    one = limit.amount == 1
    counted = f"{limit.amount} {unit.removesuffix('s') if one else unit}"
    allowed = f"{counted} per {_interval_words(limit)} {'is' if one else 'are'} allowed"
    then = f"this request takes {decision.cost}"
    if decision.retry_after < math.inf:
        then = f"try again in {retry_after(decision)} s"
    return {
        "type": f"{_TYPES}quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": f"{allowed}; {then}",
        "violated-policies": [answer.policies.names[limit]],
    }


def _binding_order(answer: LimitAnswer) -> tuple[bool, int]:
    """Return what is least for the one that binds: it refused, or has the fewest permits left."""
    return answer.decision.allowed, answer.decision.remaining


def _seconds_of(value: str, now_ms: int) -> float:
    """Return in how many seconds a `Retry-After` ends; 0 for what is none."""
    if value.strip().isdigit():
        return int(value)
    try:
        return parsedate_to_datetime(value).timestamp() - now_ms / 1000
    except ValueError:
        return 0


_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


def _string(name: str) -> str:
    """Return `name` as a String of RFC 9651; what it cannot have is percent-encoded."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quote(escaped, _PRINTABLE, errors="surrogatepass")}"'


def _window(limit: Limit) -> str:
    seconds, rest = divmod(limit.interval_ms, 1000)
    return "" if rest else f";w={seconds}"


def _interval_text(limit: Limit) -> str:
    """Return the interval as part of a name, such as "5m"."""
    count, unit = _interval(limit, ("d", "h", "m", "s", "ms"))
    return f"{count}{unit}"


def _interval_words(limit: Limit) -> str:
    """Return the interval in words, such as "5 minutes"."""
    count, unit = _interval(limit, ("day", "hour", "minute", "second", "ms"))
    return unit if count == 1 else f"{count} {unit}{'' if unit == 'ms' else 's'}"


def _interval(limit: Limit, units: Sequence[str]) -> tuple[int, str]:
    unit = next(unit for unit in units if limit.interval_ms % UNITS_MS[unit] == 0)
    return limit.interval_ms // UNITS_MS[unit], unit
