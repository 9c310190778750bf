"""One rate limit for the whole fleet: Sentinel's LeapArray in Redis, exact and atomic."""

from .away.outages import Health
from .breaker import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ConsecutiveFailures,
    ErrorCount,
    ErrorRatio,
    SlowRatio,
)
from .concurrency.concurrency import AsyncConcurrency, Concurrency
from .concurrency.operations import ConcurrencyStats, Holder
from .concurrency.slot import AsyncSlot, Slot
from .errors import (
    AuthorityDenied,
    Blocked,
    ConcurrencyExceeded,
    ConfigurationError,
    DistwindowDeprecationWarning,
    DistwindowError,
    RateLimitExceeded,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    SystemOverloaded,
)
from .guard import AsyncGuard, ChainSlot, Guard, GuardCall, Outcome, call_context, guarded
from .guard.rules import AuthorityRule, SystemRule
from .limiter.limiter import AsyncLimiter, Limiter
from .minute.view import MinuteStats
from .observer import (
    Counts,
    Level,
    Observer,
    ObserverEvent,
    StoreCall,
    set_default_observer,
)
from .reserve.reservation import AsyncReservation, Reservation
from .ring.decision import Decision
from .ring.key import Key
from .ring.limit import Limit
from .ring.stats import Bucket, ShapingStats, Stats, WindowStats
from .runtime.shutdown import exit_on_sigterm
from .sentinel.rules import DegradeRule, FlowRule
from .sentinel.windows.bucket_leap_array import (
    BucketLeapArray,
    Event,
    FutureBucketLeapArray,
    MetricBucket,
    OccupiableLeapArray,
)
from .sentinel.windows.leap_array import LeapArray
from .sentinel.windows.rolling_window import FixedWindow, RollingWindow
from .sentinel.windows.sentinel_go import EagerBucketLeapArray, SlidingWindowMetric

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBreaker",
    "AsyncAdaptiveBreaker",
    "AsyncCircuitBreaker",
    "AsyncConcurrency",
    "AsyncGuard",
    "AsyncLimiter",
    "AsyncReservation",
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
    "ConsecutiveFailures",
    "Counts",
    "Decision",
    "DegradeRule",
    "DistwindowDeprecationWarning",
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
    "Health",
    "Holder",
    "Key",
    "LeapArray",
    "Level",
    "Limit",
    "Limiter",
    "MetricBucket",
    "MinuteStats",
    "Observer",
    "ObserverEvent",
    "OccupiableLeapArray",
    "Outcome",
    "RateLimitExceeded",
    "Reservation",
    "RollingWindow",
    "ShapingStats",
    "SlidingWindowMetric",
    "Slot",
    "SlowRatio",
    "Stats",
    "StoreCall",
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
    "set_default_observer",
]
