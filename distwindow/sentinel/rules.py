"""Sentinel's rules as dataclasses, with its field names in Python's spelling.

A rule is checked when it is made: a `ConfigurationError` names the resource and the field.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from ..errors import ConfigurationError, short_repr
from .circuit_breakers import (
    CircuitBreakerBase,
    ExceptionCircuitBreaker,
    ResponseTimeCircuitBreaker,
)
from .flow import (
    DefaultController,
    FlowGrade,
    ThrottlingController,
    TrafficShapingController,
    WarmUpController,
    WarmUpRateLimiterController,
)
from .nodes import MAX_INT, check_int, check_threshold, check_word

FlowStrategy = Literal["direct", "relate", "chain"]
ControlBehavior = Literal["default", "warm_up", "rate_limiter", "warm_up_rate_limiter"]
DegradeGrade = Literal["slow_request_ratio", "error_ratio", "error_count"]

LIMIT_APP_DEFAULT = "default"
"""The `limit_app` of a rule about all callers."""
LIMIT_APP_OTHER = "other"
"""The `limit_app` of a rule about every origin that no other rule of the resource names."""


class Rule:
    """The base class of rules (Sentinel `AbstractRule`)."""


@dataclass(frozen=True)
class FlowRule(Rule):
    """At most `count` calls of `resource` per second, or at once (Sentinel `FlowRule`).

    | field | |
    |---|---|
    | `grade` | `"qps"`, or `"thread"` for running calls |
    | `limit_app` | one origin, `"default"` for all callers, `"other"` for origins without a rule |
    | `strategy` | whose calls are counted: `"direct"`, the resource's own; `"relate"`, those of
        `ref_resource`; `"chain"`, those of the resource in the context `ref_resource` |
    | `control_behavior` | `"default"` refuses at once, `"rate_limiter"` paces, `"warm_up"` admits
        less after an idle time, `"warm_up_rate_limiter"` paces more slowly after one |
    | `warm_up_period_sec` | how long a cold resource takes to become warm, in s |
    | `cold_factor` | by what the rate of a cold resource is divided |
    | `max_queueing_time_ms` | the longest wait of a paced call, in ms |

    Raises `ConfigurationError` for a field that cannot work, for a `count` by which Sentinel
    divides by zero (paced: above 0 and below 0.5; with a warm-up: no tokens above the warning
    line), and for a `control_behavior` with the grade `"thread"`, which Sentinel ignores.
    """

    resource: str
    count: float
    _: KW_ONLY
    grade: FlowGrade = "qps"
    limit_app: str = LIMIT_APP_DEFAULT
    strategy: FlowStrategy = "direct"
    ref_resource: str | None = None
    control_behavior: ControlBehavior = "default"
    warm_up_period_sec: int = 10
    cold_factor: int = 3
    max_queueing_time_ms: int = 500

    def __post_init__(self) -> None:
        name = checked_name("FlowRule", self.resource)
        _check_name(name, "limit_app", self.limit_app)
        check_word(name, "grade", self.grade, get_args(FlowGrade))
        check_word(name, "strategy", self.strategy, get_args(FlowStrategy))
        check_word(name, "control_behavior", self.control_behavior, get_args(ControlBehavior))
        if self.strategy != "direct":
            _check_name(name, f"ref_resource, for strategy {self.strategy!r},", self.ref_resource)
        if self.grade == "thread" and self.control_behavior != "default":
            raise ConfigurationError(
                f"{name}: control_behavior {self.control_behavior!r} works with grade 'qps' only"
            )
        try:
            check_int("warm_up_period_sec", self.warm_up_period_sec, 1, MAX_INT)
            check_int("cold_factor", self.cold_factor, 2, MAX_INT)
            check_int("max_queueing_time_ms", self.max_queueing_time_ms, 0, MAX_INT)
            if paced := self.control_behavior == "rate_limiter":
                check_threshold("count", self.count)
            if paced and 0 < self.count < 0.5:
                raise ConfigurationError(
                    f"count must be 0 or at least 0.5 to be paced, not {self.count!r}: Sentinel "
                    "rounds it to 0, by which it divides"
                )
            controller = controller_of(self)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{name}: {exc}") from exc
        except OverflowError as exc:
            raise ConfigurationError(
                f"{name}: count={short_repr(self.count)} is too large for a warm-up"
            ) from exc
        if (
            isinstance(controller, WarmUpController)
            and self.count > 0
            and controller.max_token == controller.warning_token
        ):
            raise ConfigurationError(
                f"{name}: count={self.count!r} for warm_up_period_sec={self.warm_up_period_sec} "
                "stores no tokens above the warning line, by which Sentinel divides: use a longer "
                "period or a larger count"
            )


@dataclass(frozen=True)
class DegradeRule(Rule):
    """When the circuit breaker of `resource` opens (Sentinel `DegradeRule`).

    | field | |
    |---|---|
    | `grade` | `"slow_request_ratio"`, `"error_ratio"` or `"error_count"` |
    | `count` | by grade: the rt in ms above which a call is slow, the ratio, the number of errors |
    | `time_window_s` | how long it stays open before a probe, in s |
    | `min_request_amount` | the calls in an interval below which it does not open |
    | `slow_ratio_threshold` | the ratio of slow calls, for `"slow_request_ratio"` |
    | `stat_interval_ms` | the interval in which calls are counted, in ms |

    Raises `ConfigurationError` for a field that cannot work.
    """

    resource: str
    count: float
    _: KW_ONLY
    time_window_s: int
    grade: DegradeGrade = "slow_request_ratio"
    min_request_amount: int = 5
    slow_ratio_threshold: float = 1.0
    stat_interval_ms: int = 1000

    def __post_init__(self) -> None:
        name = checked_name("DegradeRule", self.resource)
        check_word(name, "grade", self.grade, get_args(DegradeGrade))
        try:
            for field in ("time_window_s", "min_request_amount", "stat_interval_ms"):
                check_int(field, getattr(self, field), 1, MAX_INT)
            breaker_of(self)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{name}: {exc}") from exc


def controller_of(rule: FlowRule) -> TrafficShapingController:
    """Return a new controller that decides by `rule` (Sentinel `FlowRuleUtil`)."""
    if rule.control_behavior == "warm_up":
        return WarmUpController(rule.count, rule.warm_up_period_sec, rule.cold_factor)
    if rule.control_behavior == "rate_limiter":
        return ThrottlingController(rule.max_queueing_time_ms, rule.count)
    if rule.control_behavior == "warm_up_rate_limiter":
        return WarmUpRateLimiterController(
            rule.count, rule.warm_up_period_sec, rule.max_queueing_time_ms, rule.cold_factor
        )
    return DefaultController(rule.count, rule.grade)


def breaker_of(rule: DegradeRule) -> CircuitBreakerBase:
    """Return a new circuit breaker of `rule` (Sentinel `DegradeRuleManager`)."""
    times_and_calls = {
        "time_window_s": rule.time_window_s,
        "min_request_amount": rule.min_request_amount,
        "stat_interval_ms": rule.stat_interval_ms,
    }
    if rule.grade == "slow_request_ratio":
        return ResponseTimeCircuitBreaker(
            rule.count, slow_ratio_threshold=rule.slow_ratio_threshold, **times_and_calls
        )
    return ExceptionCircuitBreaker(rule.count, strategy=rule.grade, **times_and_calls)


def checked_name(kind: str, resource: object) -> str:
    """Return how errors name the rule; raise unless `resource` is a name."""
    _check_name(kind, "resource", resource)
    return f"{kind} of {short_repr(resource)}"


def _check_name(rule: str, field: str, value: object) -> None:
    if type(value) is not str or not value.strip():
        raise ConfigurationError(f"{rule}: {field} must be a name, not {short_repr(value)}")
