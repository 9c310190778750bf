"""One rate limit for the whole fleet: Sentinel's LeapArray in Redis, exact and atomic."""

from .breaker import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ErrorCount,
    ErrorRatio,
    SlowRatio,
)
from .concurrency.blocking import Concurrency
from .concurrency.slot import AsyncSlot, Slot
from .concurrency.tasks import AsyncConcurrency
from .core.decision import Decision
from .core.errors import (
    AuthorityDenied,
    Blocked,
    ConcurrencyExceeded,
    ConfigurationError,
    DistwindowError,
    RateLimitExceeded,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    SystemOverloaded,
)
from .core.key import Key
from .core.limit import Limit
from .core.minute_view import MinuteStats
from .core.shaping_stats import ShapingStats
from .core.slot_stats import ConcurrencyStats, Holder
from .core.stats import Bucket, Stats, WindowStats
from .guard import AsyncGuard, ChainSlot, Guard, GuardCall, Outcome, call_context, guarded
from .limiter import AsyncLimiter, Limiter
from .rules import AuthorityRule, DegradeRule, FlowRule, SystemRule
from .windows.bucket_leap_array import BucketLeapArray
from .windows.event import Event
from .windows.fixed_window import FixedWindow
from .windows.leap_array import LeapArray
from .windows.metric_bucket import MetricBucket
from .windows.occupiable_leap_array import FutureBucketLeapArray, OccupiableLeapArray
from .windows.rolling_window import RollingWindow
from .windows.sentinel_go import EagerBucketLeapArray, SlidingWindowMetric
from .worker.exit_hooks import exit_on_sigterm

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBreaker",
    "AsyncAdaptiveBreaker",
    "AsyncCircuitBreaker",
    "AsyncConcurrency",
    "AsyncGuard",
    "AsyncLimiter",
    "AsyncSlot",
    "AuthorityDenied",
    "AuthorityRule",
    "Blocked",
    "BreakerChange",
    "BreakerOpen",
    "Bucket",
    "BucketLeapArray",
    "ChainSlot",
    "CircuitBreaker",
    "Concurrency",
    "ConcurrencyExceeded",
    "ConcurrencyStats",
    "ConfigurationError",
    "Decision",
    "DegradeRule",
    "DistwindowError",
    "EagerBucketLeapArray",
    "ErrorCount",
    "ErrorRatio",
    "Event",
    "FixedWindow",
    "FlowRule",
    "FutureBucketLeapArray",
    "Guard",
    "GuardCall",
    "Holder",
    "Key",
    "LeapArray",
    "Limit",
    "Limiter",
    "MetricBucket",
    "MinuteStats",
    "OccupiableLeapArray",
    "Outcome",
    "RateLimitExceeded",
    "RollingWindow",
    "ShapingStats",
    "SlidingWindowMetric",
    "Slot",
    "SlowRatio",
    "Stats",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "SystemOverloaded",
    "SystemRule",
    "WindowStats",
    "__version__",
    "call_context",
    "exit_on_sigterm",
    "guarded",
]
