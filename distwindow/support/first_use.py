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
        with _MAKING.lock:
            if _MAKING.looks_for == (id(owner), self._name):
                raise AttributeError(self._name)
            made: T | None = if_made(owner, self._name)
            if made is None:
                made = self._make(owner)
                setattr(owner, self._name, made)
        return made


def if_made(owner: object, name: str) -> Any:
    """Return the attribute `name` if it is made; else None. (`vars(owner)` would turn the object's
    attributes into a dictionary, with which a call takes 6 % longer.)
    """
    with _MAKING.lock:
        _MAKING.looks_for = (id(owner), name)
        try:
            return getattr(owner, name, None)
        finally:
            _MAKING.looks_for = None


class _Making:
    """Holds the lock under which attributes are made."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        # Re-entrant, as a signal handler may call the limiter that it has interrupted.
        self.lock = threading.RLock()
        self.looks_for: tuple[int, str] | None = None
        """The attribute that the holder of the lock looks for."""


_MAKING = register_after_fork(_Making())
