"""Slots in this process: the specification of `hold`, `renew`, `free` and `holders`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..core.errors import ConfigurationError
from ..protocol.slot_commands import (
    Free,
    FreeReply,
    Hold,
    HolderName,
    Holders,
    HoldersReply,
    HoldReply,
    Renew,
    RenewReply,
)

Handlers = dict[str, Callable[[Any, int], Any]]

_MIN_SWEEP_SIZE = 1024
"""Up to this number of resources, none is dropped."""


def slot_handlers(
    deadlines: dict[bytes, dict[bytes, int]] | None, *, kept_elsewhere: bool
) -> Handlers:
    """Return the handlers of commands on slots. With `kept_elsewhere` the caller keeps the state of
    this store; if it keeps no `deadlines`, they are refused, as more would be held than the limit.
    """
    if deadlines is None and kept_elsewhere:
        return dict.fromkeys(MemorySlots({}).handlers, _refuse)
    return MemorySlots({} if deadlines is None else deadlines).handlers


class MemorySlots:
    """The deadlines of holders (ms), by resource. Not safe to share between threads: the store that
    owns it has a lock.
    """

    def __init__(self, deadlines: dict[bytes, dict[bytes, int]]) -> None:
        self._deadlines = deadlines
        self._sweep_size = _MIN_SWEEP_SIZE
        self.handlers: Handlers = {
            "hold": self._hold,
            "renew": self._renew,
            "free": self._free,
            "holders": self._holders,
        }
        """By the name of the command."""

    def _hold(self, command: Hold, now: int) -> HoldReply:
        known = self._deadlines.get(command.slots_name, {})
        live = {holder: deadline for holder, deadline in known.items() if deadline > now}
        if command.holder in live or len(live) < command.limit:
            live[command.holder] = now + command.ttl_ms
            if not known and len(self._deadlines) >= self._sweep_size:
                self._sweep(now)
            self._deadlines[command.slots_name] = live
            return HoldReply(True, len(live), command.ttl_ms, now)
        for holder, deadline in live.items():
            # It was written before the clock was set back: see hold.lua.
            own_ttl_ms = _ttl_ms(holder)
            if deadline - now > max(command.ttl_ms, own_ttl_ms):
                known[holder] = now + own_ttl_ms
        first = min((known[h] for h in live if known[h] > now), default=now)
        return HoldReply(False, len(live), first - now, now)

    def _renew(self, command: Renew, now: int) -> RenewReply:
        deadlines = self._deadlines.get(command.slots_name, {})
        gone = []
        for index, holder in enumerate(command.holders):
            if deadlines.get(holder, now) > now:
                deadlines[holder] = now + command.ttl_ms
            else:
                gone.append(index)
        return RenewReply(tuple(gone), now)

    def _free(self, command: Free, now: int) -> FreeReply:
        deadlines = self._deadlines.get(command.slots_name, {})
        freed = 0
        for holder in command.holders:
            if deadlines.get(holder, now) > now:
                del deadlines[holder]
                freed += 1
        if not deadlines:
            self._deadlines.pop(command.slots_name, None)
        return FreeReply(freed, now)

    def _holders(self, command: Holders, now: int) -> HoldersReply:
        deadlines = self._deadlines.get(command.slots_name, {})
        live = sorted((at - now, holder) for holder, at in deadlines.items() if at > now)
        return HoldersReply({holder: ends_ms for ends_ms, holder in live}, now)

    def _sweep(self, now: int) -> None:
        """Drop the resources of which no slot is held any more. It is done again when their number
        has doubled, so the cost per call is constant.
        """
        idle = [name for name, held in self._deadlines.items() if max(held.values()) <= now]
        for name in idle:
            del self._deadlines[name]
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._deadlines))


def _ttl_ms(holder: bytes) -> int:
    name = HolderName.parse(holder)
    return 0 if name is None else name.ttl_ms


def _refuse(command: Any, now: int) -> NoReturn:
    raise ConfigurationError(
        f"this store keeps no slots, which a concurrency limit needs ({command.script}); where it "
        "makes a MemoryStore, it has to pass and to keep `slots`, as it does with `rings`"
    )
