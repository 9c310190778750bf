"""Samples of the machine for system rules (Sentinel `SystemStatusListener`). The background worker
takes them, and never a call.

    event                                    the worker
    the first call, or the first after       is woken, and samples at once; psutil's CPU usage needs
    IDLE_S seconds without one               a second sample
    a second has passed                      samples
    no call for IDLE_S seconds               stops sampling

Where the guard's clock is not the system's there is no worker: `Guard.flush` samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..consistency.key_state import NEVER
from ..core.clock import Clock
from ..core.errors import ConfigurationError, short_repr
from ..core.interrupts import was_raised_by_signal_handler
from ..operations.flush_source import OutgoingCommand
from ..worker.flush_job import LOG, RAISED_BY_CALLBACKS, FlushJob

SAMPLE_EVERY_S = 1.0
"""Sentinel's."""
IDLE_S = 10.0
"""Seconds after its last call for which a guard is sampled for."""
_MIN_WINDOW_S, _MAX_WINDOW_S = 0.5, 5.0
"""The CPU usage of a shorter time is noise: the system counts in units of 10 ms. That of a longer
one says nothing of now.
"""


_MAX_CPU = 1.1
"""What a sampler may return as the CPU usage: a little above 1 is an error of its measurement and
counts as 1; more is a percentage.
"""


class SystemSample(NamedTuple):
    """What the machine does."""

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


class SystemSampling:
    """The last sample, and when the next one is due. A `FlushSource`: the worker calls `take`."""

    dropped = 0

    def __init__(self, sampler: Sampler, clock: Clock) -> None:
        self._sampler = sampler
        self._monotonic = clock.monotonic
        self.wake: Callable[[], object] = lambda: None
        self._failure: BaseException | None = None
        """Why the last sample failed; None after one that succeeded."""
        self.sample = _first_sample(sampler)
        self._sampled_at = self._called_at = self._monotonic()
        self.after_fork()

    def after_fork(self) -> None:
        """No worker of the parent's runs here: the next call wakes one."""
        self.next_due_at = NEVER

    def on_call(self, now: float) -> None:
        """Note that the guard is in use. Called by the first call of each second; takes no sample.
        `now` is in monotonic seconds.
        """
        self._called_at = now
        # A worker that is late may never have started, as a process that is about to fork starts
        # none.
        if self.next_due_at == NEVER or self.next_due_at < now - SAMPLE_EVERY_S:
            if now - self._sampled_at > IDLE_S:
                self.sample = UNKNOWN
            self.next_due_at = now
            self.wake()

    def take(self, everything: bool) -> BaseException | None:
        """Sample now; return the error of a sampler that fails, whose sample is unknown. With
        `everything`, as the process or its event loop ends, do nothing, and return what the last
        sample has returned.
        """
        if everything:
            return self._failure
        now = self._monotonic()
        self._failure = None
        try:
            self.sample = _checked(self._sampler())
        except RAISED_BY_CALLBACKS as exc:
            if was_raised_by_signal_handler(exc):
                raise
            self.sample, self._failure = UNKNOWN, exc
        self._sampled_at = now
        self.reschedule(now)
        return self._failure

    async def take_async(self, everything: bool) -> BaseException | None:
        """Do as `take`, for the worker of an event loop."""
        return self.take(everything)

    def reschedule(self, now: float) -> None:
        """See `FlushSource`."""
        self.next_due_at = now + SAMPLE_EVERY_S if now - self._called_at < IDLE_S else NEVER

    # There is nothing to send, and nothing to wait for when the process ends.

    def clock_probe(self) -> list[OutgoingCommand]:
        return []

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None: ...

    def pause_calls(self, hold: Callable[[], object]) -> None: ...

    def unreturned_permits(self) -> int:
        return 0

    def unacknowledged_counts(self) -> int:
        return 0


class SamplingJob(FlushJob):
    """The job of a `SystemSampling`, and the log lines about it."""

    __slots__ = ()

    @property
    def has_unsent(self) -> bool:
        return False

    def needs_retry(self, final: bool) -> bool:
        return False

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
