"""What `task_annotations` of Celery says about limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ...core.errors import ConfigurationError
from ..task_options import TASK_OPTIONS

_MOST_NAMES = 20


class Annotations:
    """The annotations of an application, as `app.annotations` prepares them: dicts by task name, or
    objects with the methods `annotate` and `annotate_any`.
    """

    def __init__(self, prepared: Iterable[Any] = ()) -> None:
        self._prepared = tuple(prepared)

    def without_those_for_all(self, task: Any, option: str, value: object) -> object:
        """Return an option of a task whose value is `value`, as if no annotation were for all tasks
        (`"*"`): Celery lets that one win over the annotation that names the task.
        """
        for item in self._prepared:
            named = _call(item, "annotate", task)
            if option in named:
                return named[option]
        for_all = any(_call(item, "annotate_any").get(option) is value for item in self._prepared)
        return None if for_all else value

    def check_names(self, registered: Collection[str]) -> None:
        """Raise `ConfigurationError` for limits of a task that does not exist."""
        for item in self._prepared:
            if not isinstance(item, dict):
                continue
            for name, options in item.items():
                if name == "*" or name in registered or not isinstance(options, dict):
                    continue
                if not options.keys().isdisjoint(TASK_OPTIONS):
                    raise ConfigurationError(
                        f"task_annotations limits the task {name!r}, which is not registered in "
                        f"this worker, whose tasks are {listed(registered)} (Celery knows no "
                        "patterns there; write them in distwindow_limits)"
                    )


def listed(registered: Collection[str]) -> str:
    """Return the names of the application's tasks, or the first of many."""
    names = sorted(name for name in registered if not name.startswith("celery."))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "Celery's own") + more


def _call(annotation: Any, method: str, *arguments: Any) -> dict[str, Any]:
    found = getattr(annotation, method, None)
    return (found(*arguments) if found is not None else None) or {}
