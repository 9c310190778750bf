"""What operators ask of workers and tell them: on the command line of Celery, and from Python."""

from __future__ import annotations

import itertools
import time
from functools import cached_property
from typing import Any

from celery.app.control import Control as CeleryControl
from celery.app.control import Inspect as CeleryInspect
from celery.worker import state as worker_state
from celery.worker.control import control_command, inspect_command
from celery.worker.request import Request

from ...core.errors import short_repr
from .surroundings import is_revoked

_MOST_LINES = 100
_NO_GATE = "the application of this worker has no RateLimits"


@inspect_command(help="What limits which task, and what waits for it.")  # type: ignore[untyped-decorator]  # Celery has no types
def limits(state: Any, **_: Any) -> dict[str, Any]:
    """Return the limits of this worker's tasks, its lines, and what it has asked."""
    worker = state.consumer.controller
    if not hasattr(worker, "distwindow_gate"):
        return {"error": _NO_GATE}
    gate = worker.distwindow_gate
    now_s = time.monotonic()
    longest = sorted(gate.lines, key=lambda line: line.size, reverse=True)
    return {
        "tasks": {
            found.task: {"limits": [str(limit) for limit in found.limits], "set by": found.source}
            for found in gate.limits.limited()
        },
        "lines": [
            {
                "task": line.task,
                "key": str(line.key),
                "waiting": line.size,
                "started": line.started,
                "since": None if line.began_s is None else round(now_s - line.began_s, 3),
            }
            for line in itertools.islice(longest, _MOST_LINES)
        ],
        "line count": len(gate.lines),
        "parked": gate.parked,
        "started": gate.started,
        "sent back": gate.sent_back,
        "asks": gate.admission.asks,
        "refusals": gate.admission.refusals,
        "store failures": gate.admission.failures,
        "store is up": gate.admission.store_is_up,
    }


@control_command(  # type: ignore[untyped-decorator]  # Celery has no types
    args=[("task", str)],
    signature="<task>",
    help="End the tasks of this name that wait in workers for their limits or their eta.",
)
def discard(state: Any, task: Any = None, **_: Any) -> dict[str, str]:
    """Revoke what this worker has received of a task and has not started: `celery purge` empties
    queues, and does not reach what workers have received.
    """
    worker = state.consumer.controller
    if not hasattr(worker, "distwindow_gate"):
        return {"error": _NO_GATE}
    if wrong := _wrong_name(worker, task):
        return {"error": wrong}
    in_lines = _ids_in_lines(worker.distwindow_gate, task)
    scheduled = {
        argument.id: argument
        for waiting in state.consumer.timer.schedule.queue
        for argument in waiting.entry.args[:1]
        if isinstance(argument, Request) and argument.name == task
    }
    ids = in_lines | scheduled.keys()
    worker_state.revoked.update(ids)
    worker.distwindow_gate.drop_revoked(task)
    for request in scheduled.values():
        is_revoked(request)
    return {"ok": f"{len(ids)} waiting tasks {task} are revoked"}


@control_command(  # type: ignore[untyped-decorator]  # Celery has no types
    args=[("application", str)],
    signature="[application]",
    help="End all tasks that wait in workers for their limits.",
)
def discard_parked(state: Any, application: Any = None, **_: Any) -> dict[str, Any]:
    """Revoke what waits in the lines of this worker, if it is of this application; None: of any."""
    worker = state.consumer.controller
    if not hasattr(worker, "distwindow_gate"):
        return {"error": _NO_GATE}
    gate = worker.distwindow_gate
    ids = _ids_in_lines(gate) if application in (None, worker.app.main) else set()
    worker_state.revoked.update(ids)
    for task in {line.task for line in gate.lines}:
        gate.drop_revoked(task)
    return {"ok": f"{len(ids)} waiting tasks are revoked", "discarded": len(ids)}


class Inspect(CeleryInspect):  # type: ignore[misc]  # Celery has no types
    """`app.control.inspect()` of an application with `RateLimits`."""

    def limits(self) -> Any:
        """Return what `celery inspect limits` shows, by the name of the worker; None if none has
        answered.
        """
        return self._request("limits")


class Control(CeleryControl):  # type: ignore[misc]  # Celery has no types
    """`app.control` of an application with `RateLimits`."""

    @cached_property
    def inspect(self) -> Any:
        return self.app.subclass_with_self(Inspect, reverse="control.inspect")

    def purge(self, connection: Any = None) -> int:
        """Discard the messages in the queues, and then the limited tasks that wait in workers.
        Return how many they were. Waits for a second for the answers of the workers.
        """
        count: int = super().purge(connection)
        replies = self.broadcast(
            "discard_parked",
            {"application": self.app.main},
            reply=True,
            **({} if connection is None else {"connection": connection}),
        )
        answers = [answer for reply in replies or () for answer in reply.values()]
        return count + sum(int(answer.get("discarded", 0)) for answer in answers)

    discard_all = purge


def _ids_in_lines(gate: Any, task: str | None = None) -> set[str]:
    """Return the ids of what waits in the lines of a task; None: of all tasks."""
    return {
        entry.item.id
        for line in gate.lines
        if task in (None, line.task)
        for entry in list(line.entries)
        if not entry.left
    }


def _wrong_name(worker: Any, task: object) -> str | None:
    """Return what is wrong with the name of a task; None if the worker has such a task."""
    if not isinstance(task, str):
        return f"the task is {short_repr(task)}; give its name"
    if task not in worker.app.tasks:
        return f"the task {short_repr(task)} is not registered in this worker"
    return None
