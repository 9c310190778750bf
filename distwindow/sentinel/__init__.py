"""Sentinel's structures in one process, exact to the recordings of Sentinel 1.8.9; no store.

Times are arguments, in ms. Nothing in this package is locked: code that shares an object between
threads has to lock it.
"""

from .circuit_breakers import (
    CircuitBreakerBase,
    ExceptionCircuitBreaker,
    ResponseTimeCircuitBreaker,
)
from .default_controller import DefaultController
from .rules import DegradeRule, FlowRule
from .slot_chain import ChainEntry, SlotChain
from .statistic_node import NodeConfig, StatisticNode
from .throttling import RateLimiterController, ThrottlingController
from .traffic_shaping import PassResult, TrafficShapingController
from .warm_up import WarmUpController, WarmUpRateLimiterController

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
    "SlotChain",
    "StatisticNode",
    "ThrottlingController",
    "TrafficShapingController",
    "WarmUpController",
    "WarmUpRateLimiterController",
]
