"""A program that uses the rest of a distwindow from which features were deleted: those of `argv`.

What the rest imports of them is `Nothing`, but for two names that it cannot do without (`instead`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Nothing(type):
    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def keys(cls) -> Sequence[Any]:
        return ()


class Nothing(metaclass=_Nothing):
    """A class, a function or a value that does nothing, and has nothing in it."""


def instead(name: str) -> Any:
    """Return what takes the place of a name that the rest imports from what was deleted."""
    if name == "make_command_cache":
        return import_module("distwindow.runtime.command_cache").CommandCache
    return Raise if name == "StoreErrorPolicy" else Nothing


class Raise:
    """The policy where there is none: an answer of the store is passed on, and an error, too."""

    raises_always = True
    observe = None

    def __init__(self, options: Any, commands: Any, store: Any, strategy: Any, name: str) -> None:
        self.flush_source = import_module("distwindow.runtime.flush").JoinedSources(strategy)

    def __getattr__(self, name: str) -> Any:
        return Nothing


class Gone(ModuleType):
    """A module of a feature that was deleted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return instead(name)


class Finder(Loader, MetaPathFinder):
    """Finds the modules of what was deleted."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        room = name.removeprefix("distwindow.").partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if room in sys.argv else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Gone(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    from distwindow import Limiter
    from distwindow.stores.memory import MemoryStore

    class Store(MemoryStore):
        keeps_views = "minute" not in sys.argv

    limiter = Limiter(Store(), "3/minute", consistency="leased")
    assert [limiter.try_acquire("k").allowed for _ in range(4)] == [True, True, True, False]
    assert limiter.stats("k").passed == 3
    with limiter.entry("e"):
        assert limiter.acquire("a", timeout=1).allowed
    if "concurrency" not in sys.argv:
        from distwindow import Concurrency

        with Concurrency("memory://", 1).hold("k"):
            pass
    if "borrow" not in sys.argv:
        assert limiter.try_acquire("p", priority=True).allowed


if __name__ == "__main__":
    sys.meta_path.append(Finder())  # it is asked last
    main()
