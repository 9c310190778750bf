"""Keeps tasks that wait for their limits from growing the pool of `celery worker --autoscale`.

Celery's autoscaler wants a process for each task that the worker has received and that has not
ended. A task that waits for its limit needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leave_out_of_autoscaling(worker: Any, waiting: Callable[[], int]) -> None:
    """Have the worker's autoscaler, if it has one, leave out as many tasks as `waiting` returns."""
    autoscaler = getattr(worker, "autoscaler", None)
    its_class: Any = type(autoscaler)
    if not isinstance(getattr(its_class, "qty", None), property):
        return  # none, or one of the user's own (`worker_autoscaler`), which counts otherwise

    class LimitedAutoscaler(its_class):  # type: ignore[misc]  # a base known only at run time
        @property
        def qty(self) -> int:
            return max(0, int(super().qty) - waiting())

    autoscaler.__class__ = LimitedAutoscaler
