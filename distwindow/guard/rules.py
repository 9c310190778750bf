"""The rules of a `Guard`, with Sentinel's names, and what each becomes for the fleet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args

from ..breaker.commands import breaker_name
from ..breaker.rules import MAX_CALLS, MAX_SECONDS, BreakerRule, ErrorCount, ErrorRatio, SlowRatio
from ..errors import ConfigurationError, short_repr
from ..ring.limit import (
    MAX_AMOUNT,
    MAX_COLD_FACTOR,
    MAX_SHAPED_AMOUNT,
    MAX_SHAPED_MS,
    Limit,
    warm_up_sizes,
)
from ..sentinel.nodes import check_threshold, check_word
from ..sentinel.rules import LIMIT_APP_DEFAULT, DegradeRule, FlowRule, Rule, checked_name

AuthorityStrategy = Literal["allow", "deny"]


@dataclass(frozen=True)
class AuthorityRule(Rule):
    """Which origins may call `resource` (Sentinel `AuthorityRule`).

    `limit_app` lists origins, separated by commas. With the strategy `"allow"` (Sentinel's
    AUTHORITY_WHITE) only these may call, among the calls that have an origin; with `"deny"`
    (AUTHORITY_BLACK) all but these. A call without an origin passes with both, as in Sentinel's
    `AuthorityRuleChecker`: the rule tells callers apart, and does not make them say who they are.

    Raises `ConfigurationError` for a field that cannot work.
    """

    resource: str
    limit_app: str
    strategy: AuthorityStrategy = "allow"

    def __post_init__(self) -> None:
        name = checked_name("AuthorityRule", self.resource)
        if type(self.limit_app) is not str or not all(self._listed()):
            raise ConfigurationError(
                f"{name}: limit_app must be origins separated by commas, such as 'app-a,app-b', "
                f"not {short_repr(self.limit_app)}"
            )
        check_word(name, "strategy", self.strategy, get_args(AuthorityStrategy))

    def _listed(self) -> list[str]:
        return [origin.strip() for origin in self.limit_app.split(",")]

    @property
    def origins(self) -> frozenset[str]:
        """The origins that `limit_app` lists."""
        return frozenset(self._listed())

    def allows(self, origin: str) -> bool:
        """True if `origin` may call."""
        return not origin or (origin in self.origins) == (self.strategy == "allow")


@dataclass(frozen=True, repr=False)
class SystemRule(Rule):
    """Thresholds for all calls of one process together (Sentinel `SystemRule`). None: not checked.

    | field | a call is refused where |
    |---|---|
    | `highest_system_load` | the machine's load average of one minute is above it, and more calls
        run than the process completes at its best rate and rt (Sentinel `checkBbr`) |
    | `highest_cpu_usage` | the machine's CPU usage is above it, from 0 to 1 |
    | `qps` | it would be one more than so many in the last second; a cost counts so many times |
    | `avg_rt` | the calls of the last second took longer on average, in ms |
    | `max_thread` | so many calls run already |

    Raises `ConfigurationError` for a field that cannot work, and if there is none.
    """

    _: KW_ONLY
    highest_system_load: float | None = None
    highest_cpu_usage: float | None = None
    qps: float | None = None
    avg_rt: float | None = None
    max_thread: int | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if not given:
            raise ConfigurationError("SystemRule: give at least one threshold")
        for name, value in given.items():
            try:
                check_threshold(name, value)
            except ConfigurationError as exc:
                raise ConfigurationError(f"SystemRule: {exc}") from exc
            if name in ("qps", "max_thread") and value < 1:
                raise ConfigurationError(
                    f"SystemRule: {name}={value!r} would refuse every call; give at least 1"
                )
        if self.highest_cpu_usage is not None and self.highest_cpu_usage > 1:
            raise ConfigurationError(
                f"SystemRule: highest_cpu_usage must be from 0 to 1, not {self.highest_cpu_usage!r}"
            )
        if self.max_thread is not None and type(self.max_thread) is not int:
            raise ConfigurationError(
                f"SystemRule: max_thread must be an int, not {self.max_thread!r}"
            )

    def __repr__(self) -> str:
        """Return the rule without the thresholds that it does not have."""
        given = ", ".join(f"{name}={value!r}" for name, value in self._given().items())
        return f"SystemRule({given})"

    def _given(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    @property
    def needs_sample(self) -> bool:
        """True if the machine has to be sampled."""
        return self.highest_system_load is not None or self.highest_cpu_usage is not None


MAX_RUNNING = 1_000_000
"""The most slots of a `Concurrency`."""

_MAX_BUCKETS = 10
_MAX_PERIOD_S = 3600
_LEAST_RATIO = 1e-12
"""Less than one bad call among the most calls that a rule counts."""


def limit_of(rule: FlowRule) -> Limit:
    """Return the limit of a rule with the grade `"qps"`.

    A `count` that is not whole becomes whole permits in a longer interval: 0.5 is 1 per 2 s. Raises
    `ConfigurationError`, which names the field, for what has no limit for the fleet.
    """
    _check_fields(rule)
    amount, seconds = _per_seconds(rule.count)
    paced = rule.control_behavior in ("rate_limiter", "warm_up_rate_limiter")
    warms_up = rule.control_behavior in ("warm_up", "warm_up_rate_limiter")
    _check_most("count", rule.count, MAX_AMOUNT, "the most that a limit counts")
    if paced:
        _check_most("max_queueing_time_ms", rule.max_queueing_time_ms, MAX_SHAPED_MS, "a day")
    if warms_up:
        _check_warm_up(rule, amount, seconds)
    if (paced or warms_up) and amount > MAX_SHAPED_AMOUNT:
        raise ConfigurationError(
            f"count={rule.count!r} is {amount} calls in {seconds} s, and at most "
            f"{MAX_SHAPED_AMOUNT} can be paced or warm up; round it, or lower it"
        )
    return Limit(
        amount,
        per=seconds,
        max_wait=rule.max_queueing_time_ms / 1000 if paced else None,
        warmup=float(rule.warm_up_period_sec) if warms_up else None,
        cold_factor=rule.cold_factor if warms_up else None,
    )


def slots_of(rule: FlowRule) -> int:
    """Return how many calls a rule with the grade `"thread"` lets run at once.

    Raises `ConfigurationError` as `limit_of` does.
    """
    _check_fields(rule)
    _check_count(rule.count)
    if rule.count != int(rule.count):
        raise ConfigurationError(f"count={rule.count!r} is not a whole number of running calls")
    _check_most("count", rule.count, MAX_RUNNING, "the most calls that run at once")
    return int(rule.count)


def breaker_rule_of(rule: DegradeRule) -> BreakerRule:
    """Return the breaker's rule.

    Sentinel opens when a threshold is exceeded, and this breaker when it is reached. Therefore a
    count becomes the next whole number above it, and a ratio the next float above it. A ratio of
    1.0 stays: Sentinel opens there for slow calls, and for errors it never would. The interval has
    up to ten buckets, where Sentinel has one.

    Raises `ConfigurationError` for what cannot work.
    """
    window_ms = rule.stat_interval_ms
    buckets = next(n for n in range(_MAX_BUCKETS, 0, -1) if window_ms % n == 0)
    settings: dict[str, Any] = {
        "window": window_ms / 1000,
        "min_calls": max(1, rule.min_request_amount),
        "open_for": float(rule.time_window_s),
        "buckets": buckets,
    }
    _check_text("resource", rule.resource)
    _check_most("time_window_s", rule.time_window_s, MAX_SECONDS, "a week")
    _check_most("stat_interval_ms", rule.stat_interval_ms, MAX_SECONDS * 1000, "a week")
    _check_most("min_request_amount", rule.min_request_amount, MAX_CALLS, "the most counted")
    if rule.grade == "slow_request_ratio":
        most_ms = max(60_000, window_ms)
        _check_most("count", rule.count, most_ms, "a minute, and stat_interval_ms")
        ratio = _above(rule.slow_ratio_threshold)
        return SlowRatio(max_rt=rule.count / 1000, ratio=ratio, **settings)
    _check_most("count", rule.count, MAX_CALLS - 1, "the most errors counted")
    if rule.grade == "error_ratio":
        return ErrorRatio(ratio=_above(rule.count), **settings)
    return ErrorCount(count=math.floor(rule.count) + 1, **settings)


def _above(ratio: float) -> float:
    """Return the ratio that is reached exactly where `ratio` is exceeded; 1.0 stays."""
    if ratio >= 1.0:
        return float(ratio)
    return max(math.nextafter(ratio, 1.0), _LEAST_RATIO)


def name_of(rule: FlowRule | DegradeRule | AuthorityRule) -> str:
    """Return how errors name `rule`."""
    return f"{type(rule).__name__} of {short_repr(rule.resource)}"


def _check_fields(rule: FlowRule) -> None:
    """Raise for what is not about the number of calls."""
    _check_text("resource", rule.resource)
    _check_text("limit_app", rule.limit_app)
    if "," in rule.limit_app:
        raise ConfigurationError(
            f"limit_app={short_repr(rule.limit_app)} has a comma, and a flow rule is about one "
            "origin; write a rule for each"
        )
    if rule.strategy == "direct":
        if rule.ref_resource is not None:
            raise ConfigurationError(
                f"ref_resource={short_repr(rule.ref_resource)} has no effect with strategy "
                "'direct'; use 'relate' or 'chain', or leave it out"
            )
        return
    _check_text("ref_resource", rule.ref_resource or "")
    if rule.strategy == "relate":
        if rule.ref_resource == rule.resource:
            raise ConfigurationError(
                "strategy 'relate' is about another resource; for the calls of this one, use "
                "strategy 'direct'"
            )
        if rule.grade != "qps" or rule.control_behavior != "default":
            raise ConfigurationError(
                "strategy 'relate' works with grade 'qps' and control_behavior 'default': running "
                "calls of another resource are not counted in the store, and a wait or a warm-up "
                "of this resource's calls has nothing to do with the other one"
            )
    elif rule.strategy == "chain" and rule.limit_app != LIMIT_APP_DEFAULT:
        raise ConfigurationError(
            "strategy 'chain' works with limit_app 'default': calls of all origins are counted in "
            f"a context, and limit_app={rule.limit_app!r} would have only some of them refused"
        )


def _check_text(field: str, text: str) -> None:
    """Raise for a name that no call has: with spaces around it, or not encodable."""
    if text != text.strip():
        raise ConfigurationError(
            f"{field}={short_repr(text)} has spaces around it, and names are compared as they are; "
            "remove them"
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigurationError(
            f"{field}={short_repr(text)} cannot be encoded as UTF-8: {exc.reason}"
        ) from exc


def _check_most(field: str, value: float, most: int, what: str) -> None:
    if value > most:
        raise ConfigurationError(f"{field}={short_repr(value)} is above {most} ({what})")


def _check_count(count: float) -> None:
    if count <= 0:
        raise ConfigurationError(
            f"count={count!r} would refuse every call; to close a resource, refuse its calls in a "
            "slot of your own (ChainSlot)"
        )


def _check_warm_up(rule: FlowRule, amount: int, seconds: int) -> None:
    """Raise for a warm-up that would admit nothing, or would not be one."""
    period = rule.warm_up_period_sec
    _check_most("warm_up_period_sec", period, MAX_SHAPED_MS // 1000, "a day")
    _check_most("cold_factor", rule.cold_factor, MAX_COLD_FACTOR, "the most")
    if period < seconds:
        raise ConfigurationError(
            f"warm_up_period_sec={period} is shorter than the {seconds} s in which "
            f"count={rule.count!r} is a whole number of calls; make it longer, or round count"
        )
    if min(warm_up_sizes(amount, seconds * 1000, period * 1000, rule.cold_factor)) < 1:
        raise ConfigurationError(
            f"warm_up_period_sec={period} is too short for count={rule.count!r}: not even one call "
            "would be counted while the resource warms up; make it longer"
        )
    if rule.control_behavior == "warm_up" and amount < rule.cold_factor:
        raise ConfigurationError(
            f"count={rule.count!r} divided by cold_factor={rule.cold_factor} is less than one call "
            f"in {seconds} s, so a cold resource would admit nothing and never warm up; raise "
            "count, lower cold_factor, or use control_behavior 'warm_up_rate_limiter'"
        )


def _per_seconds(count: float) -> tuple[int, int]:
    """Return whole permits and the whole seconds in which they are admitted."""
    _check_count(count)
    rate = Fraction(count).limit_denominator(_MAX_PERIOD_S)
    if rate.numerator < 1 or not math.isclose(rate, count, rel_tol=1e-9):
        raise ConfigurationError(
            f"count={count!r} is no whole number of calls in any interval of up to an hour; round "
            "it, such as 0.5 for one in two seconds"
        )
    return rate.numerator, rate.denominator


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """Return the rules. Raises for one that cannot work, and for two that count in one place."""
    if isinstance(rules, (str, bytes, Rule)) or not isinstance(rules, Iterable):
        raise ConfigurationError(
            f"rules={short_repr(rules)} is not a list of rules; for a file, use from_file"
        )
    checked = tuple(rules)
    seen: dict[object, Rule] = {}
    for rule in checked:
        place = place_of(rule)
        if place in seen:
            raise ConfigurationError(_clash(seen[place], rule))
        seen[place] = rule
    return checked


def place_of(rule: Any) -> object:
    """Return what is equal for rules that cannot be together. Raises for one that cannot work."""
    try:
        if isinstance(rule, FlowRule):
            _ = slots_of(rule) if rule.grade == "thread" else limit_of(rule)
            counted = () if rule.strategy == "direct" else (rule.strategy, rule.ref_resource)
            return ("flow", rule.resource, rule.limit_app, rule.grade, *counted)
        if isinstance(rule, DegradeRule):
            return breaker_name("", rule.resource, breaker_rule_of(rule))
        if isinstance(rule, AuthorityRule):
            _check_text("resource", rule.resource)
            return ("authority", rule.resource)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{name_of(rule)}: {exc}") from exc
    if isinstance(rule, SystemRule):
        return "system"
    raise ConfigurationError(
        f"{short_repr(rule)} is no rule of a guard; give FlowRule, DegradeRule, AuthorityRule or "
        "SystemRule"
    )


def _clash(first: Rule, second: Rule) -> str:
    """Return why two rules of one place cannot be together, and what to do."""
    if isinstance(first, FlowRule) and isinstance(second, FlowRule):
        return (
            f"{name_of(first)}: one with count={first.count!r} and one with count={second.count!r} "
            f"(limit_app {short_repr(first.limit_app)}, grade {first.grade!r}) would count the "
            "same calls in the same place; leave one out"
        )
    if isinstance(first, DegradeRule) and isinstance(second, DegradeRule):
        return (
            f"{name_of(first)}: there are two with the same terms (grade {first.grade!r}, "
            f"count={first.count!r}), which would count each call twice; leave one out"
        )
    if isinstance(first, AuthorityRule):
        return f"{name_of(first)}: there are two; list all its origins in the limit_app of one"
    return "SystemRule: there are two; give all thresholds in one"
