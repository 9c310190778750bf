"""The deletion of all that is stored of the selected keys: windows, slots, pauses of upstreams and
circuit breakers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..ring.key import line_name, shaping_name
from .scan import scan_names
from .selection import Selection
from .servers import Server, chunks


class StoredName(NamedTuple):
    """A Redis key with which a reset begins. What belongs to it is deleted with it."""

    raw: bytes
    key: str
    """The text of its key."""


def stored_names(
    server: Server, prefix: str, selection: Selection
) -> Iterator[tuple[int, list[StoredName]]]:
    """Yield the names of the selected keys on one server, page by page, each page with the number
    of names that were looked at.
    """
    # A name like a ring's that is not a hash belongs to another program, and is kept.
    for page in scan_names(server, prefix, selection, redis_type="hash"):
        names = [StoredName(raw, ring.key) for raw, ring in page.rings + page.shaped]
        names += [StoredName(raw, breaker.key) for raw, breaker in page.breakers.items()]
        names += [StoredName(raw, key) for raw, key in page.pauses.items()]
        yield page.names, names
    # So do sorted sets. Holders are told that they have lost their slots when these are renewed.
    for page in scan_names(server, prefix, selection, redis_type="zset"):
        yield 0, [StoredName(raw, key) for raw, key in page.slots.items()]


def delete(server: Server, names: list[StoredName]) -> list[StoredName]:
    """Delete what has these names. Return those that existed."""
    deleted = []
    for part in chunks(names):
        pipeline = server.client.pipeline(transaction=False)
        for one in part:
            pipeline.unlink(one.raw, shaping_name(one.raw), line_name(one.raw))
        deleted += [one for one, count in zip(part, pipeline.execute(), strict=True) if count]
    return deleted
