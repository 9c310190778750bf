"""Which flushes a ring has taken, so that it takes each one once."""

from __future__ import annotations

from .ring import Ring


class SenderRecords:
    """Which flushes a ring has taken: for each sender the last `seq`, and the newest bucket then.

    They outlive the ring: a flush that was taken before a reset is not taken again after it. A
    record is valid until its bucket has expired, because whatever its sender may send again has
    then expired, too. From then on it is treated as a missing one, so it makes no difference when
    it is deleted.
    """

    __slots__ = ("_records", "expires_at")

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, int]] = {}
        self.expires_at = 0
        """When all records have expired, ms since the epoch."""

    def has(self, sender: str, seq: int, ring: Ring) -> bool:
        """True if `ring` has taken this flush of `sender`, or a later one."""
        last_seq, number = self._records.get(sender, (-1, ring.newest_number - ring.span))
        return seq <= last_seq and number > ring.newest_number - ring.span

    def remember(self, sender: str, seq: int, ring: Ring, now: int) -> None:
        """Write the record of this flush; a new sender's first record deletes the expired ones."""
        if sender not in self._records:
            expired = ring.newest_number - ring.span
            self._records = {
                name: record for name, record in self._records.items() if record[1] > expired
            }
        self._records[sender] = (seq, ring.newest_number)
        self.expires_at = max(ring.start, now) + (ring.span + 1) * ring.bucket_ms
