"""Slots in this process: the specification of `hold`, `renew`, `free` and `holders`."""

from __future__ import annotations

import math
from itertools import accumulate

from ..ring.key import line_name
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
)


class HolderDeadlines(dict[bytes, int]):
    """The deadlines of holders (ms)."""

    @property
    def expires_at_ms(self) -> int:
        """When no slot is held any more."""
        return max(self.values(), default=0)


class LineScores(dict[bytes, int]):
    """The scores of a line (lua/README.md)."""

    @property
    def expires_at_ms(self) -> int:
        """When nobody waits any more."""
        return -min(self.values(), default=0)


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

    def _hold(self, command: Hold, now: int) -> HoldReply:
        known = self._values.get(command.slots_name) or HolderDeadlines()
        live = HolderDeadlines({h: deadline for h, deadline in known.items() if deadline > now})
        line = _Line(self._values.get(line_name(command.slots_name)) or LineScores(), now)
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
        self._put(line_name(command.slots_name), line.scores)
        if granted:
            live[command.holder] = now + command.ttl_ms
            self._put(command.slots_name, live)
            return HoldReply(True, len(live), command.ttl_ms, now)
        for holder, deadline in live.items():
            # It was written before the clock was set back: see hold.lua.
            own_ttl_ms = _ttl_ms(holder)
            if deadline - now > max(command.ttl_ms, own_ttl_ms):
                known[holder] = now + own_ttl_ms
        deadlines = [known[h] for h in live if known[h] > now]
        last = max((at for at in deadlines if at <= now + command.ttl_ms), default=None)
        age_ms = 0 if last is None else now + command.ttl_ms - last
        first = min(deadlines, default=now)
        return HoldReply(False, len(live), first - now, now, ahead, age_ms)

    def _put(self, name: bytes, scores: HolderDeadlines | LineScores) -> None:
        """Keep a set that may be new; an empty one is not kept."""
        if scores:
            self._values.put(name, scores)
        else:
            self._values.remove(name)

    def _renew(self, command: Renew, now: int) -> RenewReply:
        deadlines = self._values.get(command.slots_name) or {}
        gone = []
        for index, holder in enumerate(command.holders):
            if deadlines.get(holder, now) > now:
                deadlines[holder] = now + command.ttl_ms
            else:
                gone.append(index)
        return RenewReply(tuple(gone), now)

    def _free(self, command: Free, now: int) -> FreeReply:
        deadlines = self._values.get(command.slots_name) or {}
        freed = 0
        for holder in command.holders:
            if deadlines.get(holder, now) > now:
                del deadlines[holder]
                freed += 1
        if not deadlines:
            self._values.remove(command.slots_name)
        return FreeReply(freed, now)

    def _holders(self, command: Holders, now: int) -> HoldersReply:
        deadlines = self._values.get(command.slots_name) or {}
        live = sorted((at - now, holder) for holder, at in deadlines.items() if at > now)
        return HoldersReply({holder: ends_ms for ends_ms, holder in live}, now)


class _Line:
    """The line of a resource, without processes gone silent: see lua/shared/slot_line.lua."""

    def __init__(self, scores: LineScores, now: int) -> None:
        self._now = now
        self.scores = LineScores(scores)
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
