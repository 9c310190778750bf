"""A scan of all names of a prefix that does not hold up other clients of the server.

SCAN looks at about a thousand names at a time, a page. No more than one page is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..breaker.commands import BreakerNameParts, parse_breaker_name
from ..concurrency.commands import parse_slots_name
from ..minute.commands import parse_views_name
from ..ring.key import (
    LINE,
    SENDERS,
    SHAPING,
    RingNameParts,
    parse_ring_name,
    ring_beside,
)
from ..upstream.commands import parse_pause_name
from .selection import Selection, key_prefix_of
from .servers import Server

SCAN_COUNT = 1000

RingName = tuple[bytes, RingNameParts]
"""The name of a ring, as Redis key and parsed."""


@dataclass
class NamePage:
    """The selected names of one page, by what they name. SCAN may return a name twice."""

    server: Server
    names: int
    """All names of the page, also those that are not selected."""
    rings: list[RingName] = field(default_factory=list)
    shaped: list[RingName] = field(default_factory=list)
    """The rings whose promised moment or tokens are kept; such a ring itself may have expired."""
    views: dict[bytes, str] = field(default_factory=dict)
    """Minute views, by name: the text of the key."""
    slots: dict[bytes, str] = field(default_factory=dict)
    """The slots of concurrency limits, by name: the text of the key."""
    breakers: dict[bytes, BreakerNameParts] = field(default_factory=dict)
    pauses: dict[bytes, str] = field(default_factory=dict)
    """What upstreams have asked to wait, by name: the text of the key."""
    foreign: int = 0
    """Names under the prefix that are none of distwindow's."""


def scan_names(
    server: Server, prefix: str, selection: Selection, redis_type: str | None = None
) -> Iterator[NamePage]:
    """Yield the names on one server, page by page."""
    cursor = 0
    while True:
        cursor, found = server.client.scan(
            cursor, match=selection.scan_pattern, count=SCAN_COUNT, _type=redis_type
        )
        page = NamePage(server, len(found))
        for name in found:
            # Most names are those of rings, which are no other's.
            ring = parse_ring_name(prefix, name)
            if ring is None:
                _add(page, prefix, name, selection)
            elif selection.includes(name.rsplit(b":", 2)[0], ring.key):
                page.rings.append((name, ring))
        yield page
        if cursor == 0:
            return


def _add(page: NamePage, prefix: str, name: bytes, selection: Selection) -> None:
    """Add a name that is not that of a ring, if it is selected."""
    if (shaped := ring_beside(prefix, name, SHAPING)) is not None:
        ring = parse_ring_name(prefix, shaped)
        if ring is not None and selection.includes(key_prefix_of(shaped), ring.key):
            page.shaped.append((shaped, ring))
    elif (views := parse_views_name(prefix, name)) is not None:
        if not views.is_senders and selection.includes(name.rsplit(b":", 1)[0], views.key):
            page.views[name] = views.key
    elif (slots_key := parse_slots_name(prefix, name)) is not None:
        if selection.includes(key_prefix_of(name), slots_key):
            page.slots[name] = slots_key
    elif (pause_key := parse_pause_name(prefix, name)) is not None:
        if selection.includes(key_prefix_of(name), pause_key):
            page.pauses[name] = pause_key
    elif (breaker := parse_breaker_name(prefix, name)) is not None:
        if not breaker.is_senders and selection.includes(key_prefix_of(name), breaker.key):
            page.breakers[name] = breaker
    elif all(ring_beside(prefix, name, ending) is None for ending in (SENDERS, LINE)):
        page.foreign += 1
