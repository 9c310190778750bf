"""`RateLimits`: limits for the tasks of a Celery application."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import celery
from celery.app.control import Control as CeleryControl
from celery.app.control import Inspect as CeleryInspect
from celery.worker import state as worker_state
from celery.worker.control import control_command, inspect_command
from celery.worker.request import Request

from ...errors import ConfigurationError, short_repr
from ...lifecycle.connect import store_name
from ...observer import Observer
from ...ring.key import AnyKey
from ...runtime.options import ClockChoice
from ..tasks import WhileStoreIsAway
from .limits import LimitTable
from .settings import (
    Settings,
    check_celery_version,
    check_conf_keys,
    make_settings,
    max_hold_s,
)
from .worker import is_revoked
from .worker_steps import ConsumerStep, GateStep

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
            found.name: {
                "limits": [shown for part in found.parts for shown in part.shown()],
                "set by": found.source,
            }
            for found in gate.limits.limited()
        },
        "lines": [
            {
                "task": line.task,
                "key": line.shown_key,
                "waits for": line.shown_limit,
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
    if not isinstance(task, str):
        return {"error": f"the task is {short_repr(task)}; give its name"}
    if task not in worker.app.tasks:
        return {"error": f"the task {short_repr(task)} is not registered in this worker"}
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


class RateLimits:
    """Limits tasks of a Celery application, for all its workers together.

        app = Celery("proj", broker="redis://localhost:6379/1")
        limits = RateLimits(app, "redis://localhost:6379/0")

        @app.task(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
        def fetch(tenant, url): ...

    A task that its limits refuse waits, unacknowledged, in the parent of the worker that received
    it, and starts when they admit it. It takes no slot of the pool and no retry, and other tasks
    pass it.

    `store` is a URL or a redis-py client, as for `Limiter`; None means `app.conf.distwindow_url`.
    The other arguments replace settings of the configuration, `distwindow_<name>`:

    `prefix`: the beginning of the names of all keys ("distwindow").
    `on_store_error`: "hold" (limited tasks wait until the store answers; the default) or "run".
    `max_parked`: how many waiting tasks a worker fetches beyond its prefetch count (1000). Beyond
    that, further messages stay in the broker.
    `max_hold`: how long, in seconds, a worker keeps a message before it sends it back to its queue;
    by default half of the broker's visibility timeout.
    `timeout`: the deadline of one call to the store, in seconds (0.25).
    `clock`: "server" (the default) or "client", as for `Limiter`.
    `observer`, `key_label`: who is told which tasks start and which wait, by their names, and a
    function of their limit keys, as for `Limiter`.

    Nothing is connected to, and no task is looked at, before a worker starts. There, whatever
    cannot work raises `ConfigurationError`, which ends `celery worker` with one sentence. One
    application has one `RateLimits`; a second one raises `ConfigurationError` at once.
    """

    def __init__(
        self,
        app: Any,
        store: Any = None,
        *,
        prefix: str | None = None,
        on_store_error: WhileStoreIsAway | None = None,
        max_parked: int | None = None,
        max_hold: float | None = None,
        timeout: float | None = None,
        clock: ClockChoice | None = None,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        check_celery_version(tuple(celery.VERSION))
        if not isinstance(app, celery.Celery) and not hasattr(app, "steps"):
            raise ConfigurationError(f"{type(app).__name__} is no Celery application")
        if getattr(app, "distwindow_rate_limits", None) is not None:
            raise ConfigurationError("this Celery application has its RateLimits already")
        self.app = app
        self._store = store
        self._given = {
            "prefix": prefix, "on_store_error": on_store_error, "max_parked": max_parked,
            "max_hold": max_hold, "timeout": timeout, "clock": clock,
            "observer": observer, "key_label": key_label,
        }  # fmt: skip
        app.distwindow_rate_limits = self
        if app.control_cls == celery.Celery.control_cls:  # an application may have one of its own
            app.control_cls = Control
            vars(app).pop("control", None)
        app.steps["worker"].add(GateStep)
        app.steps["consumer"].add(ConsumerStep)

    def __repr__(self) -> str:
        store = self._store if self._store is not None else self.app.conf.get("distwindow_url")
        shown = "no store yet" if store is None else store_name(store)
        return f"RateLimits({self.app.main!r}, {shown!r})"

    @property
    def store(self) -> Any:
        """The store's URL or client. Raises `ConfigurationError` if none was given."""
        store = self._store if self._store is not None else self.app.conf.get("distwindow_url")
        if store is None:
            raise ConfigurationError(
                "the rate limits have no store: give RateLimits a URL, or set distwindow_url"
            )
        return store

    def check(self) -> None:
        """Check the settings, the store, and the limits of all tasks that have been imported, as a
        worker does when it starts. Raises `ConfigurationError`. Nothing is connected to, so a store
        that does not answer is no error. A test of an application may call this.
        """
        settings = self.settings()
        self.table().check(self.app.tasks)
        settings.limiters(self.store).close()

    def settings(self) -> Settings:
        """Return the settings, checked. Raises `ConfigurationError`."""
        given = {"url": self._store, **self._given}
        check_conf_keys(self.app.conf, [name for name in given if given[name] is not None])
        return make_settings(self.app.conf, self._given)

    def table(self) -> LimitTable:
        """Return what limits which task, as configured; it is still to be given the tasks. Raises
        `ConfigurationError`.
        """
        configured, max_hold_s = self.app.conf.get("distwindow_limits"), self.max_hold_s()
        return LimitTable(configured, self.app.annotations, max_hold_s)

    def max_hold_s(self) -> float:
        """Return how long a worker keeps a message, in seconds. Nothing is connected to."""
        driver = self.app.connection_for_read().get_transport_cls().driver_type
        return max_hold_s(self.settings(), driver, self.app.conf.broker_transport_options or {})
