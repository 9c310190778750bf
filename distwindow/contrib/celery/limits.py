"""What limits a Celery task: its own options, or the configuration.

    the task's name in `distwindow_limits`            first
    `limits=` of the task, or its annotation
    a pattern in `distwindow_limits` that fits it     last; of several, the first

`limit_key` and `limit_cost` are the task's own, or those of the same entry of `distwindow_limits`.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from celery import Task

from ...errors import ConfigurationError
from ..shared_windows import SharedWindows
from ..tasks import (
    TASK_OPTIONS,
    TaskArguments,
    TaskCharges,
    check_has_limits,
    check_not_for_the_task,
    check_not_short,
    check_option_names,
    parse_limits_of,
)
from .worker import logger

_OF_CELERY = frozenset(dir(Task))
_PATTERN = re.compile(r"[*?\[]")
_MOST_NAMES = 20


class LimitTable:
    """The limits of all tasks of an application. A look-up of a known task costs a dictionary
    look-up. `annotations` are those that Celery has prepared: dicts by task name, or objects with
    the methods `annotate` and `annotate_any`. `max_hold_s` is how long a message may be kept.
    """

    def __init__(
        self,
        configured: Mapping[str, Any] | None,
        annotations: Iterable[Any] = (),
        max_hold_s: float = math.inf,
    ) -> None:
        self._annotations = tuple(annotations)
        self._shared_windows = SharedWindows(logger)
        self._configured = {} if configured is None else _checked_table(configured)
        self._longest_pace_s = max_hold_s / 2
        self._known: dict[str, TaskCharges] = {}

    def check(self, tasks: Mapping[str, Any]) -> None:
        """Look at all registered tasks. Raises `ConfigurationError` for the first that is wrong."""
        self._check_names(tasks)
        for name, task in list(tasks.items()):
            self._known[name] = self.read(task)

    def of(self, task: Any) -> TaskCharges:
        """Return what limits `task`.

        A task that was registered after the worker had started is looked at here. If its options
        cannot work, an error is logged, once, and it runs without a limit: nobody is left to start
        the worker differently, and a task that is held forever would be lost.
        """
        found = self._known.get(task.name)
        if found is None:
            try:
                found = self.read(task)
            except ConfigurationError as exc:
                logger.error("task %r came late, and runs without a limit: %s", task.name, exc)
                found = TaskCharges(TaskArguments(str(task.name), task.run), (), None, 1, logger)
            self._known[task.name] = found
        return found

    def limited(self) -> Iterable[TaskCharges]:
        return [found for found in self._known.values() if found.parts]

    def read(self, task: Any) -> TaskCharges:
        """Return what limits this task, by its options. Raises `ConfigurationError` for those that
        cannot work, which names the task, and for a limit that has admitted tasks wait so long that
        the broker may give their messages to another worker: their permits are counted, so they
        cannot be sent back.
        """
        name = str(task.name)
        arguments = TaskArguments(name, task.run)
        named = [_call(item, "annotate", task) for item in self._annotations]
        for_all = [_call(item, "annotate_any") for item in self._annotations]
        options = {option: _option(task, option) for option in TASK_OPTIONS}
        if _is_celerys(name):
            # They have no options of all tasks ("*"), which Celery lets win over those of one.
            for option, value in options.items():
                own = None if any(found.get(option) is value for found in for_all) else value
                options[option] = next((found[option] for found in named if option in found), own)
        limits = options["limits"]
        annotations = [found.get("limits") for found in (*named, *for_all)]
        annotated = limits is not None and any(each is limits for each in annotations)
        source = "task_annotations" if annotated else "the task's options"
        pattern = self._entry_for(name, has_own=limits is not None)
        if pattern is not None:
            options = {**options, **_options_of(pattern, self._configured[pattern])}
            source = f"distwindow_limits[{pattern!r}]"
        if not _is_celerys(name):
            check_option_names(name, _others(task))
            # Base classes may have attributes of such names for their own use.
            check_not_for_the_task(f"task {name!r}", vars(type(task)))
        if pattern is None:
            check_has_limits(name, options, "give it limits=, or an entry in distwindow_limits")
        limits, key, cost = (options[option] for option in TASK_OPTIONS)
        parts = () if limits is None else parse_limits_of(f"task {name!r}: {source}", limits)
        if pattern is None and not _is_celerys(name):
            own = vars(type(task))
            # A task that is a class may have methods of such names.
            check_not_short(name, {**own, **options}, with_functions="_decorated" in own)
        found = TaskCharges(arguments, parts, key, 1 if cost is None else cost, logger)
        found.source = source
        found.add_windows(self._shared_windows)
        for limit in found.limits:
            wait_s = (limit.max_wait_ms or 0) / 1000
            if wait_s > self._longest_pace_s:
                raise ConfigurationError(
                    f"task {found.name!r}: the limit '{limit}' has tasks wait {wait_s:g} s for "
                    f"their moment, which may be {self._longest_pace_s:g} s at most: the broker "
                    "gives a message that is kept longer to another worker, too; pace over a "
                    "shorter time, or raise the broker's visibility_timeout or distwindow_max_hold"
                )
        return found

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise `ConfigurationError` for an entry that names a task which does not exist, and for
        an annotation with limits of such a task. A pattern that fits no task is logged.
        """
        registered = list(names)
        for item in self._annotations:
            for name, options in item.items() if isinstance(item, dict) else ():
                limits = isinstance(options, dict) and not options.keys().isdisjoint(TASK_OPTIONS)
                if limits and name != "*" and name not in registered:
                    raise ConfigurationError(
                        f"task_annotations limits the task {name!r}, which is not registered in "
                        f"this worker, whose tasks are {listed(registered)} (Celery knows no "
                        "patterns there; write them in distwindow_limits)"
                    )
        for name in self._configured:
            if name in registered:
                continue
            if not _PATTERN.search(name):
                raise ConfigurationError(
                    f"distwindow_limits names the task {name!r}, which is not registered in this "
                    f"worker, whose tasks are {listed(registered)} (a pattern, such as 'proj.*', "
                    "may fit nothing)"
                )
            if not any(_fits(name, task) for task in registered):
                logger.warning(
                    "the pattern %r in distwindow_limits fits no task of this worker and limits "
                    "nothing; correct it, unless other workers have such tasks",
                    name,
                )

    def _entry_for(self, name: str, *, has_own: bool) -> str | None:
        if name in self._configured:
            return name
        if has_own:
            return None
        return next((pattern for pattern in self._configured if _fits(pattern, name)), None)


def listed(registered: Collection[str]) -> str:
    """Return the names of the application's tasks, or the first of many."""
    names = sorted(name for name in registered if not name.startswith("celery."))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "Celery's own") + more


def _call(annotation: Any, method: str, *arguments: Any) -> dict[str, Any]:
    found = getattr(annotation, method, None)
    return (found(*arguments) if found is not None else None) or {}


def _checked_table(configured: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(configured, Mapping) or not all(isinstance(name, str) for name in configured):
        raise ConfigurationError(
            "distwindow_limits is a dict of task names or patterns and their limits, such as "
            '{"proj.mail.*": "100/m"}'
        )
    for name, spec in configured.items():
        options = _options_of(name, spec)
        if options["limits"] is not None:
            parse_limits_of(f"distwindow_limits[{name!r}]", options["limits"])
    return dict(configured)


def _options_of(name: str, spec: Any) -> dict[str, Any]:
    """Return what an entry of `distwindow_limits` sets: limits, or a dict of options."""
    if not isinstance(spec, Mapping):
        return {"limits": spec}
    check_not_for_the_task(f"distwindow_limits[{name!r}]", spec)
    unknown = sorted(set(map(str, spec)) - set(TASK_OPTIONS))
    if unknown or "limits" not in spec:
        what = f"has the unknown option {unknown[0]!r}" if unknown else "has no limits"
        raise ConfigurationError(
            f"distwindow_limits[{name!r}] {what}; its options are {', '.join(TASK_OPTIONS)}"
        )
    return dict(spec)


def _option(task: Any, option: str) -> Any:
    """Return an option of a task as it was given. Celery makes options attributes of the task's
    class, where a function would become a method.
    """
    value = inspect.getattr_static(task, option, None)
    if isinstance(value, staticmethod):
        return value.__func__
    return value if inspect.isfunction(value) else getattr(task, option, None)


def _is_celerys(name: str) -> bool:
    """True for Celery's own tasks, such as celery.chord_unlock: they are not the application's."""
    return name.startswith("celery.")


def _fits(pattern: str, name: str) -> bool:
    """Return whether a pattern limits a task: one of Celery's own only if it names these."""
    if _is_celerys(name) and not pattern.startswith("celery."):
        return False
    return bool(_PATTERN.search(pattern)) and fnmatch.fnmatchcase(name, pattern)


def _others(task: Any) -> dict[str, Any]:
    """Return the options of a task that Celery does not know, those of abstract base classes
    included: Celery accepts any.
    """
    others: dict[str, Any] = {}
    for owner in reversed(type(task).__mro__):
        if owner is not object and not issubclass(Task, owner):
            others |= vars(owner)
    # The values are read without a look-up on the task, which would run its properties.
    return {
        name: value.__func__ if isinstance(value, staticmethod) else value
        for name, value in others.items()
        if not name.startswith("_") and name not in _OF_CELERY
    }
