"""Starts workers of one kind as processes, enqueues jobs, and reads what was recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.servers import until

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True)
class Kind:
    """A library: how its worker is started, and how many jobs are on their way in its broker."""

    name: str
    command: tuple[str, ...]
    outstanding: Callable[[Any], int]
    slots: int
    """How many jobs of one worker may have started and not be acknowledged yet: these run twice
    after a kill. taskiq runs all that the limit admits at once."""
    in_limbo: Callable[[Any], int] = lambda client: 0
    """How many jobs were taken and have not started. RQ fails what a killed worker leaves there."""
    expires: str = ""
    """A key by which a killed worker is missed: it expires a minute later."""
    claims_after_new: bool = False
    """Is what a killed worker had taken over only after a new message has come?"""


def _dramatiq_outstanding(client: Any) -> int:
    queues = ["dramatiq:default", "dramatiq:default.DQ"]
    held = [client.scard(key) for key in client.keys("dramatiq:__acks__.*")]
    return int(sum(client.llen(queue) for queue in queues) + sum(held))


def _rq_outstanding(client: Any) -> int:
    return int(
        client.llen("rq:queue:jobs")
        + _rq_in_limbo(client)
        + client.zcard("rq:scheduled:jobs")
        + client.zcard("rq:wip:jobs")
    )


def _rq_in_limbo(client: Any) -> int:
    return int(client.llen("rq:queue:jobs:intermediate"))


def _arq_outstanding(client: Any) -> int:
    return int(client.zcard("arq:queue"))


def _taskiq_outstanding(client: Any) -> int:
    undelivered = 0
    for group in client.xinfo_groups("taskiq"):  # Redis 6.2 does not tell the `lag` of a group
        after = group["last-delivered-id"].decode()
        undelivered += group["pending"] + len(client.xrange("taskiq", min=f"({after}"))
    return undelivered


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "dramatiq",
            ("dramatiq", "tests.contrib.dramatiq_app", "--processes", "1", "--threads", "4"),
            _dramatiq_outstanding,
            slots=4,
        ),
        Kind(
            "rq",
            ("rq", "worker", "--worker-class", "distwindow.contrib.rq.LimitedWorker", "jobs"),
            _rq_outstanding,
            slots=1,
            in_limbo=_rq_in_limbo,
            expires="rq:scheduler-lock:jobs",
        ),
        Kind("arq", ("arq", "tests.contrib.arq_app.WorkerSettings"), _arq_outstanding, slots=10),
        Kind(
            "taskiq",
            (
                "taskiq", "worker", "tests.contrib.taskiq_app:broker", "--workers", "1",
                "--receiver", "distwindow.contrib.taskiq:LimitedReceiver",
            ),
            _taskiq_outstanding,
            slots=5,
            claims_after_new=True,
        ),
    )
}  # fmt: skip


class Fleet:
    """The workers of one kind on a broker of their own. `with Fleet(KINDS["rq"], url, "20/s"):`"""

    def __init__(
        self, kind: Kind, url: str, limit: str, *, store_url: str | None = None, log: Path
    ) -> None:
        self.kind = kind
        self.client: Any = redis.Redis.from_url(url)
        self._log = log
        self._environment = {
            **os.environ,
            "DISTWINDOW_WORKERS_URL": url,
            "DISTWINDOW_WORKERS_STORE_URL": store_url or url,
            "DISTWINDOW_WORKERS_LIMIT": limit,
            "RQ_REDIS_URL": url,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            self._signal(worker, signal.SIGKILL)
            worker.wait()
        self.client.close()

    def enqueue(self, count: int, first: int = 0, name: str = "job") -> None:
        """Enqueue `count` jobs, numbered from `first`: limited ones, or with "free" those without
        limits.
        """
        module = f"tests.contrib.{self.kind.name}_app"
        subprocess.run(
            [sys.executable, "-m", module, name, str(first), str(first + count)],
            cwd=ROOT, env=self._environment, check=True, timeout=60,
        )  # fmt: skip

    def start_worker(self) -> int:
        """Start a worker, in a process group of its own; return its number."""
        program, *arguments = self.kind.command
        with self._log.open("ab") as log:
            worker = subprocess.Popen(
                [str(PROGRAMS / program), *arguments],
                cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._workers.append(worker)
        return len(self._workers) - 1

    def kill_worker(self, number: int) -> None:
        """Kill a worker and all processes of its group; what would expire then does so at once."""
        self._signal(self._workers[number], signal.SIGKILL)
        self._workers[number].wait()
        if self.kind.expires:
            self.client.delete(self.kind.expires)

    def stop_worker(self, number: int) -> None:
        """Ask a worker to end, and wait until it has."""
        os.kill(self._workers[number].pid, signal.SIGTERM)
        self._workers[number].wait(timeout=30)

    def finish(self, count: int, timeout: float = 60.0) -> None:
        """Wait until the jobs 0 to `count` - 1 have started, and the broker has nothing left."""
        jobs = set(range(count))
        try:
            until(lambda: jobs <= set(self.starts()), timeout, what=f"{count} jobs")
            until(lambda: self.kind.outstanding(self.client) == 0, timeout, what="an empty broker")
        except TimeoutError as exc:
            log = self._log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{exc}: {len(set(self.starts()))} started\n{log}") from exc

    def finish_after_kill(self, count: int, timeout: float = 60.0) -> int:
        """Do as `finish`, except for what the library promises nothing about (`in_limbo`). Return
        how many these are: what is seen twice, half a second apart, is not in hand.
        """
        seen = [-1]

        def is_settled() -> bool:
            limbo = self.kind.in_limbo(self.client)
            started = len(set(range(count)) & set(self.starts()))
            settled = started + limbo >= count and self.kind.outstanding(self.client) <= limbo
            seen.append(limbo if settled else -1)
            return seen[-1] >= 0 and seen[-1] == seen[-2]

        until(is_settled, timeout, what=f"{count} jobs after a kill", every=0.5)
        return seen[-1]

    def starts(self) -> Sequence[int]:
        """The numbers of the jobs, in the order in which they started."""
        return [int(number) for number in self.client.lrange("recorded:starts", 0, -1)]

    def admitted_ms(self) -> list[int]:
        """When the limiter admitted jobs, by its own clock."""
        return sorted(int(ms) for ms in self.client.lrange("recorded:admitted", 0, -1))

    def requeues(self) -> int:
        """How often a job was sent back: each takes one turn."""
        return int(self.client.get("recorded:turns") or 0)

    def refused(self) -> int:
        """How often the limiter was asked in vain."""
        return int(self.client.get("recorded:refused") or 0)

    @staticmethod
    def _signal(worker: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group has ended
            os.killpg(worker.pid, number)
