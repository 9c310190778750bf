"""The rings of a `MemoryStore`, and what belongs to them: found or made, rotated, and dropped."""

from __future__ import annotations

from ..shaping.shaping import ShapingState
from ..waiting.line import Line
from ..waiting.memory import MemoryLines
from .clock import Clock
from .commands import Flush
from .decision import Charge
from .limit import Limit
from .ring import RETIRED_START, Ring, SenderRecords

_MIN_SWEEP_SIZE = 1024
"""Up to this number of rings, none is dropped."""


class MemoryRings:
    """Rings, the flushes that were added to them, their shapings and lines, each by the name of its
    ring or by its own. Callers hold the lock of the store.
    """

    def __init__(
        self,
        clock: Clock,
        rings: dict[bytes, Ring] | None,
        senders: dict[bytes, SenderRecords] | None,
        shapings: dict[bytes, ShapingState] | None,
        lines: dict[bytes, Line] | None,
    ) -> None:
        """Where to keep each kind; None: in new dictionaries."""
        self.clock = clock
        self._rings: dict[bytes, Ring] = {} if rings is None else rings
        self._senders: dict[bytes, SenderRecords] = {} if senders is None else senders
        self._shapings: dict[bytes, ShapingState] = {} if shapings is None else shapings
        self._lines = MemoryLines(lines)
        self._sweep_size = _MIN_SWEEP_SIZE

    def _ring_at(self, charge: Charge, now: int) -> Ring:
        """The ring of `charge`, made if it does not exist, with its newest bucket at `now`."""
        ring = self._rings.get(charge.ring)
        if ring is None:
            if len(self._rings) >= self._sweep_size:
                self._sweep()
            ring = self._rings[charge.ring] = new_ring(charge, now)
        elif now - ring.start >= ring.bucket_ms or now < ring.start:
            ring.rotate(now, limit_text(charge.limit))
        return ring

    def _copies_at(self, charges: tuple[Charge, ...], now: int) -> list[Ring]:
        """Return copies of the rings of `charges`, rotated to `now`."""
        rings = []
        for charge in charges:
            ring = self._rings.get(charge.ring)
            ring = ring.copy() if ring else new_ring(charge, now)
            ring.rotate(now, ring.limit)
            rings.append(ring)
        return rings

    def _put(self, name: bytes, ring: Ring) -> None:
        """Make `ring` the one of this name. Its content goes into the present one, which commands
        may be linked to.
        """
        present = self._rings.get(name)
        if present is None:
            self._rings[name] = ring
        else:
            present.replace_with(ring)

    def _remove(self, name: bytes) -> bool:
        """Remove the ring of this name. Return True if there was one."""
        ring = self._rings.get(name)
        if ring is None:
            return self._shapings.pop(name, None) is not None or self._lines.remove(name)
        # Both without a call, so that no signal handler raises in between: a linked command would
        # go on counting in a ring that nobody finds.
        ring.shortcut_start = RETIRED_START
        del self._rings[name]
        return True

    def _add_flushed(self, command: Flush, i: int, ring: Ring, now: int) -> bool:
        """Add the counts that are still in the window, unless this flush was applied before. True
        if any were added.
        """
        name, sender, seq = command.charges[i].ring, command.sender, command.seq
        records = self._senders.get(name)
        if sender and records is not None and records.has(sender, seq, ring):
            return False
        if not ring.add(command.counts[i]):
            return False
        if sender:
            if records is None:
                records = self._senders[name] = SenderRecords()
            records.remember(sender, seq, ring, now)
        return True

    def _sweep(self) -> None:
        """Drop the rings that have expired. It is done again when the number of rings has doubled,
        so the cost per call is constant.
        """
        now = self.clock.now_ms()
        expired = [
            name
            for name, ring in self._rings.items()
            if now >= (ring.last_number + ring.span + 1) * ring.bucket_ms
        ]
        for name in expired:
            self._remove(name)
        self._senders = {
            name: records for name, records in self._senders.items() if now < records.expires_at
        }
        expired = [name for name, each in self._shapings.items() if now >= each.expires_at_ms]
        for name in expired:
            del self._shapings[name]
        self._lines.sweep(now)
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._rings))


def new_ring(charge: Charge, now: int) -> Ring:
    """Return an empty ring for `charge`."""
    limit = charge.limit
    return Ring(limit.bucket_ms, limit.span, now, limit_text(limit))


def limit_text(limit: Limit) -> str:
    """Return the limit as rings keep it."""
    return f"{limit.amount} {limit.bound}"
