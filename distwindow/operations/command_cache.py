"""From what a caller says (a key, a cost) to the command that is sent, checked and remembered.

Building a command costs some 10 us (escaping, hashing, packing); a key that comes again costs a
dictionary look-up. Callers of one key and cost get the *same* command object, which is how stores
see that their calls can share one script call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.charge import Charge
from ..core.errors import short_repr
from ..core.interrupts import is_interruption
from ..core.key import AnyKey, Key, normalize_key
from ..core.limit import LimitSpec, limits_of
from ..protocol.commands import Acquire, charges_of
from ..protocol.keys import check_prefix, key_prefix

_MAX_COMMANDS = 16_384
_MAX_KEY_LENGTH = 256
_WITH_COST = object()
"""Marks what is remembered for a cost other than 1: no caller's key can be equal to that."""
_MAX_SHARED_COST = 10**9
"""The scripts count exactly up to 10**13: ten thousand callers of this cost may share a call."""


class CommandCache:
    """The commands of one prefix and one set of limits. Safe to share between threads."""

    def __init__(self, prefix: str, limits: LimitSpec) -> None:
        self.prefix = check_prefix(prefix)
        self.limits = limits_of(limits)
        self._largest_cost = min(limit.amount for limit in self.limits)
        self._commands: dict[Any, Acquire] = {}
        self._older: dict[Any, Acquire] = {}

    def acquire(self, key: AnyKey, cost: int = 1) -> Acquire:
        """The command for one call of `cost` on `key`.

        Raises `ValueError` for an empty key and for a cost that no window could ever admit,
        `TypeError` for a key that is none.
        """
        if cost.__class__ is int:
            try:
                command = self._commands.get(key if cost == 1 else (_WITH_COST, key, cost))
                if command is None and self._older:
                    command = self._recall(_cache_key(key, cost))
            except TypeError as exc:  # an unhashable key: `stem` says what a key is
                if is_interruption(exc):
                    raise
                command = None
            # A memoryview is equal to the bytes it shows, but is no key: `stem` says so.
            is_key = key.__class__ is not memoryview  # type: ignore[comparison-overlap]
            if command is not None and is_key:
                return command
        check_cost(cost, self._largest_cost)
        normalized = normalize_key(key)
        if normalized is not key:
            # The same command for both forms, so that their calls can be shared.
            command = self.acquire(normalized, cost)
            if command is self._commands.get(_cache_key(normalized, cost)):
                self._remember(_cache_key(key, cost), command)
            return command
        charges = charges_of(key, key_prefix(self.prefix, key), self.limits, cost)
        parts = (key.resource, key.tag) if isinstance(key, Key) else (key,)
        command = Acquire(charges)
        if cost > _MAX_SHARED_COST or max(map(len, parts)) > _MAX_KEY_LENGTH:
            return command
        self._remember(_cache_key(key, cost), command)
        if self._older:
            return command
        # The first call on a key also tells its ring the limits, so that `stats` shows them at
        # once after a change of limit. That costs the short way through the script, so it stops
        # where there are more keys than are remembered.
        return Acquire(charges, store_limit=True)

    def _recall(self, name: Any) -> Acquire | None:
        command = self._older.get(name)
        if command is not None:
            self._remember(name, command)
        return command

    def _remember(self, name: Any, command: Acquire) -> None:
        """Keep `command`. The half that was not used for longest is forgotten at once: keys in use
        are not all built anew together.
        """
        if len(self._commands) >= _MAX_COMMANDS:
            self._older, self._commands = self._commands, {}
        self._commands[name] = command

    def acquire_all(self, items: Iterable[Sequence[Any]]) -> Acquire:
        """The command for one call over several keys: `(key, limits, cost)` or `(key, limits)`.

        Raises as `acquire` does, and `ValueError` where a ring would be charged twice.
        """
        charges: list[Charge] = []
        for item in items:
            if isinstance(item, (str, bytes, Key)) or not 2 <= len(item) <= 3:
                raise ValueError(f"{item!r} is not (key, limits, cost) or (key, limits)")
            key, limits = normalize_key(item[0]), limits_of(item[1])
            cost = item[2] if len(item) == 3 else 1
            check_cost(cost, min(limit.amount for limit in limits))
            charges += charges_of(key, key_prefix(self.prefix, key), limits, cost)
        if not charges:
            raise ValueError("try_acquire_all needs at least one (key, limits, cost)")
        seen: set[bytes] = set()
        for charge in charges:
            if charge.ring in seen:
                raise ValueError(
                    f"key {short_repr(charge.key)} is named twice with the same buckets; "
                    "add the costs up"
                )
            seen.add(charge.ring)
        return Acquire(tuple(charges))


def _cache_key(key: AnyKey, cost: int) -> Any:
    return key if cost == 1 else (_WITH_COST, key, cost)


def check_cost(cost: object, most: int) -> None:
    """Raise `ValueError` for a cost that is not an int from 1 to `most`, the smallest limit."""
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
        raise ValueError(f"cost={short_repr(cost)} is not a whole number of at least 1")
    if cost > most:
        raise ValueError(f"cost={cost} can never be admitted: the smallest limit is {most}")
