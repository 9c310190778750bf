"""Circuit breakers that hold for the whole fleet."""

from ..core.breaker_rules import BreakerRule, ErrorCount, ErrorRatio, SlowRatio
from ..core.breaker_state import BreakerChange, BreakerOpen, BreakerState
from .adaptive import AdaptiveBreaker, AsyncAdaptiveBreaker
from .async_circuit_breaker import AsyncCircuitBreaker
from .circuit_breaker import CircuitBreaker

__all__ = [
    "AdaptiveBreaker",
    "AsyncAdaptiveBreaker",
    "AsyncCircuitBreaker",
    "BreakerChange",
    "BreakerOpen",
    "BreakerRule",
    "BreakerState",
    "CircuitBreaker",
    "ErrorCount",
    "ErrorRatio",
    "SlowRatio",
]
