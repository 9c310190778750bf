"""One rate limit for the whole fleet: Sentinel's LeapArray in Redis, exact and atomic."""

from .core.decision import Decision
from .core.errors import (
    ConfigurationError,
    DistwindowError,
    RateLimitExceeded,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from .core.key import Key
from .core.limit import Limit
from .core.minute_view import MinuteStats
from .core.stats import Bucket, Stats, WindowStats
from .limiter import AsyncLimiter, Limiter
from .windows.bucket_leap_array import BucketLeapArray
from .windows.event import Event
from .windows.fixed_window import FixedWindow
from .windows.leap_array import LeapArray
from .windows.metric_bucket import MetricBucket
from .windows.occupiable_leap_array import FutureBucketLeapArray, OccupiableLeapArray
from .windows.rolling_window import RollingWindow
from .windows.sentinel_go import EagerBucketLeapArray, SlidingWindowMetric

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
    "FutureBucketLeapArray",
    "Key",
    "LeapArray",
    "Limit",
    "Limiter",
    "MetricBucket",
    "MinuteStats",
    "OccupiableLeapArray",
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
