"""Slots in this process: the specification of `hold`, `renew`, `free` and `holders`."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn

from ..errors import ConfigurationError
from ..ring.key import line_name
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
    """The deadlines of holders (ms), by the name of the slots, and the scores of a line, by its
    name (lua/README.md). Not safe to share between threads: the store that owns it has a lock.
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
        line = _Line(self._deadlines.get(line_name(command.slots_name), {}), now)
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
        self._put(line_name(command.slots_name), line.scores, now)
        if granted:
            live[command.holder] = now + command.ttl_ms
            self._put(command.slots_name, live, now)
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

    def _put(self, name: bytes, scores: dict[bytes, int], now: int) -> None:
        """Keep a set that may be new; an empty one is not kept."""
        if not scores:
            self._deadlines.pop(name, None)
            return
        if name not in self._deadlines and len(self._deadlines) >= self._sweep_size:
            self._sweep(now)
        self._deadlines[name] = scores

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
        """Drop the resources of which no slot is held any more, and the lines in which nobody
        waits. It is done again when their number has doubled, so the cost per call is constant.
        """
        end = line_name(b"")
        idle = [
            name
            for name, scores in self._deadlines.items()
            if (-min(scores.values()) if name.endswith(end) else max(scores.values())) <= now
        ]
        for name in idle:
            del self._deadlines[name]
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._deadlines))


class _Line:
    """The line of a resource, without the places of processes that have told nothing for a while:
    see lua/shared/slot_line.lua.
    """

    def __init__(self, scores: dict[bytes, int], now: int) -> None:
        self._now = now
        self.scores = scores.copy()
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


def _refuse(command: Any, now: int) -> NoReturn:
    raise ConfigurationError(
        f"this store keeps no slots, which a concurrency limit needs ({command.script}); where it "
        "makes a MemoryStore, it has to pass and to keep `slots`, as it does with `rings`"
    )
