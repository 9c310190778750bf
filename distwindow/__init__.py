"""One rate limit for the whole fleet: Sentinel's LeapArray in Redis, exact and atomic."""

from .core.bucket import MetricBucket
from .core.bucket_leap_array import BucketLeapArray
from .core.decision import Decision
from .core.errors import (
    ConfigurationError,
    DistwindowError,
    RateLimitExceeded,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from .core.event import Event
from .core.fixed_window import FixedWindow
from .core.leap_array import LeapArray
from .core.limit import Limit
from .core.rolling_window import RollingWindow
from .core.sliding import EagerBucketLeapArray, SlidingWindowMetric
from .core.stats import Bucket, Stats, WindowStats
from .limiter import AsyncLimiter, Limiter
from .wire.keys import Key

__version__ = "0.1.0"

__all__ = [
    "AsyncLimiter",
    "Bucket",
    "BucketLeapArray",
    "ConfigurationError",
    "Decision",
    "DistwindowError",
    "EagerBucketLeapArray",
    "Event",
    "FixedWindow",
    "Key",
    "LeapArray",
    "Limit",
    "Limiter",
    "MetricBucket",
    "RateLimitExceeded",
    "RollingWindow",
    "SlidingWindowMetric",
    "Stats",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "WindowStats",
    "__version__",
]
