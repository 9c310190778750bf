"""What Sentinel's rules become for the whole fleet: a limit, or the rule of a circuit breaker."""

from __future__ import annotations

import math
from fractions import Fraction

from ..core.breaker_rules import BreakerRule, ErrorCount, ErrorRatio, SlowRatio
from ..core.errors import ConfigurationError, short_repr
from ..core.limit import Limit
from ..sentinel.rules import LIMIT_APP_DEFAULT, DegradeRule, FlowRule

_MAX_BUCKETS = 10
_MAX_PERIOD_S = 3600
_LEAST_RATIO = 1e-12
"""Less than one bad call among the most calls that a rule counts."""


def limit_of(rule: FlowRule) -> Limit:
    """Return the limit of a rule with the grade `"qps"`.

    A `count` that is not whole becomes whole permits in a longer interval: 0.5 is 1 per 2 s. Raises
    `ConfigurationError`, which names the rule, for what has no limit for the fleet.
    """
    try:
        _check_strategy(rule)
        amount, seconds = _per_seconds(rule.count)
        paced = rule.control_behavior in ("rate_limiter", "warm_up_rate_limiter")
        warms_up = rule.control_behavior in ("warm_up", "warm_up_rate_limiter")
        return Limit(
            amount,
            per=seconds,
            max_wait=rule.max_queueing_time_ms / 1000 if paced else None,
            warmup=float(rule.warm_up_period_sec) if warms_up else None,
            cold_factor=rule.cold_factor if warms_up else None,
        )
    except ConfigurationError as exc:
        raise ConfigurationError(f"FlowRule of {short_repr(rule.resource)}: {exc}") from exc


def slots_of(rule: FlowRule) -> int:
    """Return how many calls a rule with the grade `"thread"` lets run at once.

    Raises `ConfigurationError` as `limit_of` does.
    """
    try:
        _check_strategy(rule)
        _check_count(rule.count)
        if rule.count != int(rule.count):
            raise ConfigurationError(f"count={rule.count!r} is not a whole number of running calls")
    except ConfigurationError as exc:
        raise ConfigurationError(f"FlowRule of {short_repr(rule.resource)}: {exc}") from exc
    return int(rule.count)


def breaker_rule_of(rule: DegradeRule) -> BreakerRule:
    """Return the breaker's rule.

    Sentinel opens when a threshold is exceeded, and this breaker when it is reached. Therefore a
    count becomes the next whole number above it, and a ratio the next float above it. A ratio of
    1.0 stays: Sentinel opens there for slow calls, and for errors it never would. The interval has
    up to ten buckets, where Sentinel has one.

    Raises `ConfigurationError`, which names the rule, for what cannot work.
    """
    window_ms = rule.stat_interval_ms
    buckets = next(n for n in range(_MAX_BUCKETS, 0, -1) if window_ms % n == 0)
    window, open_for = window_ms / 1000, float(rule.time_window_s)
    min_calls = max(1, rule.min_request_amount)
    made: BreakerRule
    try:
        if rule.grade == "slow_request_ratio":
            made = SlowRatio(
                max_rt=rule.count / 1000, ratio=_above(rule.slow_ratio_threshold), window=window,
                min_calls=min_calls, open_for=open_for, buckets=buckets,
            )  # fmt: skip
        elif rule.grade == "error_ratio":
            made = ErrorRatio(
                ratio=_above(rule.count), window=window, min_calls=min_calls, open_for=open_for,
                buckets=buckets,
            )  # fmt: skip
        else:
            made = ErrorCount(
                count=math.floor(rule.count) + 1, window=window, min_calls=min_calls,
                open_for=open_for, buckets=buckets,
            )  # fmt: skip
    except ConfigurationError as exc:
        raise ConfigurationError(f"DegradeRule of {short_repr(rule.resource)}: {exc}") from exc
    return made


def _above(ratio: float) -> float:
    """Return the ratio that is reached exactly where `ratio` is exceeded; 1.0 stays."""
    if ratio >= 1.0:
        return float(ratio)
    return max(math.nextafter(ratio, 1.0), _LEAST_RATIO)


def _check_strategy(rule: FlowRule) -> None:
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


def _check_count(count: float) -> None:
    if count <= 0:
        raise ConfigurationError(
            f"count={count!r} would refuse every call; remove the resource, or use an "
            "AuthorityRule that allows no origin which calls it"
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
