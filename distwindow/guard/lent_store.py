"""The store of a guard, as the limiters and breakers of the guard see it.

They behave as if it was theirs, so that closing one ends all that it does in the background; but
it stays open until the guard closes it, because the others still flush.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LentStore:
    """`Store` or `AsyncStore`, which `close` leaves open."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self.shown_name = name
        """The name of the store for log lines, without passwords."""
        # Attributes of the object, and not methods: a call costs nothing more.
        self.source, self.clock = store.source, store.clock
        self.attempt, self.execute, self.exchange = store.attempt, store.execute, store.exchange
        if hasattr(store, "drain"):
            self.drain, self.sleep = store.drain, store.sleep

    @property
    def unknown_total(self) -> int:
        """See `Store`."""
        total: int = self._store.unknown_total
        return total

    def close(self) -> None:
        """Leave the store open."""

    async def aclose(self) -> None:
        """Leave the store open."""


def lend(store: Any, name: str, *, owned: bool) -> Any:
    """Return what limiters are made with: a store in this process, or the caller's, as it is."""
    return LentStore(store, name) if owned and store.source != "local" else store


def own(parts: Iterable[Any], store: Any) -> None:
    """Have `parts`, which were made with `store`, behave as its owners if it was lent."""
    if isinstance(store, LentStore):
        for part in parts:
            part._owns_store = True
