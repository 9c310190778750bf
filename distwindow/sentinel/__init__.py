"""Sentinel's and go-zero's structures in one process, exact to the recordings of Sentinel 1.8.9 and
go-zero; no store.

Times are arguments, in ms. Nothing in this package is locked: code that shares an object between
threads has to lock it.
"""

from .circuit_breakers import (
    CircuitBreakerBase,
    ExceptionCircuitBreaker,
    ResponseTimeCircuitBreaker,
)
from .flow import (
    DefaultController,
    PassResult,
    RateLimiterController,
    ThrottlingController,
    TrafficShapingController,
    WarmUpController,
    WarmUpRateLimiterController,
)
from .google_breaker import ArticleGoogleBreaker, BreakerHistory, GoogleBreaker
from .nodes import NodeConfig, StatisticNode
from .rules import DegradeRule, FlowRule, Rule
from .slot_chain import ChainEntry, SlotChain
from .windows.bucket_leap_array import (
    BucketLeapArray,
    Event,
    FutureBucketLeapArray,
    MetricBucket,
    OccupiableLeapArray,
)
from .windows.leap_array import LeapArray
from .windows.rolling_window import FixedWindow, RollingWindow
from .windows.sentinel_go import EagerBucketLeapArray, SlidingWindowMetric

__all__ = [
    "ArticleGoogleBreaker",
    "BreakerHistory",
    "BucketLeapArray",
    "ChainEntry",
    "CircuitBreakerBase",
    "DefaultController",
    "DegradeRule",
    "EagerBucketLeapArray",
    "Event",
    "ExceptionCircuitBreaker",
    "FixedWindow",
    "FlowRule",
    "FutureBucketLeapArray",
    "GoogleBreaker",
    "LeapArray",
    "MetricBucket",
    "NodeConfig",
    "OccupiableLeapArray",
    "PassResult",
    "RateLimiterController",
    "ResponseTimeCircuitBreaker",
    "RollingWindow",
    "Rule",
    "SlidingWindowMetric",
    "SlotChain",
    "StatisticNode",
    "ThrottlingController",
    "TrafficShapingController",
    "WarmUpController",
    "WarmUpRateLimiterController",
]
