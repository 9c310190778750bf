"""Messages of taskiq: their labels, and how one is sent back. `taskiq.py` has the middleware."""

from __future__ import annotations

import asyncio
import logging

from taskiq import AsyncBroker, BrokerMessage, TaskiqMessage
from taskiq.labels import prepare_label

from .task_gate import broker_failed
from .task_options import TASK_OPTIONS

_log = logging.getLogger("distwindow")


def remove_limit_labels(broker: AsyncBroker, message: TaskiqMessage) -> None:
    """Leave the labels of limits out of `message`: the worker reads those of the task. Log a
    warning for those that were set for this call only.
    """
    task = broker.find_task(message.task_name)
    declared = {} if task is None else task.labels
    for option in TASK_OPTIONS:
        label, expected = message.labels.pop(option, None), declared.get(option)
        # A function has another text in each process, and a message may come from a schedule.
        if label is None or task is None or callable(expected):
            continue
        if label != prepare_label(expected)[0]:
            _log.warning(
                "%s=%s of one call of task %r changes no limit; limits are those of the task",
                option, label, message.task_name,
            )  # fmt: skip


async def send_back(broker: AsyncBroker, parsed: TaskiqMessage, data: bytes) -> None:
    """Send the same message to the end of its queue. Goes on until the broker takes it, because
    some brokers have no other copy.
    """
    message = BrokerMessage(
        task_id=parsed.task_id, task_name=parsed.task_name, message=data, labels=parsed.labels
    )
    while True:
        try:
            return await broker.kick(message)
        except Exception as exc:
            await asyncio.sleep(broker_failed(f"task {parsed.task_id}", exc))
