"""Sentinel's structures in one process, exact to its recorded behaviour. They need no store."""

from .circuit_breakers import (
    CircuitBreakerBase,
    ExceptionCircuitBreaker,
    ResponseTimeCircuitBreaker,
)

__all__ = ["CircuitBreakerBase", "ExceptionCircuitBreaker", "ResponseTimeCircuitBreaker"]
