"""The demo's worker processes, which share one limit.

Each process runs `run_worker`: it calls the limiter, records the store's time of every admission,
and sends reports through its own pipe. The processes share nothing but the store. This module
imports neither typer nor rich, so that a worker starts faster.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import DistwindowError, Limiter, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self


_REPORT_INTERVAL_S = 0.05
_START_TIMEOUT_S = 30.0
"""For all workers together, because imports are slow on a busy machine."""
_TIMEOUT_S = 5.0
"""Of one call; long, because the demo is about counting and not about deadlines."""
_START, _STOP = "start", "stop"


@dataclass(frozen=True)
class WorkerOptions:
    """The calls that every worker makes, and how often."""

    url: str
    limits: tuple[str, ...]
    prefix: str
    key: str
    pause_s: float
    """The mean pause after a call."""


class Report(NamedTuple):
    """The results of one worker's calls since its last report."""

    admitted_ms: list[int]
    """The store's time of each admission."""
    refused: int = 0
    failed: int = 0
    error: str = ""
    """Why the last failed call failed. In the first report, why this worker cannot call at all."""


def run_worker(options: WorkerOptions, pipe: Connection) -> None:
    """Run one worker in its own process: send a first report, wait for the start, then send reports
    until the parent sends the stop or ends.
    """
    # Ctrl-C reaches all processes of a terminal. The parent handles it, and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Limiter(
            options.url, options.limits, prefix=options.prefix, timeout=_TIMEOUT_S
        ) as limiter:
            try:
                limiter.peek(options.key)
            except DistwindowError as exc:
                pipe.send(Report([], error=str(exc)))
                return
            pipe.send(Report([]))
            if pipe.recv() == _START:
                _call_until_stopped(limiter, options, pipe)
    except (EOFError, OSError):  # the parent has ended
        return


def _call_until_stopped(limiter: Limiter, options: WorkerOptions, pipe: Connection) -> None:
    generator = random.Random()
    while not pipe.poll():
        admitted: list[int] = []
        refused = failed = 0
        error = ""
        report_at = time.monotonic() + _REPORT_INTERVAL_S
        while time.monotonic() < report_at:
            try:
                decision = limiter.try_acquire(options.key)
            except StoreError as exc:
                failed, error = failed + 1, str(exc)
                time.sleep(_REPORT_INTERVAL_S)
                continue
            if decision.allowed:
                admitted.append(decision.now_ms)
            else:
                refused += 1
            if options.pause_s:
                time.sleep(generator.uniform(0, 2 * options.pause_s))
        pipe.send(Report(admitted, refused, failed, error))


class WorkerPool:
    """`count` worker processes. They end with the `with`, also if it is left by an error."""

    def __init__(self, options: WorkerOptions, count: int) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._options, self._count = options, count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        # A new process inherits ignored signals. Ctrl-C during its imports would print a traceback.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(self._count):
                ours, theirs = self._spawn.Pipe()
                process = self._spawn.Process(
                    target=run_worker, args=(self._options, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:  # includes Ctrl-C; without `__enter__` nobody calls `__exit__`
            self.__exit__(None, None, None)
            raise
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(2)
        for pipe in self._pipes:
            pipe.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by number."""
        return [process.pid for process in self._processes]

    def start_calls(self) -> None:
        """Wait until all workers are connected, then let them start together."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise StoreUnavailable(
                    f"the worker processes did not start within {_START_TIMEOUT_S:g} s"
                )
            try:
                error = pipe.recv().error
            except EOFError:
                raise StoreUnavailable("a worker process ended while it started") from None
            if error:
                raise StoreUnavailable(error)
        for pipe in self._pipes:
            pipe.send(_START)

    def reports(self, seconds: float) -> Iterator[tuple[int, Report]]:
        """Yield the reports of the next `seconds`, each with the number of its worker."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            yield from self._receive(left)

    def stop(self) -> Iterator[tuple[int, Report]]:
        """Stop the workers, and yield their last reports."""
        for pipe in self._pipes:
            try:
                pipe.send(_STOP)
            except OSError:
                continue
        deadline = time.monotonic() + _TIMEOUT_S
        while any(p.is_alive() for p in self._processes) and time.monotonic() < deadline:
            yield from self._receive(0.05)
        yield from self._receive(0)

    def _receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Return all reports that are there, waiting up to `seconds` for the first."""
        reports = []
        for pipe in wait([pipe for pipe in self._pipes if not pipe.closed], seconds):
            assert isinstance(pipe, Connection)
            try:
                while pipe.poll():
                    reports.append((self._pipes.index(pipe), pipe.recv()))
            except (EOFError, OSError):
                pipe.close()
        return reports
