"""A scan of all rings of a prefix that does not hold up other clients of the server.

SCAN returns about 500 names at a time, a page. Their rings are read in a pipeline without MULTI, so
the server executes commands of others in between. No more than one page is held in memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from distwindow import ConfigurationError, Limit, WindowStats

from ..core.stats import window_at
from ..protocol.breaker_commands import parse_breaker_name
from ..protocol.keys import (
    RingNameParts,
    is_line_name,
    is_operator_limits_name,
    is_priority_name,
    is_senders_name,
    parse_ring_name,
    ring_of_shaping,
    shaping_name,
)
from ..protocol.replies import ring_state
from ..protocol.shaping_hash import shaped_limit, shaping_state
from ..protocol.slot_commands import parse_slots_name
from ..protocol.view_commands import parse_views_name
from .breakers import BreakerName
from .selection import Selection, ring_key_prefix
from .servers import Server

_SCAN_COUNT = 500
_PIPELINE_SIZE = 500

Page = list[tuple[bytes, RingNameParts]]
"""Names of rings, as Redis keys and parsed."""


class Ring(NamedTuple):
    """A ring that was read."""

    server: Server
    key_prefix: bytes
    name: RingNameParts
    window: WindowStats
    now_ms: int
    """The server's time when it was read: ms since the epoch."""
    is_expired: bool = False
    """True if only the promised moment or the tokens of its limit are still kept."""


@dataclass
class ScanCounts:
    """What a scan has met so far."""

    names: int = 0
    rings: int = 0
    expired: int = 0
    """Rings that expired between SCAN and reading."""
    foreign: int = 0
    """Names under the prefix that are not rings, by their form, type or content."""
    breakers: list[BreakerName] = field(default_factory=list)
    """The selected circuit breakers: names under the prefix that are no rings."""
    slots: dict[bytes, tuple[Server, str]] = field(default_factory=dict)
    """The selected slots of concurrency limits, by name: their server, and the text of the key."""
    shaped: Page = field(default_factory=list)
    """The selected rings of which the last page has the promised moment or the tokens."""
    on_progress: Callable[[int], None] = field(default=lambda names: None)
    """Called with `names` after every page."""


def scan_names(
    server: Server,
    prefix: str,
    selection: Selection,
    counts: ScanCounts,
    redis_type: str | None = None,
    *,
    with_shaping: bool = False,
) -> Iterator[Page]:
    """Yield the names of the selected rings on one server, page by page. SCAN may return a name
    twice. `with_shaping`: also the name of a ring of which the promised moment or the tokens are
    kept; the ring itself may have expired.
    """
    cursor = 0
    while True:
        cursor, found = server.client.scan(
            cursor, match=selection.scan_pattern, count=_SCAN_COUNT, _type=redis_type
        )
        page: Page = []
        for name in found:
            if is_senders_name(prefix, name) or parse_views_name(prefix, name) is not None:
                continue
            if is_line_name(prefix, name) or is_priority_name(prefix, name):
                continue
            if is_operator_limits_name(prefix, name):
                continue
            slots_key = parse_slots_name(prefix, name)
            if slots_key is not None:
                if selection.includes(ring_key_prefix(name), slots_key):
                    counts.slots[name] = server, slots_key
                continue
            shaped = ring_of_shaping(prefix, name)
            name = shaped or name
            ring = parse_ring_name(prefix, name)
            breaker = None if ring is not None else parse_breaker_name(prefix, name)
            if breaker is not None:
                if not breaker.is_senders and selection.includes(b"", breaker.key):
                    counts.breakers.append(BreakerName(server, name, breaker))
            elif ring is None:
                counts.foreign += 1
            elif selection.includes(ring_key_prefix(name), ring.key):
                (page if shaped is None or with_shaping else counts.shaped).append((name, ring))
        counts.names += len(found)
        counts.on_progress(counts.names)
        if page or counts.shaped:
            yield page
        if cursor == 0:
            return


def scan_rings(
    servers: Sequence[Server], prefix: str, selection: Selection, counts: ScanCounts
) -> Iterator[Ring]:
    """Yield every selected ring on all servers. Those of limits that are paced or warm up come
    once more, with their shaping: the scan has its name, too.
    """
    for server in servers:
        for page in scan_names(server, prefix, selection, counts):
            yield from read_rings(server, page, counts)
            shaped, counts.shaped = counts.shaped, []
            for ring in read_rings(server, shaped, ScanCounts(), with_shaping=True):
                counts.rings += ring.is_expired  # the others are counted by their own names
                yield ring


def read_rings(
    server: Server,
    page: Sequence[tuple[bytes, RingNameParts]],
    counts: ScanCounts,
    *,
    with_shaping: bool = False,
) -> Iterator[Ring]:
    """Yield the rings of these names that still exist. `with_shaping`: with the promised moment and
    the tokens of their limits, also where only these are left.
    """
    for at in range(0, len(page), _PIPELINE_SIZE):
        part = page[at : at + _PIPELINE_SIZE]
        pipeline = server.client.pipeline(transaction=False)
        pipeline.time()
        for raw, _ in part:
            pipeline.hgetall(raw)
        for raw, _ in part if with_shaping else ():
            pipeline.hgetall(shaping_name(raw))
        (seconds, micros), *replies = _execute(pipeline)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        shapings = replies[len(part) :] if with_shaping else [{}] * len(part)
        for (raw, name), fields, shaping in zip(part, replies[: len(part)], shapings, strict=True):
            if not fields and not shaping:
                counts.expired += 1
                continue
            window = _window(name, fields, shaping, now_ms)
            if window is None:
                counts.foreign += 1
                continue
            counts.rings += 1
            yield Ring(server, ring_key_prefix(raw), name, window, now_ms, not fields)


def _execute(pipeline: Any) -> list[Any]:
    """Return the replies; those about one key alone may be errors."""
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    for reply in replies:
        # A key that is not a ring gives WRONGTYPE, and a slot may be moved meanwhile.
        if isinstance(reply, Exception) and not re.search(r"WRONGTYPE|MOVED|ASK", str(reply)):
            raise reply
    if isinstance(replies[0], Exception):
        raise replies[0]
    return replies


def _window(name: RingNameParts, fields: Any, shaping: Any, now_ms: int) -> WindowStats | None:
    """Return the window that the hash of a ring holds, and the one of its shaping; None where they
    are not those of a ring.
    """
    if isinstance(fields, redis.RedisError) or isinstance(shaping, redis.RedisError):
        return None
    try:
        state = ring_state(fields, name.bucket_ms, name.span)
        limit = None if state is None else _limit(state.limit, name.bucket_ms, name.span)
        shaped = shaped_limit(shaping, name.bucket_ms, name.span)
        # Another limit in the ring was used later: a call of a shaped limit writes both.
        if shaped is not None and (limit is None or _is_same(limit, shaped)):
            return window_at(state, shaped, now_ms, shaping_state(shaping))
        return None if limit is None else window_at(state, limit, now_ms)
    except (ConfigurationError, ArithmeticError, ValueError):
        return None


def _is_same(limit: Limit, shaped: Limit) -> bool:
    return (limit.amount, limit.bound) == (shaped.amount, shaped.bound)


@functools.lru_cache(maxsize=1024)
def _limit(limit_field: str, bucket_ms: int, span: int) -> Limit:
    """Return a ring's limit, from `RingState.limit` ("100 leap") and from the ring's name."""
    amount, _, bound = limit_field.partition(" ")
    buckets = span - 1 if bound == "strict" else span
    per = bucket_ms * buckets / 1000
    return Limit(int(amount), per, buckets, "strict" if bound == "strict" else "leap")
