"""Processes that share one limit, and what each of them was told. Their side is `work`.

A worker writes down the store's time of every admission, and reports through its own pipe; nothing
is shared but the store. Nothing here needs typer or rich: a worker starts without them.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from distwindow import DistwindowError, Limiter, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self

_REPORT_EVERY = 0.05
_START = 30.0
"""Seconds for all workers to start; importing on a busy machine takes its time."""
_TIMEOUT = 5.0
"""Seconds of one call: the demo is about counting, not about deadlines."""
_GO, _STOP = "go", "stop"


@dataclass(frozen=True)
class Task:
    """What every worker does: ask for `key`, about every `pace` seconds, 0 being at once."""

    url: str
    limits: tuple[str, ...]
    prefix: str
    key: str
    pace: float


class Report(NamedTuple):
    """What one worker was told since its last report."""

    admitted_ms: list[int]
    """The store's time of each admission."""
    refused: int = 0
    failed: int = 0
    trouble: str = ""
    """What failed last; or, before the first call, why this worker cannot work at all."""


def work(task: Task, pipe: Connection) -> None:
    """One worker, in its own process: ready, go, reports until it is told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then says stop
    try:
        with Limiter(task.url, task.limits, prefix=task.prefix, timeout=_TIMEOUT) as limiter:
            try:
                limiter.peek(task.key)
            except DistwindowError as exc:
                pipe.send(Report([], trouble=str(exc)))
                return
            pipe.send(Report([]))
            if pipe.recv() == _GO:
                _ask(limiter, task, pipe)
    except (EOFError, OSError):  # the parent is gone
        return


def _ask(limiter: Limiter, task: Task, pipe: Connection) -> None:
    chance = random.Random()
    while not pipe.poll():
        admitted: list[int] = []
        refused = failed = 0
        trouble = ""
        until = time.monotonic() + _REPORT_EVERY
        while time.monotonic() < until:
            try:
                decision = limiter.try_acquire(task.key)
            except StoreError as exc:
                failed, trouble = failed + 1, str(exc)
                time.sleep(_REPORT_EVERY)
                continue
            if decision.allowed:
                admitted.append(decision.now_ms)
            else:
                refused += 1
            if task.pace:
                time.sleep(chance.uniform(0, 2 * task.pace))
        pipe.send(Report(admitted, refused, failed, trouble))


class Crew:
    """`count` workers: started by `with`, gone at its end whatever happens."""

    def __init__(self, task: Task, count: int) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._task, self._count = task, count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        # Ignored signals stay ignored in a new process: no traceback of a worker half imported.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(self._count):
                ours, theirs = self._spawn.Pipe()
                process = self._spawn.Process(target=work, args=(self._task, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:  # Ctrl-C too: no worker outlives a crew that was never entered
            self.__exit__(None, None, None)
            raise
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """The workers' process ids, by number."""
        return [process.pid for process in self._processes]

    def go(self) -> None:
        """Once all are connected, let them begin together."""
        deadline = time.monotonic() + _START
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise StoreUnavailable(f"the workers did not start within {_START:g} s")
            try:
                trouble = pipe.recv().trouble
            except EOFError:
                raise StoreUnavailable("a worker ended before it began") from None
            if trouble:
                raise StoreUnavailable(trouble)
        for pipe in self._pipes:
            pipe.send(_GO)

    def reports(self, seconds: float) -> Iterator[tuple[int, Report]]:
        """What the workers report within `seconds`, each with the worker's number."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            yield from self._come(left)

    def stop(self) -> Iterator[tuple[int, Report]]:
        """End the work; the last reports."""
        for pipe in self._pipes:
            try:
                pipe.send(_STOP)
            except OSError:
                continue
        deadline = time.monotonic() + _TIMEOUT
        while any(p.is_alive() for p in self._processes) and time.monotonic() < deadline:
            yield from self._come(0.05)
        yield from self._come(0)

    def _come(self, seconds: float) -> list[tuple[int, Report]]:
        come = []
        for pipe in wait([pipe for pipe in self._pipes if not pipe.closed], seconds):
            assert isinstance(pipe, Connection)
            try:
                while pipe.poll():
                    come.append((self._pipes.index(pipe), pipe.recv()))
            except (EOFError, OSError):
                pipe.close()
        return come
