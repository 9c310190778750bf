"""Real workers: processes of `celery worker` in sessions of their own, ended by their pids."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from tests.servers import Standalone
from tests.servers.wait import until

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]


def visible_again_after(seconds: float) -> dict[str, float]:
    """The broker's options: kombu would look for unacknowledged messages each 100 s only."""
    return {
        "visibility_timeout": seconds,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_restore_limit": 100,
    }


def most_in_a_window(admitted_ms: list[int]) -> int:
    """The most admissions in a second of whole buckets of 100 ms, by the limiter's clock."""
    buckets = Counter(at_ms // 100 for at_ms in admitted_ms)
    return max(sum(buckets[first + n] for n in range(10)) for first in buckets)


class Fleet:
    """A broker, and workers of `tests/celery/project.py`. `options` are those of the task
    `fetch`; `conf` is the configuration. The limiter's store is the broker's server, database 1,
    unless `store` names another. The broker is database 0, unless `broker` is a URL: workers use it
    and so do clients, unless `publisher` is the URL at which they reach the same broker.
    """

    def __init__(
        self,
        *,
        options: dict[str, Any] | None = None,
        conf: dict[str, Any] | None = None,
        store: str | None = None,
        broker: str | None = None,
        publisher: str | None = None,
        gate: bool = True,
    ) -> None:
        self._stack = ExitStack()
        self._options, self._conf = options or {}, conf or {}
        self._store, self._gate = store, gate
        self._broker, self._publisher = broker, publisher or broker
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.server = self._stack.enter_context(Standalone())
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.records: redis.Redis = self.server.client(db=2)
        self.broker_client: redis.Redis = self.server.client(db=0)
        self._stack.callback(self._end_all)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    @property
    def environment(self) -> dict[str, str]:
        base = self.server.url.removesuffix("/0")
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BROKER": self._broker or f"{base}/0",
            "BACKEND": self._backend(self._broker),
            "STORE": self._store or f"{base}/1",
            "RECORDS": f"{base}/2",
            "OPTIONS": json.dumps(self._options),
            "CONF": json.dumps(self._conf),
            "GATE": "yes" if self._gate else "no",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def _backend(self, broker: str | None) -> str:
        """Return where results are kept: with the messages, if the broker is Redis."""
        return broker if broker and broker.startswith("redis:") else self.server.url

    def start(
        self, *, pool: str = "prefork", slots: int = 2, queues: str = "", wait: bool = True
    ) -> Any:
        """Start a worker, and wait until it takes tasks."""
        number = len(self.workers)
        output = (self.folder / f"worker{number}.log").open("wb")
        process = subprocess.Popen(
            [
                sys.executable, "-m", "celery", "-A", "tests.celery.project", "worker",
                "-n", f"w{number}@test", "-P", pool, "-c", str(slots), "-l", "INFO",
                *(["-Q", queues] if queues else []), "--without-gossip", "--without-mingle",
            ],
            cwd=ROOT, env=self.environment, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        output.close()
        self.workers.append(process)
        if wait:
            self.wait_ready()
        return process

    def start_all(self, count: int, **options: Any) -> Any:
        """Start so many workers, and wait until all take tasks. Return the first."""
        workers = [self.start(wait=False, **options) for _ in range(count)]
        self.wait_ready()
        return workers[0]

    def wait_ready(self) -> None:
        wanted = len(self.workers)
        until(lambda: self.records.llen("ready") >= wanted, what="workers ready", timeout=40)

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        """Publish a task, as any client of the application would."""
        return self.app.send_task(f"tests.celery.project.{task}", args, **options)

    def send_all(self, count: int, task: str, *args: Any, **options: Any) -> None:
        """Publish so many tasks, with their numbers as the first argument."""
        for number in range(count):
            self.send(task, number, *args, **options)

    @property
    def app(self) -> Any:
        if not hasattr(self, "_app"):
            from celery import Celery

            broker, backend = self._publisher or self.server.url, self._backend(self._publisher)
            self._app = Celery("client", broker=broker, backend=backend, set_as_current=False)
            self._app.conf.update(self._conf)
            self._stack.callback(self._app.close)
            self._stack.callback(self._app.backend.client.close)
        return self._app

    # -- what was recorded -------------------------------------------------------------------------

    def recorded(self, name: str) -> list[Any]:
        values: Any = self.records.lrange(name, 0, -1)
        return [json.loads(value) if name in ("starts", "free") else value for value in values]

    def started(self) -> list[int]:
        return [int(number) for number, *_ in self.recorded("starts")]

    def received(self) -> list[str]:
        """Return the id of each message that a worker has logged as received."""
        pattern = re.compile(r"\[([0-9a-f-]{36})\] received")
        logs = (self.log(number) for number in range(len(self.workers)))
        return [identity for log in logs for identity in pattern.findall(log)]

    def messages_in_broker(self) -> int:
        """Return how many messages wait in the queue or are not acknowledged."""
        client: Any = self.broker_client
        return int(client.llen("celery")) + int(client.hlen("unacked"))

    def wait_started(self, count: int, timeout: float = 40.0) -> None:
        """Wait until so many tasks have started and ended."""

        def all_ended() -> bool:
            starts, ends = self.records.llen("starts"), self.records.llen("ends")
            return bool(starts >= count and ends >= count)

        until(all_ended, what=f"{count} tasks (got {len(self.started())})", timeout=timeout)

    def log(self, number: int = 0) -> str:
        return (self.folder / f"worker{number}.log").read_text(errors="replace")

    def inspect(self) -> dict[str, Any]:
        """Return what `celery inspect limits` says, once all workers that run have replied."""
        alive = sum(process.poll() is None for process in self.workers)

        def ask() -> dict[str, Any] | None:
            found = self.app.control.inspect(timeout=2.0)._request("limits") or {}
            return found if len(found) == alive else None

        found = until(ask, what="replies of all workers", timeout=20)
        assert found is not None
        return found

    def command(self, *words: str) -> str:
        """Run `celery -A ...`, as an operator would, and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.celery.project", *words],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    # -- ends --------------------------------------------------------------------------------------

    def stop(self, process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        process.send_signal(number)
        return process.wait(30)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to the worker and its pool, at once, as if the machine had died."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def _end_all(self) -> None:
        for process in self.workers:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self.workers:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
