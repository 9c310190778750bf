"""The system rules of a guard: load, CPU, calls under way and their times, in this process."""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConfigurationError, SystemOverloaded, short_repr
from ..ring.clock import NEVER, Clock
from ..runtime.timers import LOG, Timer
from ..sentinel.nodes import StatisticNode
from ..support.callables import RAISED_BY_CALLBACKS
from ..support.locks import was_raised_by_signal_handler
from .chain import ChainSlot, GuardCall, Outcome
from .rules import SystemRule

SAMPLE_EVERY_S = 1.0
"""Sentinel's."""
IDLE_S = 10.0
"""Seconds after its last call for which a guard is sampled for."""
_MIN_WINDOW_S, _MAX_WINDOW_S = 0.5, 5.0
"""CPU usage of a shorter time is noise (units of 10 ms); that of a longer one is not of now."""


_MAX_CPU = 1.1
"""The highest CPU usage of a sampler: a little above 1 is its error, more is a percentage."""


class SystemSample(NamedTuple):
    """One sample of the machine."""

    load: float
    """The load average of one minute."""
    cpu: float
    """The CPU usage of the last second, from 0 to 1; 0 as long as it is not known."""


UNKNOWN = SystemSample(0.0, 0.0)
"""Exceeds no threshold, as Sentinel's -1 before its first second."""

Sampler = Callable[[], Any]


class PsutilSampler:
    """Samples this machine. Raises `ConfigurationError` without psutil.

    The CPU usage is that between two calls of this object, whatever threads they are made in;
    psutil's own `cpu_percent` compares with the last call of the same thread.
    """

    def __init__(self, clock: Clock) -> None:
        try:
            import psutil
        except ImportError:
            raise ConfigurationError(
                "highest_system_load and highest_cpu_usage need psutil: pip install psutil, "
                "or give a sampler"
            ) from None
        self._psutil = psutil
        self._monotonic = clock.monotonic
        self._cpu = 0.0
        self._before = self._read()
        """The reading that the next one is compared with, and when it was made."""

    def __call__(self) -> SystemSample:
        reading = self._read()
        (before, before_at), (times, now) = self._before, reading
        if now - before_at >= _MIN_WINDOW_S:
            is_recent = now - before_at <= _MAX_WINDOW_S
            self._cpu = cpu_usage(before, times) if is_recent else 0.0
            self._before = reading
        return SystemSample(self._psutil.getloadavg()[0], self._cpu)

    def _read(self) -> tuple[dict[str, float], float]:
        return self._psutil.cpu_times()._asdict(), self._monotonic()


def cpu_usage(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the part of the time between two readings of psutil's `cpu_times` (seconds by kind) in
    which the CPUs were busy. The time of guests is in that of users; a counter that goes back, as
    Linux lets some, has not moved.
    """
    spent = {
        kind: max(0.0, after[kind] - before.get(kind, 0.0))
        for kind in after
        if kind not in ("guest", "guest_nice")
    }
    total = sum(spent.values())
    waiting = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
    return (total - waiting) / total if total else 0.0


class SystemSampling(Timer):
    """Samples of the machine for system rules (Sentinel `SystemStatusListener`): the last one, and
    when the next one is due. The background worker takes them, and never a call.

      event                                    the worker
      the first call, or the first after       is woken, and samples at once; psutil's CPU usage
      IDLE_S seconds without one               needs a second sample
      a second has passed                      samples
      no call for IDLE_S seconds               stops sampling

    Where the guard's clock is not the system's there is no worker: `Guard.flush` samples.
    """

    def __init__(self, sampler: Sampler, clock: Clock, name: str) -> None:
        super().__init__(name)
        self._sampler = sampler
        self._monotonic = clock.monotonic
        self.wake: Callable[[], object] = lambda: None
        self.sample = _first_sample(sampler)
        self._sampled_at = self._called_at = self._monotonic()
        self.due_at = NEVER

    def after_fork(self) -> None:
        """Wait for the next call to wake a worker: those of the parent do not run here."""
        super().after_fork()
        self.due_at = NEVER

    def on_call(self, now: float) -> None:
        """Note that the guard is in use at `now` (monotonic seconds); called once a second."""
        self._called_at = now
        # A worker that is late may never have started, as there is none before a fork.
        if self.due_at == NEVER or self.due_at < now - SAMPLE_EVERY_S:
            if now - self._sampled_at > IDLE_S:
                self.sample = UNKNOWN
            self.due_at = now
            self.wake()

    def run(self) -> BaseException | None:
        """Sample now, and return the error of a sampler that fails: its sample is unknown."""
        now, failure = self._monotonic(), None
        try:
            self.sample = _checked(self._sampler())
        except RAISED_BY_CALLBACKS as exc:
            if was_raised_by_signal_handler(exc):
                raise
            self.sample, failure = UNKNOWN, exc
        self._sampled_at = now
        self.reschedule(now)
        return failure

    def reschedule(self, now: float) -> None:
        self.due_at = now + SAMPLE_EVERY_S if now - self._called_at < IDLE_S else NEVER

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        LOG.warning(
            "sampling the machine for %s failed: %s: %s; its highest_system_load and "
            "highest_cpu_usage are not checked while it fails",
            self.name, type(failure).__name__, failure,
        )  # fmt: skip

    def log_recovery(self) -> None:
        LOG.warning("the machine can be sampled again for %s", self.name)


def _first_sample(sampler: Any) -> SystemSample:
    """Return the sample of a new guard. Raises `ConfigurationError` for a sampler that fails."""
    if not callable(sampler):
        raise ConfigurationError(
            f"sampler={short_repr(sampler)} is not a function; it returns the load average and the "
            "CPU usage from 0 to 1"
        )
    try:
        return _checked(sampler())
    except ConfigurationError:
        raise
    except Exception as exc:
        raise ConfigurationError(
            f"sampler={short_repr(sampler)} failed: {type(exc).__name__}: {exc}"
        ) from exc


def _checked(sample: Any) -> SystemSample:
    """Return what a sampler has returned. Raises `ConfigurationError` for what is no sample."""
    if inspect.iscoroutine(sample):
        sample.close()
        raise ConfigurationError("sampler is a coroutine function, which nothing awaits")
    try:
        load, cpu = sample
        if math.isfinite(load) and 0 <= cpu <= _MAX_CPU:
            return SystemSample(load, min(cpu, 1.0))
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigurationError(
        f"sampler has returned {short_repr(sample)}; it returns the load average and the CPU usage "
        "from 0 to 1, such as (0.5, 0.2)"
    )


_SECOND_MS = 1000


@dataclass(slots=True)
class _Pass:
    """The permits of one admitted call, and when they were taken (ms)."""

    at_ms: int
    cost: int
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
        """The calls that run. A callback in C removes one that dies: no handler raises in it."""
        self._needs_running = rule.max_thread is not None or rule.highest_system_load is not None
        self._node = StatisticNode()
        """Completed calls."""
        self._needs_node = rule.avg_rt is not None or rule.highest_system_load is not None
        self._passes: deque[_Pass] = deque()
        """The admitted calls of the last second, if the rule has a `qps`."""
        self._passed = 0

    def after_fork(self) -> None:
        """Start empty in a forked child: none of the parent's calls run here."""
        self._lock = threading.Lock()
        self._passed = 0
        self._running, self._node, self._passes = set(), StatisticNode(), deque()
        if self._sampling is not None:
            self._report_at = self._clock.monotonic()

    def enter(self, call: GuardCall) -> _RunningCall:
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
        """Raise `SystemOverloaded` for the first threshold that the call would exceed."""
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
        """True if more calls run than complete at the best rate and rt (Sentinel `checkBbr`)."""
        capacity = self._node.max_success_qps(now) * self._node.min_rt(now) / 1000
        running = len(self._running)
        return running > 1 and running > capacity
