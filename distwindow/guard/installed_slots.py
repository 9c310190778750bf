"""Slots of installed packages, by the entry points of the group `distwindow.slots`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ..core.errors import ConfigurationError

GROUP = "distwindow.slots"


def make_installed_slots(checked: Callable[[Any], Any]) -> list[Any]:
    """Return a new slot of each entry point, in the order of their names.

    An entry point names a class, or a function, that is called without arguments. Raises
    `ConfigurationError`, which names the entry point, for one that fails or gives what is no slot:
    `checked` raises for that, and else returns the slot.
    """
    slots = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            slots.append(checked(point.load()()))
        except (Exception, SystemExit) as exc:
            raise ConfigurationError(
                f"the slot {point.name!r} of the entry points {GROUP!r} ({point.value}) cannot be "
                f"made: {type(exc).__name__}: {exc}; mend or remove the package that has it, or "
                "give installed_slots=False"
            ) from exc
    return slots
