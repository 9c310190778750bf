"""Limits of taskiq's tasks, for the whole fleet.

    broker = RedisStreamBroker("redis://...").with_middlewares(RateLimits("redis://..."))

    @broker.task(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
    async def fetch(tenant, url): ...

    taskiq worker --receiver distwindow.contrib.taskiq:LimitedReceiver proj:broker

A task waits in its worker until it is admitted, and its message stays unacknowledged. One that
would wait longer than the broker leaves a message to a worker is sent to the queue's end instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .. import ConfigurationError
from ..observer import Observer
from ..ring.key import AnyKey
from ..runtime.options import ClockChoice
from . import needs
from .tasks import (
    HOLD_S,
    TASK_OPTIONS,
    AsyncTaskGate,
    TaskLimits,
    WhileStoreIsAway,
    broker_failed,
    check_not_short,
    read_options,
)

with needs("taskiq"):
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage, TaskiqMessage, TaskiqMiddleware
    from taskiq.labels import prepare_label
    from taskiq.receiver import Receiver
    from taskiq.utils import maybe_awaitable
    from taskiq_dependencies import DependencyGraph

_log = logging.getLogger("distwindow")


async def send_back(broker: AsyncBroker, parsed: TaskiqMessage, data: bytes) -> None:
    """Send the message to its queue's end, until the broker takes it: it may be the only copy."""
    message = BrokerMessage(
        task_id=parsed.task_id, task_name=parsed.task_name, message=data, labels=parsed.labels
    )
    while True:
        try:
            return await broker.kick(message)
        except Exception as exc:
            await asyncio.sleep(broker_failed(f"task {parsed.task_id}", exc))


FOREVER_S = 10.0 * 365 * 86_400
"""Longer than anyone waits."""
_admitted: ContextVar[str] = ContextVar("distwindow_admitted", default="")
"""The id of the task that `LimitedReceiver` admitted in this context. A context is inherited by all
that the task starts, so this is no flag.
"""


class RateLimits(TaskiqMiddleware):
    """Middleware for a taskiq broker. `store` is a URL or an asyncio client, as for `AsyncLimiter`.

    Labels of a task: `limits`, `limit_key` (a template over the names of its arguments, or a
    function of them; by default the task's name), and `limit_cost`. `max_hold` (seconds) is how
    long `LimitedReceiver` keeps a message; by default a tenth of the broker's `idle_timeout`, after
    which other workers claim it, so that nine tenths are left to run the task; and for ever if it
    has none. `on_store_error` says what happens to
    tasks while the limiter's store fails: with "hold" they wait, with "run" they run without being
    counted. `timeout` (seconds) bounds one exchange with the store, and `clock` is as for
    `AsyncLimiter`.

    Raises `ConfigurationError` for a store that can never work, and at the start for wrong labels.
    """

    def __init__(
        self,
        store: Any,
        *,
        prefix: str = "distwindow",
        on_store_error: WhileStoreIsAway = "hold",
        timeout: float = 0.5,
        clock: ClockChoice = "server",
        max_hold: float | None = None,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        super().__init__()
        self._gate = AsyncTaskGate(
            store, prefix, on_store_error, timeout, clock, observer=observer, key_label=key_label
        )
        self._max_hold = max_hold
        self._tasks: dict[str, TaskLimits | None] = {}

    def startup(self) -> None:
        """Check the labels of all tasks."""
        for name in self.broker.get_all_tasks():
            self._limits_of(name)

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        """Leave the labels of limits out of a message, as its worker reads those of the task; warn
        of those of a call.
        """
        task = self.broker.find_task(message.task_name)
        for option in TASK_OPTIONS:
            label = message.labels.pop(option, None)
            if label is None or task is None:
                continue
            expected = task.labels.get(option)
            # A function has another text in each process, and a message may come from a schedule.
            if not callable(expected) and label != prepare_label(expected)[0]:
                _log.warning(
                    "%s=%s of one call of task %r changes no limit; limits are those of the task",
                    option, label, message.task_name,
                )  # fmt: skip
        return message

    async def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Wait until the task may start, where `LimitedReceiver` has not done that."""
        if _admitted.get() != message.task_id:
            while await self.wait(message, FOREVER_S):
                pass
        return message

    async def wait(self, message: TaskiqMessage, max_hold: float | None = None) -> float:
        """Wait until the task may start, and return 0.0; or its delay, above `max_hold` seconds."""
        hold = self._hold_s() if max_hold is None else max_hold
        try:
            task = self._limits_of(message.task_name)
        except ConfigurationError as exc:  # the task was declared after the start
            _log.error("%s; its calls are held until a worker has the right labels", exc)
            await asyncio.sleep(min(hold, HOLD_S))
            return HOLD_S
        if task is None:
            return 0.0
        return await self._gate.hold(task, message.args, message.kwargs, hold)

    def _hold_s(self) -> float:
        if self._max_hold is not None:
            return self._max_hold
        idle_ms = getattr(self.broker, "idle_timeout", None)
        return FOREVER_S if idle_ms is None else idle_ms / 10_000

    def _limits_of(self, name: str) -> TaskLimits | None:
        """Return the limits of a task; None if it has none, or if this worker does not know it."""
        if name not in self._tasks:
            task = self.broker.find_task(name)
            if task is None:
                return None
            self._tasks[name] = self._gate.add(_read_labels(task))
        return self._tasks[name]


def _read_labels(task: Any) -> TaskLimits | None:
    function, injected = task.original_func, set()
    if "limits" in task.labels:  # a key is never made of what taskiq fills itself
        for found in DependencyGraph(function).ordered_deps:
            if found.parent is not None and found.parent.dependency is function:
                injected.add(found.param_name)
    limits = read_options(task.task_name, function, task.labels, injected=injected)
    check_not_short(task.task_name, task.labels, with_functions=True)
    return limits


class LimitedReceiver(Receiver):
    """taskiq's receiver for brokers with `RateLimits`."""

    _finish: asyncio.Event | None = None
    """Set when the worker is to end; None before it listens."""

    async def listen(self, finish_event: asyncio.Event) -> None:
        """Run tasks until `finish_event`; then send those back that wait for their limit."""
        self._finish = finish_event
        await super().listen(finish_event)

    async def callback(self, message: bytes | AckableMessage, raise_err: bool = False) -> None:
        """Wait until the task of `message` may start, and run it; or send the message back."""
        data = message.data if isinstance(message, AckableMessage) else message
        rate_limits = next((m for m in self.broker.middlewares if isinstance(m, RateLimits)), None)
        if rate_limits is None:
            raise ConfigurationError(
                "LimitedReceiver needs the middleware RateLimits; write "
                "broker.with_middlewares(RateLimits(store))"
            )
        try:
            parsed = self.broker.formatter.loads(message=data)
        except Exception:
            parsed = None  # taskiq logs that, and skips the message
        if parsed is not None and not await self._may_start(rate_limits, parsed):
            await send_back(self.broker, parsed, data)
            if isinstance(message, AckableMessage):
                await maybe_awaitable(message.ack())
            return
        _admitted.set("" if parsed is None else parsed.task_id)
        await super().callback(message, raise_err)

    async def _may_start(self, rate_limits: RateLimits, message: TaskiqMessage) -> bool:
        """Wait until a task may start; at most until its message is too old, or the worker ends."""
        if self._finish is None:
            return not await rate_limits.wait(message)
        waiting = asyncio.ensure_future(rate_limits.wait(message))
        finishing = asyncio.ensure_future(self._finish.wait())
        try:
            await asyncio.wait({waiting, finishing}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
            return not waiting.cancelled() and not waiting.result()
        finally:
            waiting.cancel()
            finishing.cancel()
