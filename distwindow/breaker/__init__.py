"""Circuit breakers that hold for the whole fleet."""

from ..sentinel.circuit_breakers import BreakerState
from .adaptive import AdaptiveBreaker, AsyncAdaptiveBreaker
from .circuit_breaker import AsyncCircuitBreaker, CircuitBreaker
from .record import BreakerChange, BreakerOpen
from .rules import BreakerRule, ConsecutiveFailures, ErrorCount, ErrorRatio, SlowRatio

__all__ = [
    "AdaptiveBreaker",
    "AsyncAdaptiveBreaker",
    "AsyncCircuitBreaker",
    "BreakerChange",
    "BreakerOpen",
    "BreakerRule",
    "BreakerState",
    "CircuitBreaker",
    "ConsecutiveFailures",
    "ErrorCount",
    "ErrorRatio",
    "SlowRatio",
]
