"""The limits that hold in this worker now: those of the configuration, or an operator's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.errors import ConfigurationError
from ...core.limit import Limit
from .logger import logger
from .task_limits import LimitTable, TaskLimits, parse_operator_limits


class EffectiveLimits:
    """Looks up what limits a task. A look-up of a known task costs two dictionary look-ups.

    `max_hold_s` is how long a message may be kept before it is sent back.
    """

    def __init__(self, table: LimitTable, max_hold_s: float = math.inf) -> None:
        self._table = table
        self._longest_pace_s = max_hold_s / 2
        self._configured: dict[str, TaskLimits] = {}
        self._effective: dict[str, TaskLimits] = {}
        self._operator: dict[str, tuple[Limit, ...]] = {}

    def check(self, tasks: Mapping[str, Any]) -> None:
        """Look at all registered tasks. Raises `ConfigurationError` for the first that is wrong."""
        self._table.check_names(tasks)
        for name, task in list(tasks.items()):
            self._configured[name] = self._of(task)
        self._merge()

    def check_pace(self, task: str, limits: Iterable[Limit]) -> None:
        """Raise `ConfigurationError` for a limit that has admitted tasks wait so long that the
        broker may give their messages to another worker: their permits are counted, so they cannot
        be sent back.
        """
        for limit in limits:
            wait_s = (limit.max_wait_ms or 0) / 1000
            if wait_s > self._longest_pace_s:
                raise ConfigurationError(
                    f"task {task!r}: the limit '{limit}' has tasks wait {wait_s:g} s for their "
                    f"moment, which may be {self._longest_pace_s:g} s at most: the broker gives "
                    "a message that is kept longer to another worker, too; pace over a shorter "
                    "time, or raise the broker's visibility_timeout or distwindow_max_hold"
                )

    def of(self, task: Any) -> TaskLimits:
        """Return what limits `task`.

        A task that was registered after the worker had started is looked at here. If its options
        cannot work, an error is logged, once, and it runs without a limit: nobody is left to start
        the worker differently, and a task that is held forever would be lost.
        """
        found = self._effective.get(task.name)
        return self._add_late(task) if found is None else found

    def set_operator_limits(self, stored: Mapping[str, str]) -> list[str]:
        """Take over what operators have set, as text by task. Return the tasks whose limits have
        changed by it. What is no limit is logged, and leaves its task as it is configured.
        """
        parsed = {}
        for task, text in stored.items():
            try:
                limits = parse_operator_limits(text)
                self.check_pace(task, limits)
                parsed[task] = limits
            except ConfigurationError as exc:
                logger.error("the stored limits of task %r are ignored: %s", task, exc)
        changed = [
            task
            for task in {*parsed, *self._operator}
            if parsed.get(task) != self._operator.get(task)
        ]
        self._operator = parsed
        self._merge()
        return changed

    def limited(self) -> Iterable[TaskLimits]:
        """Return the tasks that have limits."""
        return [found for found in self._effective.values() if found.limits]

    def _merge(self) -> None:
        self._effective = {
            name: self._with_operator_limits(found) for name, found in self._configured.items()
        }

    def _with_operator_limits(self, found: TaskLimits) -> TaskLimits:
        limits = self._operator.get(found.task)
        return found if limits is None else found.with_limits(limits, "celery control limit")

    def _of(self, task: Any) -> TaskLimits:
        found = self._table.of(task)
        self.check_pace(found.task, found.limits)
        return found

    def _add_late(self, task: Any) -> TaskLimits:
        try:
            found = self._of(task)
        except ConfigurationError as exc:
            logger.error("task %r came late, and runs without a limit: %s", task.name, exc)
            found = self._table.unlimited(task)
        self._configured[task.name] = found
        self._effective[task.name] = found = self._with_operator_limits(found)
        return found
