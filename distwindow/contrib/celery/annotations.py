"""What `task_annotations` of Celery says about limits."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

from ...core.errors import ConfigurationError
from ..task_options import TASK_OPTIONS
from ..task_spelling import misspelt


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
                if name != "*" and name not in registered and _has_limits(options):
                    raise ConfigurationError(
                        f"task_annotations limits the task {name!r}, which is not registered in "
                        f"this worker{similar(str(name), registered)} (Celery knows no patterns "
                        "there; write them in distwindow_limits)"
                    )


def similar(name: str, registered: Collection[str]) -> str:
    """Return the end of a sentence about an unknown task: the names that are like it."""
    near = difflib.get_close_matches(name, registered, n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _has_limits(options: Any) -> bool:
    if not isinstance(options, dict):
        return False
    return any(
        name in TASK_OPTIONS or misspelt(str(name), value) for name, value in options.items()
    )


def _call(annotation: Any, method: str, *arguments: Any) -> dict[str, Any]:
    found = getattr(annotation, method, None)
    return (found(*arguments) if found is not None else None) or {}
