"""Makes the command for a key and a cost, once: checks both, and caches the command.

Building a command takes some 2 us (escaping, packing), and a cached one a dictionary look-up.
Callers of one key and cost get the *same* command object, and by that stores recognize calls that
can share one script call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from ..errors import closed_failure, short_repr
from ..ring.command import Command, FrameParts
from ..ring.commands import Acquire, Peek, Read, Reset, charges_of
from ..ring.decision import Charge
from ..ring.key import (
    AnyKey,
    Key,
    check_prefix,
    key_length,
    normalize_key,
    ring_name_prefix,
)
from ..ring.limit import Limit, LimitSpec, max_cost, parse_limits
from ..ring.replies import AcquireReply
from ..ring.stats import ShapingStats

_MAX_COMMANDS = 16_384
_MAX_CACHED_KEY_LENGTH = 256
_MAX_COSTS = 64
"""The costs for which the common part of frames is kept, of those under the limiter's limits."""
_OWN_PARTS = None, None
COST_MARKER = object()
"""Part of the cache key of commands whose cost is not 1: no caller's key can be equal to it."""
CacheKey: TypeAlias = "AnyKey | tuple[object, AnyKey, int]"
"""The name of a command: `key if cost == 1 else (COST_MARKER, key, cost)`."""
_MAX_CACHED_COST = 10**9
"""The scripts count exactly up to 10**13, so ten thousand calls of this cost may share one script
call. Commands of higher cost are not cached, and so not shared.
"""


class CommandCache:
    """Commands for one prefix. Safe to share between threads.

    This is the one place that says which limits a key has. Whoever needs them asks for a command
    of the key, or `limits_of`, and keeps the answer with what it keeps of the key.
    """

    command_type: type[Acquire] = Acquire
    """That of all keys. It is fixed for good, and with it whether the limits are plain, or are
    paced or warm up: by that the strategy is chosen, how an entry and `acquire` wait, and what may
    be reserved. All else of the limits may be another for each key.
    """
    clamps_costs = False
    """A cost above the smallest limit counts as that, and is no mistake."""
    counts_of: Callable[[tuple[Charge, ...]], Any] | None = None
    """Returns `Acquire.counts` of a command with these charges; None if nothing counts calls."""
    _previous_generation: Mapping[CacheKey, Acquire] = {}

    def __init__(
        self,
        prefix: str,
        limits: LimitSpec,
        beside: Sequence[Callable[[bytes], bytes]] = (),
    ) -> None:
        """`beside`: the names, by that of a ring, of the hashes that features keep beside it."""
        self._beside = tuple(beside)
        self.prefix = check_prefix(prefix)
        self.limits = parse_limits(limits)
        """Those that the limiter was made with."""
        self._frame_parts: dict[int, tuple[FrameParts, FrameParts]] = {}
        """By cost: of a key's first command, and of the cached one."""
        self._commands: dict[CacheKey, Acquire] = {}
        self.cached: Callable[[CacheKey], Acquire | None] = self._commands.get
        """Return the command of this name, if it is cached, for a key that is a `str`."""

    def limits_of(self, key: AnyKey) -> tuple[Limit, ...]:
        """Return the limits of `key`, which may be of any form, the shortest interval first."""
        return self.limits

    def acquire_command(self, key: AnyKey, cost: int = 1) -> Acquire:
        """Return the command for one call of `cost` on `key`.

        Raises `ValueError` for an empty key and for a cost that no window could ever admit,
        `TypeError` for an object that is not a key.
        """
        if cost.__class__ is int:
            try:
                command = self._commands.get(key if cost == 1 else (COST_MARKER, key, cost))
                if command is None and self._previous_generation:
                    command = self._promote(_cache_key(key, cost))
            except TypeError:  # an unhashable key: `ring_name_prefix` raises a better one
                command = None
            # A memoryview is equal to the bytes in it, and not a key: `ring_name_prefix` raises.
            # (mypy rules a memoryview out; callers may be untyped.)
            is_key = key.__class__ is not memoryview  # type: ignore[comparison-overlap]  # see above
            if command is not None and is_key:
                return command
        normalized = normalize_key(key)
        if normalized is not key:
            # Both forms of the key get the same command, so that their calls can be shared.
            command = self.acquire_command(normalized, cost)
            if command is self._commands.get(_cache_key(normalized, cost)):
                self._cache(_cache_key(key, cost), command)
            return command
        limits = self.limits_of(key)
        charged = self._checked_cost(cost, limits)
        charges = charges_of(key, ring_name_prefix(self.prefix, key), limits, charged)
        counts = None if self.counts_of is None else self.counts_of(charges)
        if cost > _MAX_CACHED_COST or key_length(key) > _MAX_CACHED_KEY_LENGTH:
            return self.command_type(charges, counts=counts)
        frame_parts = self._frame_parts.get(charged) if limits is self.limits else _OWN_PARTS
        if frame_parts is None:
            frame_parts = self._add_frame_parts(charged)
        command = self.command_type(charges, frame_parts=frame_parts[1], counts=counts)
        self._cache(_cache_key(key, cost), command)
        if self._previous_generation:
            return command
        # The first call of a key also stores the limits in its ring, so that `stats` shows a new
        # limit at once. The script is slower then, so this is not done once there are more keys
        # than are cached: any call could then seem to be the first of its key.
        return self.command_type(
            charges, write_limit=True, frame_parts=frame_parts[0], counts=counts
        )

    def _checked_cost(self, cost: int, limits: Sequence[Limit]) -> int:
        """Return what a call of `cost` is charged; raise `ValueError` for one that cannot be."""
        most = max_cost(limits)
        if self.clamps_costs and type(cost) is int and cost > most:
            return most
        check_cost(cost, most)
        return cost

    def close(self) -> None:
        """Have each request for a command raise `ConfigurationError`."""
        # Replaced in this object, so that calls of an open limiter need not check.
        self.acquire_command = self.charges_of_items = _raise_closed  # type: ignore[assignment,method-assign]  # see above

    def _add_frame_parts(self, cost: int) -> tuple[FrameParts, FrameParts]:
        if len(self._frame_parts) >= _MAX_COSTS:
            self._frame_parts = {}
        added = self._frame_parts[cost] = FrameParts(), FrameParts()
        return added

    def _promote(self, name: CacheKey) -> Acquire | None:
        command = self._previous_generation.get(name)
        if command is not None:
            self._cache(name, command)
        return command

    def _cache(self, name: CacheKey, command: Acquire) -> None:
        """Cache `command`. When the cache is full, a new generation begins. Commands of the
        previous one move over as they are used, so that those in use are not all built again at
        once; the rest is dropped when the cache is full again.
        """
        if len(self._commands) >= _MAX_COMMANDS:
            self._previous_generation = self._commands.copy()
            self._commands.clear()
        self._commands[name] = command

    def charges_of_items(self, items: Iterable[Sequence[Any]]) -> list[tuple[Charge, ...]]:
        """Return the charges of each item of a call over several keys: `(key, limits, cost)` or
        `(key, limits)` each.

        Raises as `acquire` does, and `ValueError` where a ring would be charged twice.
        """
        calls: list[tuple[Charge, ...]] = []
        seen: set[bytes] = set()
        for item in items:
            if isinstance(item, (str, bytes, Key)) or not 2 <= len(item) <= 3:
                raise ValueError(f"{item!r} is not (key, limits, cost) or (key, limits)")
            key, limits = normalize_key(item[0]), parse_limits(item[1])
            cost = item[2] if len(item) == 3 else 1
            cost = self._checked_cost(cost, limits)
            calls.append(charges_of(key, ring_name_prefix(self.prefix, key), limits, cost))
            for charge in calls[-1]:
                if charge.ring in seen:
                    raise ValueError(
                        f"key {short_repr(key)} is named twice with the same buckets; "
                        "add the costs up"
                    )
                seen.add(charge.ring)
        if not calls:
            raise ValueError("try_acquire_all needs at least one (key, limits, cost)")
        return calls

    def acquire_all_command(self, calls: Iterable[tuple[Charge, ...]]) -> Acquire:
        """Return the command for one call with the charges of these calls together."""
        return self._several(tuple(charge for call in calls for charge in call))

    def _several(self, charges: tuple[Charge, ...]) -> Acquire:
        """Return the command for one call with these charges of several keys."""
        return Acquire(charges)

    # What is stored beside plain rings, and how it is read, is for the features that store it to
    # say: they override these.

    def peek_command(self, charges: tuple[Charge, ...]) -> Command[AcquireReply]:
        """Return the command that peeks at these charges of one key."""
        return Peek(charges)

    def read_command(self, charges: tuple[Charge, ...]) -> Read:
        """Return the command that reads what `stats` shows of these charges of one key."""
        return Read(charges)

    def reset_command(self, charges: tuple[Charge, ...]) -> Reset:
        """Return the command that deletes the rings of these charges, and what lies beside them."""
        beside = [
            charge._replace(ring=name(charge.ring)) for charge in charges for name in self._beside
        ]
        return Reset((*charges, *beside))

    def shaping_stats(self, limit: Limit, stored: Any, now_ms: int) -> ShapingStats | None:
        """Return how `limit` is shaped at `now_ms`, with what `read_command` has found `stored`."""
        return None


def _raise_closed(*_: object) -> NoReturn:
    raise closed_failure()


def _cache_key(key: AnyKey, cost: int) -> CacheKey:
    return key if cost == 1 else (COST_MARKER, key, cost)


def check_cost(cost: object, highest: int) -> None:
    """Raise `ValueError` for a cost that is not an int from 1 to `highest`, the smallest limit."""
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
        raise ValueError(f"cost={short_repr(cost)} is not a whole number of at least 1")
    if cost > highest:
        raise ValueError(f"cost={cost} can never be admitted: the smallest limit is {highest}")
