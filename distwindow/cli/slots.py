"""The slots of concurrency limits, as `stats` shows them and `reset` deletes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis

from distwindow import Holder

from ..protocol.keys import RingNameParts
from ..protocol.slot_commands import HolderName
from .key_text import json_text, shell_word
from .render import bar, printable, usage_color
from .scan import Page, scan_names
from .selection import Selection
from .servers import Server
from .table import Column, Table

_PIPELINE_SIZE = 500
_BAR_WIDTH = 10
_MAX_OWNERS = 4


class HeldSlots(NamedTuple):
    """The slots of one key that are held."""

    key: str
    limit: int
    """As the holder uses it that was renewed last."""
    holders: tuple[Holder, ...]
    """The first deadline first."""
    lost: int
    """Slots that were neither freed nor renewed in time: their process has ended, or hangs."""


def find_slots(server: Server, prefix: str, selection: Selection) -> Page:
    """Return the names of the selected slots on one server."""
    # A sorted set with the name of a ring is not distwindow's.
    pages = scan_names(server, prefix, selection, redis_type="zset")
    found = {name: key for page in pages for name, (_, key) in page.slots.items()}
    return [(name, RingNameParts(key, 0, 0)) for name, key in found.items()]


def is_slots_name(name: bytes) -> bool:
    """True for the name of slots, among those of rings and slots."""
    return name.endswith(b":slots")


def read_slots(found: Mapping[bytes, tuple[Server, str]]) -> list[HeldSlots]:
    """Return the slots of these names that are held or lost."""
    by_server: dict[int, list[bytes]] = {}
    servers = {id(server): server for server, _ in found.values()}
    for name, (server, _) in found.items():
        by_server.setdefault(id(server), []).append(name)
    return [
        HeldSlots(found[name][1], limit, holders, lost)
        for server_id, names in by_server.items()
        for name, limit, holders, lost in _read(servers[server_id], names)
    ]


def slots_rank(one: HeldSlots) -> tuple[int, int, str]:
    """Return what keys are sorted by: those with most slots lost, then most held."""
    return -one.lost, -len(one.holders), one.key


def _read(
    server: Server, names: Sequence[bytes]
) -> Iterator[tuple[bytes, int, tuple[Holder, ...], int]]:
    for at in range(0, len(names), _PIPELINE_SIZE):
        part = names[at : at + _PIPELINE_SIZE]
        pipeline = server.client.pipeline(transaction=False)
        pipeline.time()
        for name in part:
            pipeline.zrange(name, 0, -1, withscores=True)
        (seconds, micros), *replies = pipeline.execute(raise_on_error=False)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        for name, members in zip(part, replies, strict=True):
            if isinstance(members, Exception):
                # A key of another type, or one whose slot was moved meanwhile, is skipped.
                is_known = re.search(r"WRONGTYPE|MOVED|ASK", str(members))
                if not is_known or not isinstance(members, redis.RedisError):
                    raise members
                continue
            parsed = [(HolderName.parse(member), score - now_ms) for member, score in members]
            named = [(holder, left) for holder, left in parsed if holder is not None]
            if named:
                live = tuple(Holder(one.owner, left / 1000) for one, left in named if left > 0)
                yield name, named[-1][0].limit, live, len(named) - len(live)


def slots_table(slots: Sequence[HeldSlots], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key."""
    columns = [
        Column("KEY"),
        Column("SLOTS", align_right=True, omit_order=2),
        Column("HELD", align_right=True),
        Column("", omit_order=3, name="bar"),
    ]
    with_lost = any(one.lost for one in slots)
    columns += [Column("LOST", align_right=True)] * with_lost + [Column("HELD BY", omit_order=1)]
    rows = []
    for one in slots:
        share = len(one.holders) / max(1, one.limit)
        rows.append(
            [
                (shell_word(one.key), ""),
                (f"{one.limit:,}", "dim"),
                (f"{len(one.holders):,}", usage_color(share)),
                (bar(share, _BAR_WIDTH), usage_color(share)),
                *[(f"{one.lost:,}", "red" if one.lost else "")] * with_lost,
                (_owners(one.holders), "dim"),
            ]
        )
    return Table(columns, rows, width, after=after)


def _owners(holders: Sequence[Holder]) -> str:
    """Return who holds most slots: `web-1:4242 (3), web-2:4310`."""
    counted = Counter(holder.name for holder in holders).most_common()
    shown = [
        f"{printable(name)} ({count})" if count > 1 else printable(name)
        for name, count in counted[:_MAX_OWNERS]
    ]
    rest = len(counted) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def slots_object(slots: HeldSlots) -> dict[str, Any]:
    """Return the slots of a key for JSON."""
    return {
        "key": json_text(slots.key),
        "slots": slots.limit,
        "held": len(slots.holders),
        "lost": slots.lost,
        "holders": [
            {"name": holder.name, "expires_in": holder.expires_in} for holder in slots.holders
        ],
    }
