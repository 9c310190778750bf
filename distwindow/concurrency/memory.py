"""Slots in this process: the specification of `hold`, `renew`, `free` and `holders`."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from ..ring.memory_rings import Handlers, MemoryValues
from .commands import (
    MAX_PLACES,
    PLACE_MS,
    Free,
    FreeReply,
    Hold,
    HolderName,
    Holders,
    HoldersReply,
    HoldReply,
    Renew,
    RenewReply,
    SlotCommand,
)


class SlotSet:
    """The slots of a resource, and who waits for one."""

    def __init__(self, deadlines: dict[bytes, int], line: dict[bytes, int]) -> None:
        self.deadlines = deadlines
        """Of the holders, ms."""
        self.line = line
        """When the waiter of each place began to wait, ms; of a process, until when the places are
        its own, negative.
        """

    @property
    def expires_at_ms(self) -> int:
        """When no slot is held any more, and nobody waits."""
        return max(max(self.deadlines.values(), default=0), -min(self.line.values(), default=0))


class MemorySlots:
    """The commands on slots. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues) -> None:
        self._values = values
        self.handlers: Handlers = {
            "hold": self._hold,
            "renew": self._renew,
            "free": self._free,
            "holders": self._holders,
        }

    def _known(self, command: SlotCommand[Any]) -> SlotSet:
        known: SlotSet | None = self._values.get(command.slots_name)
        return SlotSet({}, {}) if known is None else known

    def _hold(self, command: Hold, now: int) -> HoldReply:
        slots = self._known(command)
        known = slots.deadlines
        live = {holder: deadline for holder, deadline in known.items() if deadline > now}
        line = _Line(slots.line, now)
        name = HolderName.parse(command.holder)
        process = b"" if name is None else name.id.partition(".")[0].encode()
        # Who stands behind another of its process has not waited for longer.
        arrivals = [max(0, now - waited) for waited in accumulate(command.waited_ms, min)]
        if command.is_head:
            line.leave(process)
        ahead = line.count_before(arrivals[0] if command.is_head and arrivals else math.inf)
        granted = command.holder in live or ahead < command.limit - len(live)
        if command.is_head or not granted:
            line.take_places(process, arrivals[1:] if granted else arrivals)
        if granted:
            live[command.holder] = now + command.ttl_ms
            self._put(command, SlotSet(live, line.scores))
            return HoldReply(True, len(live), command.ttl_ms, now)
        for holder, deadline in live.items():
            # It was written before the clock was set back: see hold.lua.
            own_ttl_ms = _ttl_ms(holder)
            if deadline - now > max(command.ttl_ms, own_ttl_ms):
                known[holder] = now + own_ttl_ms
        self._put(command, SlotSet(known, line.scores))
        deadlines = [known[h] for h in live if known[h] > now]
        last = max((at for at in deadlines if at <= now + command.ttl_ms), default=None)
        age_ms = 0 if last is None else now + command.ttl_ms - last
        first = min(deadlines, default=now)
        return HoldReply(False, len(live), first - now, now, ahead, age_ms)

    def _put(self, command: SlotCommand[Any], slots: SlotSet) -> None:
        """Keep a set that may be new; an empty one is not kept."""
        if slots.deadlines or slots.line:
            self._values.put(command.slots_name, slots)
        else:
            self._values.remove(command.slots_name)

    def _renew(self, command: Renew, now: int) -> RenewReply:
        deadlines = self._known(command).deadlines
        gone = []
        for index, holder in enumerate(command.holders):
            if deadlines.get(holder, now) > now:
                deadlines[holder] = now + command.ttl_ms
            else:
                gone.append(index)
        return RenewReply(tuple(gone), now)

    def _free(self, command: Free, now: int) -> FreeReply:
        slots = self._known(command)
        freed = 0
        for holder in command.holders:
            if slots.deadlines.get(holder, now) > now:
                del slots.deadlines[holder]
                freed += 1
        self._put(command, slots)
        return FreeReply(freed, now)

    def _holders(self, command: Holders, now: int) -> HoldersReply:
        deadlines = self._known(command).deadlines
        live = sorted((at - now, holder) for holder, at in deadlines.items() if at > now)
        return HoldersReply({holder: ends_ms for ends_ms, holder in live}, now)


class _Line:
    """The line of a resource, without processes gone silent: see lua/shared/slot_line.lua."""

    def __init__(self, scores: dict[bytes, int], now: int) -> None:
        self._now = now
        self.scores = dict(scores)
        for process, score in scores.items():
            if score < 0 and not now < -score <= now + PLACE_MS:
                self.leave(process)

    def leave(self, process: bytes) -> None:
        """Take the places of `process` from it."""
        for name in (process, *(b"%s.%d" % (process, i + 1) for i in range(MAX_PLACES))):
            self.scores.pop(name, None)

    def count_before(self, arrival: float) -> int:
        """Return how many waiters have come before `arrival`."""
        return sum(0 <= score < arrival for score in self.scores.values())

    def take_places(self, process: bytes, arrivals: list[int]) -> None:
        """Give `process` these places, unless it has some."""
        if arrivals and process not in self.scores:
            self.scores[process] = -(self._now + PLACE_MS)
            for i, arrival in enumerate(arrivals):
                self.scores[b"%s.%d" % (process, i + 1)] = arrival


def _ttl_ms(holder: bytes) -> int:
    name = HolderName.parse(holder)
    return 0 if name is None else name.ttl_ms
