"""The slot that protects a process from overload (Sentinel `SystemSlot`, `SystemRuleManager`)."""

from __future__ import annotations

import threading
import weakref
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
        """0 once they were given back, or have expired."""


class _RunningCall:
    """A call that was let through. Its entry alone refers to it, so that it runs no longer than its
    entry lives: a signal handler may raise before the first line of the entry's `__exit__`.
    """

    __slots__ = ("__weakref__", "reference", "taken")

    # Set where it is made, as a constructor takes as long as all of them.
    taken: _Pass | None
    reference: weakref.ref[_RunningCall] | None


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
        self._running: set[weakref.ref[_RunningCall]] = set()
        """The calls that run. One that has died is removed by a callback in C, in which no signal
        handler can raise.
        """
        self._needs_running = rule.max_thread is not None or rule.highest_system_load is not None
        self._node = StatisticNode()
        """Completed calls."""
        self._needs_node = rule.avg_rt is not None or rule.highest_system_load is not None
        self._passes: deque[_Pass] = deque()
        """The admitted calls of the last second, if the rule has a `qps`."""
        self._passed = 0

    def after_fork(self) -> None:
        """In a forked child: none of the parent's calls run here."""
        self._lock = threading.Lock()
        self._passed = 0
        self._running, self._node, self._passes = set(), StatisticNode(), deque()
        if self._sampling is not None:
            self._report_at = self._clock.monotonic()

    def enter(self, call: GuardCall) -> _RunningCall:
        """See `ChainSlot.enter`."""
        seconds = self._clock.monotonic()
        if seconds >= self._report_at and self._sampling is not None:
            self._report_at = seconds + SAMPLE_EVERY_S
            self._sampling.on_call(seconds)
        now = round(seconds * 1000)
        with self._lock:
            if self._passes and self._passes[0].at_ms <= now - _SECOND_MS:
                self._drop_expired(now)
            self._check(call, now)
            running = _RunningCall()
            running.taken = running.reference = None
            if self.rule.qps is not None:
                running.taken = taken = _Pass(now, call.cost)
                self._passed += taken.cost
                self._passes.append(taken)
            if self._needs_running:
                running.reference = weakref.ref(running, self._running.discard)
                self._running.add(running.reference)
        return running

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        """See `ChainSlot.exit`."""
        now = round(self._clock.monotonic() * 1000)
        with self._lock:
            if token.reference is not None:
                self._running.discard(token.reference)
            if outcome.admitted:
                if self._needs_node:
                    self._node.add_rt_and_success(now, round(outcome.rt * 1000), 1)
            elif token.taken is not None:
                self._give_back(token.taken)

    def _drop_expired(self, now: int) -> None:
        passes = self._passes
        while passes and passes[0].at_ms <= now - _SECOND_MS:
            first = passes[0]
            self._passed -= first.cost
            first.cost = 0
            del passes[0]

    def _give_back(self, taken: _Pass) -> None:
        self._passed -= taken.cost
        taken.cost = 0
        passes = self._passes
        while passes and passes[-1].cost == 0:  # so that refused calls take no room
            del passes[-1]

    def _check(self, call: GuardCall, now: int) -> None:
        """Raise `SystemOverloaded` for the first threshold that the call would exceed. Only what
        has a threshold is computed.
        """
        rule = self.rule
        sample = UNKNOWN if self._sampling is None else self._sampling.sample
        if rule.qps is not None and self._passed + call.cost > rule.qps:
            raise SystemOverloaded(call.resource, "qps", self._passed + call.cost, rule.qps)
        running = len(self._running)
        if rule.max_thread is not None and running + 1 > rule.max_thread:
            raise SystemOverloaded(call.resource, "max_thread", running + 1, rule.max_thread)
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
        running = len(self._running)
        return running > 1 and running > capacity
