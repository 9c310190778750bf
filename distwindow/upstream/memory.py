"""Pauses on `MemoryStore`: the specification of `lua/upstream_pause.lua` and `upstream_lower.lua`.

from        event                                            to
-           refused                                          paused
paused      refused, to wait for longer                      paused for longer
paused      its time ends                                    over
over        the first who asks                               over, and this one is the probe
over        refused                                          paused, twice as long if not told
over        the probe has no answer, or its time ends        over, the next who asks is the probe
over        a probe of this pause is not refused             returning: 1, 3, 7, ... in all, from
                                                             one tenth of a second to the next
returning   refused                                          paused, as for the first time
returning   1,023 were sent, or a second passed              -
over        nobody asked for a minute                        -
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ring.memory_rings import Handlers, MemoryRings, MemoryValues
from ..ring.stats import Bucket
from .commands import (
    ASK_AGAIN,
    PAUSED,
    PROBE,
    SEND,
    SEND_ONE,
    Lower,
    LowerReply,
    PauseCommand,
    PauseReply,
)

FIRST_PAUSE_MS = 1000
"""The pause after a refusal that does not say how long; each further one in a row doubles it."""
REMEMBERED_MS = 60_000
"""For how long after its end a pause is remembered, so that the next one is longer."""
STEP_MS = 100
"""Until the next step of those who return, and until others ask again while one probes."""
MAX_STEPS = 10
_MAX_DOUBLINGS = 30


@dataclass(slots=True)
class StoredPause:
    """The pause of one key, as the store has it. Times are ms since the epoch."""

    until_ms: int = 0
    said_ms: int = 0
    """Until when the upstream has asked to wait."""
    in_a_row: int = 0
    """Refusals of which each was the answer to the first call after a pause."""
    probe: str = ""
    probe_until_ms: int = 0
    returns_at_ms: int = 0
    """Since when the fleet returns; 0 while it does not."""
    returned: int = 0
    expires_at_ms: int = 0


class MemoryPauses:
    """The commands on pauses. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues, rings: MemoryRings) -> None:
        self._values, self._rings = values, rings
        self.handlers: Handlers = {"upstream_pause": self._pause, "upstream_lower": self._lower}

    def _pause(self, command: PauseCommand, now: int) -> PauseReply:
        pause: StoredPause | None = self._values.get(command.name)
        if pause is not None and now >= pause.expires_at_ms:
            pause = None
        if command.what == "tell":
            return self._tell(command, pause or StoredPause(), now)
        if pause is None:
            return PauseReply(SEND, now)
        if command.what == "ask":
            return self._ask(command, pause, now)
        if command.what == "ok" and command.first_ms >= pause.until_ms and not pause.returns_at_ms:
            pause.probe, pause.returns_at_ms, pause.returned = "", now, 0
            pause.expires_at_ms = now + STEP_MS * MAX_STEPS
        elif pause.probe == command.call:
            pause.probe = ""
        return PauseReply(SEND, now)

    def _ask(self, command: PauseCommand, pause: StoredPause, now: int) -> PauseReply:
        if now < pause.until_ms:
            wait_ms = pause.until_ms - now
            return PauseReply(PAUSED, now, wait_ms, max(wait_ms, pause.said_ms - now))
        if pause.returns_at_ms:
            steps = max(0, (now - pause.returns_at_ms) // STEP_MS) + 1
            if pause.returned >= 2**steps - 1:
                wait_ms = pause.returns_at_ms + steps * STEP_MS - now
                return PauseReply(ASK_AGAIN, now, wait_ms, wait_ms)
            pause.returned += 1
            return PauseReply(SEND_ONE, now)
        if pause.probe and pause.probe != command.call and now < pause.probe_until_ms:
            left_ms = pause.probe_until_ms - now
            return PauseReply(ASK_AGAIN, now, min(STEP_MS, left_ms), left_ms)
        pause.probe, pause.probe_until_ms = command.call, now + command.first_ms
        pause.expires_at_ms = pause.probe_until_ms + REMEMBERED_MS
        return PauseReply(PROBE, now)

    def _tell(self, command: PauseCommand, pause: StoredPause, now: int) -> PauseReply:
        is_paused = now < pause.until_ms
        given_ms, cap_ms = command.first_ms, command.second_ms
        if pause.returns_at_ms:
            pause.in_a_row = 1
        elif not is_paused:
            pause.in_a_row += 1
        doublings = min(pause.in_a_row - 1, _MAX_DOUBLINGS)
        wait_ms = given_ms or (0 if is_paused else min(cap_ms, FIRST_PAUSE_MS * 2**doublings))
        longer_ms = wait_ms + wait_ms * command.jitter // 1000
        pause.until_ms = max(pause.until_ms, now + min(longer_ms, cap_ms))
        pause.said_ms = max(pause.said_ms, now + wait_ms)
        pause.probe, pause.returns_at_ms = "", 0
        pause.expires_at_ms = pause.until_ms + REMEMBERED_MS
        self._values.put(command.name, pause)
        left_ms = pause.until_ms - now
        return PauseReply(PAUSED, now, left_ms, max(left_ms, pause.said_ms - now))

    def _lower(self, command: Lower, now: int) -> LowerReply:
        added = []
        for charge, reset_ms in zip(command.charges, command.resets_ms, strict=True):
            ring = self._rings.ring_at(charge, now)
            missing = max(0, min(charge.cost, charge.limit.amount) - ring.used)
            oldest = ring.newest_number + 1 - ring.span
            number = max(oldest, -(-(now + reset_ms) // ring.bucket_ms) - ring.span)
            if not reset_ms or ring.borrowed_permits is not None:
                number = ring.newest_number
            ring.add([Bucket(number * ring.bucket_ms, passed=missing)])
            added.append(missing)
        return LowerReply(tuple(added), now)
