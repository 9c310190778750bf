"""Moments at which something is due, of which most are cancelled before they come."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")

_SPARE = 64
"""How many cancelled moments are kept beyond as many as there are live ones."""


class Schedule(Generic[T]):
    """For each item at most one moment, in seconds of any monotonic clock. Items are compared by
    identity. A cancelled moment stays in the heap until it comes, or until such moments are more
    than half of the heap: then the heap is built again without them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, tuple[float, T]] = {}
        """By the number of the moment."""
        self._numbers: dict[int, int] = {}
        """The number of an item's moment, by the id of the item, which `_items` keeps alive."""
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._items)

    def set(self, item: T, at_s: float) -> None:
        """Let `item` be due at `at_s`, and no longer at the moment that it had."""
        self.cancel(item)
        number = self._next_number
        self._next_number += 1
        self._items[number] = (at_s, item)
        self._numbers[id(item)] = number
        heapq.heappush(self._heap, (at_s, number))

    def cancel(self, item: T) -> None:
        number = self._numbers.pop(id(item), None)
        if number is None:
            return
        del self._items[number]
        if len(self._heap) > 2 * len(self._items) + _SPARE:
            self._heap = [(at_s, number) for number, (at_s, _) in self._items.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_s: float) -> T | None:
        """Remove and return the item whose moment came first, if it has come by `now_s`."""
        at_s = self.next_s()
        if at_s is None or at_s > now_s:
            return None
        _, number = heapq.heappop(self._heap)
        _, item = self._items.pop(number)
        del self._numbers[id(item)]
        return item

    def next_s(self) -> float | None:
        """Return the first moment; None if nothing is scheduled."""
        while self._heap and self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
