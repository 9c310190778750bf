"""The limits that hold in this worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.errors import ConfigurationError
from .logger import logger
from .task_limits import LimitTable, TaskLimits


class EffectiveLimits:
    """Looks up what limits a task. A look-up of a known task costs a dictionary look-up.

    `max_hold_s` is how long a message may be kept before it is sent back.
    """

    def __init__(self, table: LimitTable, max_hold_s: float = math.inf) -> None:
        self._table = table
        self._longest_pace_s = max_hold_s / 2
        self._effective: dict[str, TaskLimits] = {}

    def check(self, tasks: Mapping[str, Any]) -> None:
        """Look at all registered tasks. Raises `ConfigurationError` for the first that is wrong."""
        self._table.check_names(tasks)
        for name, task in list(tasks.items()):
            self._effective[name] = self._of(task)

    def of(self, task: Any) -> TaskLimits:
        """Return what limits `task`.

        A task that was registered after the worker had started is looked at here. If its options
        cannot work, an error is logged, once, and it runs without a limit: nobody is left to start
        the worker differently, and a task that is held forever would be lost.
        """
        found = self._effective.get(task.name)
        return self._add_late(task) if found is None else found

    def limited(self) -> Iterable[TaskLimits]:
        """Return the tasks that have limits."""
        return [found for found in self._effective.values() if found.limits]

    def _of(self, task: Any) -> TaskLimits:
        """Return what limits `task`. Raises `ConfigurationError` for options that cannot work, and
        for a limit that has admitted tasks wait so long that the broker may give their messages to
        another worker: their permits are counted, so they cannot be sent back.
        """
        found = self._table.of(task)
        for limit in found.limits:
            wait_s = (limit.max_wait_ms or 0) / 1000
            if wait_s > self._longest_pace_s:
                raise ConfigurationError(
                    f"task {found.task!r}: the limit '{limit}' has tasks wait {wait_s:g} s for "
                    f"their moment, which may be {self._longest_pace_s:g} s at most: the broker "
                    "gives a message that is kept longer to another worker, too; pace over a "
                    "shorter time, or raise the broker's visibility_timeout or distwindow_max_hold"
                )
        return found

    def _add_late(self, task: Any) -> TaskLimits:
        try:
            found = self._of(task)
        except ConfigurationError as exc:
            logger.error("task %r came late, and runs without a limit: %s", task.name, exc)
            found = self._table.unlimited(task)
        self._effective[task.name] = found
        return found
