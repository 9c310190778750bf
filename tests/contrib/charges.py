"""What a call of a task with one key is charged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distwindow.contrib.tasks import TaskCharges
from distwindow.ring.key import AnyKey


def key_and_cost(
    task: TaskCharges, args: Sequence[Any], kwargs: Mapping[str, Any], call: object = None
) -> tuple[AnyKey, int]:
    ((key, limits, cost),) = task.items(args, kwargs, call)
    assert limits == task.limits
    return key, cost
