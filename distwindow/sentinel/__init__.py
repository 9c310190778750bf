"""Sentinel's structures in one process, exact to the recordings of Sentinel 1.8.9; no store.

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
from .nodes import NodeConfig, StatisticNode
from .rules import DegradeRule, FlowRule, Rule
from .slot_chain import ChainEntry, SlotChain

__all__ = [
    "ChainEntry",
    "CircuitBreakerBase",
    "DefaultController",
    "DegradeRule",
    "ExceptionCircuitBreaker",
    "FlowRule",
    "NodeConfig",
    "PassResult",
    "RateLimiterController",
    "ResponseTimeCircuitBreaker",
    "Rule",
    "SlotChain",
    "StatisticNode",
    "ThrottlingController",
    "TrafficShapingController",
    "WarmUpController",
    "WarmUpRateLimiterController",
]
