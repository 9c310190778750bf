"""The slot that protects a process from overload (Sentinel `SystemSlot`, `SystemRuleManager`)."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ..consistency.key_state import NEVER
from ..core.clock import Clock
from ..core.errors import SystemOverloaded
from ..rules.system import SystemRule
from ..sentinel.statistic_node import StatisticNode
from .chain import ChainSlot, GuardCall, Outcome
from .system_sampling import SAMPLE_EVERY_S, UNKNOWN, SystemSampling

_SECOND_MS = 1000


class _Pass:
    """The permits of one admitted call, and when they were taken (ms)."""

    __slots__ = ("at_ms", "cost")

    def __init__(self, at_ms: int, cost: int) -> None:
        self.at_ms = at_ms
        self.cost = cost


class SystemSlot(ChainSlot):
    """Counts all calls of a guard in this process, and refuses those above a threshold.

    The machine is sampled by the background worker. The first call of each second tells it that the
    guard is in use; other calls compare a time.
    """

    order = 200

    def __init__(self, rule: SystemRule, clock: Clock, sampling: SystemSampling | None) -> None:
        self.rule: SystemRule = rule
        self._clock = clock
        self._sampling = sampling
        """None if the rule needs no sample."""
        self._report_at = NEVER if sampling is None else clock.monotonic()
        """When a call has to report that the guard is in use (monotonic seconds)."""
        self._lock = threading.Lock()
        self._threads = 0
        self._node = StatisticNode()
        """Completed calls."""
        self._needs_node = rule.avg_rt is not None or rule.highest_system_load is not None
        self._passes: deque[_Pass] = deque()
        """The admitted calls of the last second."""
        self._passed = 0

    def after_fork(self) -> None:
        """In a forked child: none of the parent's calls run here."""
        self._lock = threading.Lock()
        self._threads = self._passed = 0
        self._node, self._passes = StatisticNode(), deque()
        if self._sampling is not None:
            self._report_at = self._clock.monotonic()

    def enter(self, call: GuardCall) -> _Pass:
        """See `ChainSlot.enter`."""
        seconds = self._clock.monotonic()
        if seconds >= self._report_at and self._sampling is not None:
            self._report_at = seconds + SAMPLE_EVERY_S
            self._sampling.on_call(seconds)
        now = round(seconds * 1000)
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
                if self._needs_node:
                    self._node.add_rt_and_success(now, round(outcome.rt * 1000), 1)
            elif token in self._passes:
                self._passed -= token.cost
                token.cost = 0

    def _check(self, call: GuardCall, now: int) -> None:
        """Raise `SystemOverloaded` for the first threshold that the call would exceed. Only what
        has a threshold is computed.
        """
        rule = self.rule
        sample = UNKNOWN if self._sampling is None else self._sampling.sample
        if rule.qps is not None and self._passed + call.cost > rule.qps:
            raise SystemOverloaded(call.resource, "qps", self._passed + call.cost, rule.qps)
        if rule.max_thread is not None and self._threads + 1 > rule.max_thread:
            raise SystemOverloaded(call.resource, "max_thread", self._threads + 1, rule.max_thread)
        if rule.avg_rt is not None and (rt := self._node.avg_rt(now)) > rule.avg_rt:
            raise SystemOverloaded(call.resource, "avg_rt", rt, rule.avg_rt)
        most_cpu, most_load = rule.highest_cpu_usage, rule.highest_system_load
        if most_cpu is not None and sample.cpu > most_cpu:
            raise SystemOverloaded(call.resource, "highest_cpu_usage", sample.cpu, most_cpu)
        if most_load is not None and sample.load > most_load and self._runs_above_capacity(now):
            raise SystemOverloaded(call.resource, "highest_system_load", sample.load, most_load)

    def _runs_above_capacity(self, now: int) -> bool:
        """True if more calls run than the process completes at its best rate and rt (Sentinel
        `checkBbr`).
        """
        capacity = self._node.max_success_qps(now) * self._node.min_rt(now) / 1000
        return self._threads > 1 and self._threads > capacity
