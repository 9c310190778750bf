"""Attributes that are made when they are first used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .fork import register_after_fork

T = TypeVar("T")


class FirstUse(Generic[T]):
    """Decorates a method that makes something, and takes its place as the attribute that holds it:
    what most objects of a class never use costs them nothing.

    It is made once, whatever threads ask for it. (`functools.cached_property` has no lock from
    Python 3.12 on, and before that one that a forked child may find held.)
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name = make, make.__name__

    def __get__(self, owner: Any, kind: object = None) -> T:
        if owner is None:
            return self  # type: ignore[return-value]  # of the class, for those that inspect it
        attributes = vars(owner)
        with _MAKING.lock:
            if self._name not in attributes:
                attributes[self._name] = self._make(owner)
        made: T = attributes[self._name]
        return made


class _Making:
    """Holds the lock under which attributes are made."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        # Re-entrant, as a signal handler may call the limiter that it has interrupted.
        self.lock = threading.RLock()


_MAKING = register_after_fork(_Making())
