"""The slot that protects a process from overload (Sentinel `SystemSlot`, `SystemRuleManager`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.clock import Clock
from ..core.errors import ConfigurationError, SystemOverloaded
from ..rules.system import SystemRule
from ..sentinel.statistic_node import StatisticNode
from .chain import ChainSlot, GuardCall, Outcome

_SAMPLE_EVERY_S = 1.0
_SECOND_MS = 1000


class SystemSample(NamedTuple):
    """What the machine does."""

    load: float
    """The load average of one minute."""
    cpu: float
    """The CPU usage since the sample before, from 0 to 1."""


def psutil_sampler() -> Callable[[], SystemSample]:
    """Return what samples this machine. Raises `ConfigurationError` without psutil."""
    try:
        import psutil
    except ImportError:
        raise ConfigurationError(
            "highest_system_load and highest_cpu_usage need psutil; install distwindow[system], or "
            "give a sampler"
        ) from None
    psutil.cpu_percent(None)  # the first call has nothing to compare with
    return lambda: SystemSample(psutil.getloadavg()[0], psutil.cpu_percent(None) / 100)


class _Pass:
    """The permits of one admitted call, and when they were taken (ms)."""

    __slots__ = ("at_ms", "cost")

    def __init__(self, at_ms: int, cost: int) -> None:
        self.at_ms = at_ms
        self.cost = cost


class SystemSlot(ChainSlot):
    """Counts all calls of a guard in this process, and refuses those above a threshold.

    The machine is sampled by the first call of each second; other calls compare a time.
    """

    order = 200

    def __init__(
        self, rule: SystemRule, clock: Clock, sampler: Callable[[], SystemSample] | None
    ) -> None:
        self.rule: SystemRule = rule
        self._clock = clock
        self._sampler: Callable[[], SystemSample] | None = None
        if rule.needs_sample:
            self._sampler = psutil_sampler() if sampler is None else sampler
        self._sample = SystemSample(0.0, 0.0)
        self._sampled_at = clock.monotonic() - _SAMPLE_EVERY_S
        self._lock = threading.Lock()
        self._threads = 0
        self._node = StatisticNode()
        """Completed calls."""
        self._passes: deque[_Pass] = deque()
        """The admitted calls of the last second."""
        self._passed = 0

    def after_fork(self) -> None:
        """In a forked child: none of the parent's calls run here."""
        self._lock = threading.Lock()
        self._threads = self._passed = 0
        self._node, self._passes = StatisticNode(), deque()

    def enter(self, call: GuardCall) -> _Pass:
        """See `ChainSlot.enter`."""
        self._sample_if_due()
        now = round(self._clock.monotonic() * 1000)
        with self._lock:
            while self._passes and self._passes[0].at_ms <= now - _SECOND_MS:
                self._passed -= self._passes.popleft().cost
            self._check(call, now)
            taken = _Pass(now, call.cost)
            self._passes.append(taken)
            self._passed += call.cost
            self._threads += 1
        return taken

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        """See `ChainSlot.exit`."""
        now = round(self._clock.monotonic() * 1000)
        with self._lock:
            self._threads = max(0, self._threads - 1)
            if outcome.admitted:
                self._node.add_rt_and_success(now, round(outcome.rt * 1000), 1)
            elif token in self._passes:
                self._passed -= token.cost
                token.cost = 0

    def _check(self, call: GuardCall, now: int) -> None:
        rule, sample = self.rule, self._sample
        measured = [
            ("qps", self._passed + call.cost, rule.qps),
            ("max_thread", self._threads + 1, rule.max_thread),
            ("avg_rt", self._node.avg_rt(now), rule.avg_rt),
            ("highest_cpu_usage", sample.cpu, rule.highest_cpu_usage),
        ]
        if self._threads > 1 and self._threads > (
            self._node.max_success_qps(now) * self._node.min_rt(now) / 1000
        ):
            measured.append(("highest_system_load", sample.load, rule.highest_system_load))
        for field, value, threshold in measured:
            if threshold is not None and value > threshold:
                raise SystemOverloaded(call.resource, field, value, threshold)

    def _sample_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._sampler is not None and now - self._sampled_at >= _SAMPLE_EVERY_S:
            self._sampled_at = now  # before it: other threads go on meanwhile
            self._sample = SystemSample(*self._sampler())
