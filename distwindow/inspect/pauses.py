"""Keys of which an upstream has asked all callers to wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .servers import Server, read_hashes


class FoundPause(NamedTuple):
    """The pause of one key."""

    key: str
    state: str
    """`paused`; `over`, until a call is not refused; `returning`, more and more are sent."""
    left_s: float
    """For how long nobody sends, in seconds."""
    said_s: float
    """For how long the upstream has asked to wait, from now on, in seconds."""
    in_a_row: int
    """Refusals of which each was the answer to the first call after a pause."""
    until_ms: int
    """The end of the pause, also where that has passed: ms since the epoch."""
    now_ms: int
    """The server's time when it was read: ms since the epoch."""

    @property
    def rank(self) -> tuple[float, str]:
        """What keys are sorted by: those first that are paused for longest."""
        return -self.left_s, self.key


def read_pauses(server: Server, names: Mapping[bytes, str]) -> list[FoundPause]:
    """Return the pauses of these names that still exist; each name has the text of its key."""
    found = []
    now_ms, hashes = read_hashes(server, list(names)) if names else (0, [])
    for key, fields in zip(names.values(), hashes, strict=True):
        if isinstance(fields, Exception):
            continue  # not a hash, or its slot has just been moved
        try:
            numbers = {
                name: int(fields[name])
                for name in (b"until", b"said", b"in_a_row", b"returns_at", b"expires_at")
            }
        except (KeyError, ValueError):
            continue  # of another program, or deleted meanwhile
        if now_ms >= numbers[b"expires_at"]:
            continue
        until_ms = numbers[b"until"]
        left_ms = max(0, until_ms - now_ms)
        state = "paused" if left_ms else "returning" if numbers[b"returns_at"] else "over"
        said_ms, in_a_row = max(left_ms, numbers[b"said"] - now_ms), numbers[b"in_a_row"]
        found.append(
            FoundPause(key, state, left_ms / 1000, said_ms / 1000, in_a_row, until_ms, now_ms)
        )
    return found
