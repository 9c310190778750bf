"""The slots of concurrency limits: who holds them, and which are lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import redis

from ..concurrency.commands import HolderName
from ..concurrency.operations import Holder
from .servers import Server, chunks

_SKIPPED = re.compile("WRONGTYPE|MOVED|ASK")
"""Errors for a key of another type, and for one that was moved to another server meanwhile."""


class SlotUsage(NamedTuple):
    """The slots of one key that are held."""

    key: str
    limit: int
    """As the holder uses it that was renewed last."""
    holders: tuple[Holder, ...]
    """The first deadline first."""
    lost: int
    """Slots that were neither freed nor renewed in time: their process has ended, or hangs."""

    @property
    def rank(self) -> tuple[int, int, str]:
        """What keys are sorted by: those with most slots lost first, then most held."""
        return -self.lost, -len(self.holders), self.key


def read_slots(server: Server, names: Mapping[bytes, str]) -> list[SlotUsage]:
    """Return the slots of these names that are held or lost; each name has the text of its key."""
    usages = []
    for part in chunks(list(names)):
        pipeline = server.client.pipeline(transaction=False)
        pipeline.time()
        for name in part:
            pipeline.zrange(name, 0, -1, withscores=True)
        (seconds, micros), *replies = pipeline.execute(raise_on_error=False)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        for name, members in zip(part, replies, strict=True):
            if isinstance(members, redis.RedisError) and _SKIPPED.search(str(members)):
                continue
            if isinstance(members, Exception):
                raise members
            parsed = [(HolderName.parse(member), score - now_ms) for member, score in members]
            named = [(holder, left) for holder, left in parsed if holder is not None]
            if named:
                live = tuple(Holder(one.owner, left / 1000) for one, left in named if left > 0)
                limit, lost = named[-1][0].limit, len(named) - len(live)
                usages.append(SlotUsage(names[name], limit, live, lost))
    return usages
