"""`celery inspect limits`, `celery control limit TASK LIMITS` and `celery control discard TASK`."""

from __future__ import annotations

import itertools
import time
from typing import Any

from celery.worker import state as worker_state
from celery.worker.control import control_command, inspect_command
from celery.worker.request import Request

from ...core.errors import ConfigurationError, short_repr
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
    name="limit",
    args=[("task", str), ("limits", str)],
    signature="<task> <limits | none | default>",
    help="Set the limits of a task, for all workers and for those that start later.",
)
def set_limit(state: Any, task: Any = None, limits: Any = None, **_: Any) -> dict[str, str]:
    """Set the limits of a task: text, or a list of texts. Each worker stores them, and all store
    the same.
    """
    worker = state.consumer.controller
    if not hasattr(worker, "distwindow_operator_limits"):
        return {"error": _NO_GATE}
    if wrong := _wrong_name(worker, task):
        return {"error": wrong}
    text = "; ".join(limits) if _is_list_of_texts(limits) else limits
    if not isinstance(text, str):
        return {
            "error": f"the limits are {_shown(limits)}; write text such as '5/second; 1000/hour', "
            "a list of such texts, 'none' for no limit, or 'default' for the configured ones"
        }
    try:
        worker.distwindow_operator_limits.set(task, text)
    except ConfigurationError as exc:
        return {"error": str(exc)}
    except Exception as exc:
        return {"error": f"the limits could not be stored: {type(exc).__name__}: {exc}"}
    return {"ok": f"the limits of {task} are now {text}"}


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
    in_lines = {
        entry.item.id
        for line in worker.distwindow_gate.lines
        if line.task == task
        for entry in list(line.entries)
        if not entry.left
    }
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


def _wrong_name(worker: Any, task: object) -> str | None:
    """Return what is wrong with the name of a task; None if the worker has such a task."""
    if not isinstance(task, str):
        return f"the task is {_shown(task)}; give its name"
    if task not in worker.app.tasks:
        return f"the task {short_repr(task)} is not registered in this worker"
    return None


def _is_list_of_texts(limits: object) -> bool:
    return isinstance(limits, (list, tuple)) and all(isinstance(limit, str) for limit in limits)


def _shown(value: object) -> str:
    return "None" if value is None else f"{short_repr(value)}, of type {type(value).__name__}"
