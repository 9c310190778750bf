"""The kinds of golden traces, each with the driver that replays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .replay import Args, Driver
from .replay_circuit_breaker import CircuitBreakerReplay
from .replay_fixed_window import FixedWindowReplay
from .replay_flow_controllers import (
    DefaultControllerReplay,
    RateLimiterReplay,
    ThrottlingReplay,
    WarmUpRateLimiterReplay,
    WarmUpReplay,
)
from .replay_google_breaker import ArticleGoogleBreakerReplay, GoogleBreakerReplay
from .replay_leaparray import LeapArrayReplay
from .replay_occupiable_array import OccupiableArrayReplay
from .replay_rolling_window import RollingWindowReplay
from .replay_sentinel_go import SentinelGoReplay
from .replay_slot_chain import SlotChainReplay
from .replay_statistic_node import StatisticNodeReplay

DRIVERS: Mapping[str, Callable[[Args], Driver]] = {
    "leaparray": LeapArrayReplay,
    "occupiable_array": OccupiableArrayReplay,
    "try_occupy_next": StatisticNodeReplay,
    "statistic_node": StatisticNodeReplay,
    "flow_default": DefaultControllerReplay,
    "flow_throttling": ThrottlingReplay,
    "flow_rate_limiter_legacy": RateLimiterReplay,
    "flow_warm_up": WarmUpReplay,
    "flow_warm_up_rate_limiter": WarmUpRateLimiterReplay,
    "slot_chain": SlotChainReplay,
    "sentinel_go_array": SentinelGoReplay,
    "rolling_window": RollingWindowReplay,
    "article_fixed_window": FixedWindowReplay,
    "circuit_breaker": CircuitBreakerReplay,
    "google_breaker": GoogleBreakerReplay,
    "google_breaker_article": ArticleGoogleBreakerReplay,
}
