"""The kinds of golden traces: those of structures that distwindow has, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .replay import Args, Driver
from .replay_circuit_breaker import CircuitBreakerReplay
from .replay_fixed_window import FixedWindowReplay
from .replay_google_breaker import ArticleGoogleBreakerReplay, GoogleBreakerReplay
from .replay_leaparray import LeapArrayReplay
from .replay_rolling_window import RollingWindowReplay
from .replay_sentinel_go import SentinelGoReplay

BUILT: Mapping[str, Callable[[Args], Driver]] = {
    "leaparray": LeapArrayReplay,
    "sentinel_go_array": SentinelGoReplay,
    "rolling_window": RollingWindowReplay,
    "article_fixed_window": FixedWindowReplay,
    "circuit_breaker": CircuitBreakerReplay,
    "google_breaker": GoogleBreakerReplay,
    "google_breaker_article": ArticleGoogleBreakerReplay,
}

# These are skipped, not passed, and the summary at the end of a run names them.
NOT_BUILT = (
    "occupiable_array",
    "try_occupy_next",
    "statistic_node",
    "flow_default",
    "flow_throttling",
    "flow_rate_limiter_legacy",
    "flow_warm_up",
    "flow_warm_up_rate_limiter",
    "slot_chain",
)
