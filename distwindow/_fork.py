"""The objects whose `after_fork` is called in forked children, and how often this process was
forked from another one.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

T = TypeVar("T")

forks = 0
"""How many forks lie between the process that has imported this module and this one. What was begun
under another number belongs to another process."""


def _count_fork() -> None:
    global forks
    forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)

_registered: weakref.WeakSet[Any] | None = None


def register_after_fork(owner: T) -> T:
    """Have `owner.after_fork()` called in forked children, for as long as `owner` lives."""
    global _registered
    if _registered is None:
        _registered = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=reset_process_state)
    _registered.add(owner)
    return owner


def reset_process_state() -> None:
    """Have everything drop its connections, its counts, and its locks, as in a forked child."""
    for owner in list(_registered or ()):
        owner.after_fork()
