"""The commands of concurrency limits: calls of the scripts `hold`, `renew`, `free` and `holders`.

The slots of a resource are a sorted set, `prefix:{resource}:slots`: who holds one, scored by the
deadline until which it is held, and who waits for one (lua/README.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..ring.command import Command, Reply, ScriptReply, time_argument
from ..ring.key import parse_name

_NAME = re.compile(rb"\{([^{}]*)\}([^{}]*):slots", re.DOTALL)

MAX_HOLDERS = 1000
"""Holders that one `renew` or `free` may name."""
MAX_PLACES = 8
"""Places that a process may have in a line."""
PLACE_MS = 1000
"""For how long it has them after it has asked."""
MAX_OWNER_CHARS = 32
"""Characters of the owner in a holder's name. With them a name is about 64 bytes long, and so a
sorted set of up to 128 holders keeps its compact form (`zset-max-listpack-value`)."""


def parse_slots_name(prefix: str, name: bytes) -> str | None:
    """Return the text of the key of these slots (`{tag}resource`); None if not of this prefix."""
    return parse_name(prefix, name, _NAME)


class HolderName(NamedTuple):
    """The name of a holder in the store. Its id is one that no other holder has."""

    limit: int
    ttl_ms: int
    id: str
    """Letters, digits and points; up to the first point it names the process."""
    owner: str
    """The process, for people: printable ASCII without spaces."""

    def encode(self) -> bytes:
        """Return the member of the sorted set."""
        return f"{self.limit}:{self.ttl_ms}:{self.id}:{self.owner[:MAX_OWNER_CHARS]}".encode()

    @classmethod
    def parse(cls, member: bytes) -> HolderName | None:
        """Return the name in a member of the sorted set; None if it has another form."""
        words = member.decode("ascii", "replace").split(":", 3)
        if len(words) < 4 or not all(words) or not all(map(str.isdecimal, words[:2])):
            return None
        return cls(int(words[0]), int(words[1]), *words[2:])


class HoldReply(NamedTuple):
    """The reply of `hold`."""

    granted: bool
    """True if the holder has a slot now."""
    held: int
    """The number of holders."""
    ends_ms: int
    """Time until the holder's own deadline; if refused, until the first deadline of the others."""
    now_ms: int
    """The store's time."""
    ahead: int = 0
    """If refused: how many places in the line are before this one."""
    age_ms: int = 0
    """If refused: how long ago a slot was granted or renewed the last time."""


class RenewReply(NamedTuple):
    """The reply of `renew`."""

    gone: tuple[int, ...]
    """The indexes, from 0, of the holders that have no slot any more."""
    now_ms: int


class FreeReply(NamedTuple):
    """The reply of `free`."""

    freed: int
    """The number of the holders that had a slot."""
    now_ms: int


class HoldersReply(NamedTuple):
    """The reply of `holders`."""

    ends_ms: dict[bytes, int]
    """Time until the deadline of each holder; the first deadline first."""
    now_ms: int


@dataclass(slots=True, eq=False)
class SlotCommand(Command[Reply]):
    """A command on the slots of one resource. `charges` is empty, as nothing is charged."""

    slots_name: bytes = b""

    @property
    def keys(self) -> list[bytes]:
        return [self.slots_name]


@dataclass(slots=True, eq=False)
class Hold(SlotCommand[HoldReply]):
    """Give `holder` a slot for `ttl_ms`, unless as many as `limit` are held, or those before it in
    the line can use all that are free. May be sent again: a holder keeps its slot for longer then.
    """

    script: ClassVar[str] = "hold"

    limit: int = 1
    ttl_ms: int = 1
    holder: bytes = b""
    is_head: bool = False
    """True if it asks as the first of its process that waits; else all places are before it."""
    waited_ms: tuple[int, ...] = ()
    """How long each has waited that gets a place in the line if this is refused: of a head, the
    first waiters of its process, itself before all, which lose the places that they have; if it is
    granted, those behind it get places. Of another, only itself, and only while its process has no
    place. Empty: none gets one.
    """

    def arguments(self) -> list[bytes | int | str]:
        arguments: list[bytes | int | str] = [self.limit, self.ttl_ms, self.holder]
        if self.is_head or self.waited_ms:
            asks = "head" if self.is_head else "new"
            now: int | str = "" if self.now_ms is None else self.now_ms
            return [*arguments, now, asks, *self.waited_ms]
        return arguments if self.now_ms is None else [*arguments, self.now_ms]

    def reply(self, raw: ScriptReply) -> HoldReply:
        return HoldReply(bool(raw[3]), raw[1], raw[4], raw[2], *raw[5:])


@dataclass(slots=True, eq=False)
class Renew(SlotCommand[RenewReply]):
    """Extend the slots of `holders` to `ttl_ms` from now. One without a slot gets none."""

    script: ClassVar[str] = "renew"
    writes: ClassVar[bool] = False

    ttl_ms: int = 1
    holders: tuple[bytes, ...] = ()

    def arguments(self) -> list[bytes | int | str]:
        return [self.ttl_ms, time_argument(self.now_ms), *self.holders]

    def reply(self, raw: ScriptReply) -> RenewReply:
        return RenewReply(tuple(place - 1 for place in raw[3:]), raw[2])


@dataclass(slots=True, eq=False)
class Free(SlotCommand[FreeReply]):
    """Take the slots of `holders` from them. May be sent again."""

    script: ClassVar[str] = "free"
    writes: ClassVar[bool] = False

    holders: tuple[bytes, ...] = ()

    def arguments(self) -> list[bytes | int | str]:
        return ["" if self.now_ms is None else self.now_ms, *self.holders]

    def reply(self, raw: ScriptReply) -> FreeReply:
        return FreeReply(raw[1], raw[2])


@dataclass(slots=True, eq=False)
class Holders(SlotCommand[HoldersReply]):
    """List the holders; nothing is written."""

    script: ClassVar[str] = "holders"
    writes: ClassVar[bool] = False

    def arguments(self) -> list[bytes | int | str]:
        return [] if self.now_ms is None else [self.now_ms]

    def reply(self, raw: ScriptReply) -> HoldersReply:
        found = raw[3]
        return HoldersReply(dict(zip(found[::2], found[1::2], strict=True)), raw[2])


SLOT_COMMANDS: dict[str, type[SlotCommand[Any]]] = {
    command.script: command for command in (Hold, Renew, Free, Holders)
}
"""Every command on slots by the name of its script."""
