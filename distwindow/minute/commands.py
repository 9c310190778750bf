"""The commands of minute views: calls of the scripts `view_flush` and `view_read`.

The views of a key are one hash, `prefix:{resource}:minute` (lua/README.md). That name does not end
like a ring's, so nothing takes one for the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..errors import ConfigurationError
from ..ring.command import Command, ScriptReply
from ..ring.key import AnyKey, parse_name, ring_name_prefix, senders_name
from ..ring.replies import hash_fields
from ..ring.stats import Bucket
from .view import ALL_ORIGINS, SECONDS

_VIEWS = re.compile(rb"\{([^{}]*)\}([^{}]*):minute", re.DOTALL)


def views_name(prefix: str, key: AnyKey) -> bytes:
    """Return the Redis key of the minute views of `key`."""
    return ring_name_prefix(prefix, key) + b":minute"


class ViewsNameParts(NamedTuple):
    """The parts of the Redis key of minute views."""

    key: str
    """As `unescape` has it; of a tagged key `{tag}resource`."""
    is_senders: bool
    """True if it is the key of their sender records."""


def parse_views_name(prefix: str, name: bytes) -> ViewsNameParts | None:
    """Return the parts of the Redis key of minute views; None if it is not one of this prefix."""
    views = name.removesuffix(b":senders")
    key = parse_name(prefix, views, _VIEWS)
    return None if key is None else ViewsNameParts(key, views != name)


class ViewFlushReply(NamedTuple):
    """The reply of `view_flush`."""

    taken: bool
    """True if the counts were added; False if they were before, or are over a minute old."""
    now_ms: int


class ViewReadReply(NamedTuple):
    """The reply of `view_read`: the seconds of the last minute by origin, and the store's time."""

    views: dict[str, tuple[Bucket, ...]]
    now_ms: int


@dataclass(slots=True, eq=False)
class ViewFlush(Command[ViewFlushReply]):
    """The counts of entries of one process, by origin and second. `charges` is empty.

    The views take each `seq` (rising) of a `sender` (hexadecimal) once, so that a flush whose
    outcome is unknown can be sent again; without a sender they take every flush.
    """

    script: ClassVar[str] = "view_flush"

    name: bytes = b""
    counts: tuple[tuple[str, tuple[Bucket, ...]], ...] = ()
    """By origin; those of `ALL_ORIGINS` are of entries without one."""
    sender: str = ""
    seq: int = 0
    max_origins: int = 100

    @property
    def keys(self) -> list[bytes]:
        return [self.name, senders_name(self.name)]

    def arguments(self) -> list[bytes | int | str]:
        arguments: list[bytes | int | str] = [
            "" if self.now_ms is None else self.now_ms,
            self.sender,
            self.seq,
            self.max_origins,
        ]
        for origin, buckets in self.counts:
            arguments += (origin.encode("utf-8", "surrogatepass"), _counts_argument(buckets))
        return arguments

    def reply(self, raw: ScriptReply) -> ViewFlushReply:
        return ViewFlushReply(bool(raw[1]), raw[2])


@dataclass(slots=True, eq=False)
class ViewRead(Command[ViewReadReply]):
    """The views of a key."""

    script: ClassVar[str] = "view_read"
    writes: ClassVar[bool] = False

    name: bytes = b""

    @property
    def keys(self) -> list[bytes]:
        return [self.name]

    def arguments(self) -> list[bytes | int | str]:
        return ["" if self.now_ms is None else self.now_ms]

    def reply(self, raw: ScriptReply) -> ViewReadReply:
        try:
            return ViewReadReply(parse_views(hash_fields(raw[3]), raw[2]), raw[2])
        except ValueError as exc:
            name = self.name.decode("utf-8", "backslashreplace")
            raise ConfigurationError(
                f"the hash {name!r} holds no minute views ({exc}); use a prefix that no other "
                "program uses"
            ) from exc


VIEW_COMMANDS: dict[str, type[Command[ViewFlushReply] | Command[ViewReadReply]]] = {
    "view_flush": ViewFlush,
    "view_read": ViewRead,
}
"""Every command on minute views by the name of its script."""


def parse_views(fields: dict[bytes, bytes], now_ms: int) -> dict[str, tuple[Bucket, ...]]:
    """Return the seconds of the last minute in a hash of these fields, by origin, oldest first."""
    views = {
        field.decode("utf-8", "surrogatepass"): [
            _parse_second(words.split()) for words in value.split(b";")[:-1]
        ]
        for field, value in fields.items()
    }
    newest = now_ms // 1000 * 1000
    stored = views.get(ALL_ORIGINS)
    if stored:
        if stored[0].start - newest > SECONDS * 1000:
            return {}  # the clock was set back far
        newest = max(newest, stored[0].start)
    live = {
        origin: tuple(b for b in reversed(buckets) if b.start > newest - SECONDS * 1000)
        for origin, buckets in views.items()
    }
    return {origin: buckets for origin, buckets in live.items() if buckets}


def _parse_second(words: Sequence[bytes]) -> Bucket:
    second, passed, blocked, success, error, rt_sum, rt_min = map(int, words)
    least = rt_min if success or error else None
    return Bucket(second * 1000, passed, blocked, success, error, rt_sum, least)


def _counts_argument(buckets: Sequence[Bucket]) -> str:
    return "".join(
        f"{b.start // 1000} {b.passed} {b.blocked} {b.success} {b.error} {b.rt_sum_ms} "
        f"{b.rt_min_ms or 0};"
        for b in buckets
    )
