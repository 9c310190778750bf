"""`circuit_breaker`: Sentinel's breakers by slow ratio, error ratio and error count."""

from __future__ import annotations

from distwindow.sentinel.circuit_breakers import (
    BreakerState,
    CircuitBreakerBase,
    ExceptionCircuitBreaker,
    ResponseTimeCircuitBreaker,
)

from .replay import Args


class CircuitBreakerReplay:
    """One breaker, and the changes of state that its observer heard."""

    def __init__(self, params: Args) -> None:
        self.events: list[list[object]] = []
        self.probes: set[int] = set()
        self.breaker = self._made(params)
        self.breaker.add_observer(self._note)

    def _made(self, params: Args) -> CircuitBreakerBase:
        names = ("time_window_s", "min_request_amount", "stat_interval_ms")
        options = {name: params[name] for name in names}
        if params["strategy"] == "slow_request_ratio":
            ratio = params["slow_ratio_threshold"]
            return ResponseTimeCircuitBreaker(
                params["count"], slow_ratio_threshold=ratio, **options
            )
        return ExceptionCircuitBreaker(params["count"], strategy=params["strategy"], **options)

    def _note(self, previous: BreakerState, new: BreakerState, value: float | None) -> None:
        self.events.append([previous.upper(), new.upper(), value])

    def _result(self) -> dict[str, object]:
        events, self.events = self.events, []
        return {
            "state": self.breaker.state.upper(),
            "events": events,
            "next_retry": self.breaker.next_retry_ms,
        }

    def op_try_pass(self, now: int, args: Args) -> object:
        allowed = self.breaker.try_pass(now)
        if allowed and self.breaker.state == "half_open":
            self.probes.add(args["id"])
        return {"allowed": allowed, **self._result()}

    def op_complete(self, now: int, args: Args) -> object:
        self.breaker.on_request_complete(now, rt_ms=args["rt"], error=args["error"])
        return self._result()

    def op_terminate_blocked(self, now: int, args: Args) -> object:
        if args["id"] in self.probes:
            self.breaker.on_probe_blocked()
        return self._result()
