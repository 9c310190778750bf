"""The commands on what an upstream has said: calls of the scripts `upstream_pause` and
`upstream_lower`.

The pause of a key is a hash, `prefix:{key}:pause`; it is there from the first refusal of the
upstream until the fleet sends as before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from ..ring.command import Command, ScriptReply, ring_arguments, time_argument
from ..ring.key import AnyKey, parse_name, ring_name_prefix

_PAUSE = b":pause"
_NAME = re.compile(rb"\{([^{}]*)\}([^{}]*):pause", re.DOTALL)


def pause_name(prefix: str, key: AnyKey) -> bytes:
    """Return the Redis key of the pause of `key`."""
    return ring_name_prefix(prefix, key) + _PAUSE


def parse_pause_name(prefix: str, name: bytes) -> str | None:
    """Return the text of the key of this pause (`{tag}resource`); None if not of this prefix."""
    return parse_name(prefix, name, _NAME)


SEND, PROBE, PAUSED, ASK_AGAIN, SEND_ONE = 0, 1, 2, 3, 4
"""What `upstream_pause` answers: send; send, as the only one of the fleet; nobody sends for
`wait_ms`; ask again after `wait_ms`, because another process probes, or the fleet comes back; send
this call, and ask for the next one, because the fleet comes back."""


What = Literal["ask", "tell", "ok", "free"]


class PauseReply(NamedTuple):
    """The reply of `upstream_pause`."""

    state: int
    now_ms: int
    wait_ms: int = 0
    """How long nobody of the fleet sends, or until the caller should ask again."""
    said_ms: int = 0
    """For how long the upstream has asked to wait, from now on, however long that is; while another
    process probes, for how long that may take."""


@dataclass(slots=True, eq=False)
class PauseCommand(Command[PauseReply]):
    """What one process asks of the pause of a key, or tells. `charges` is empty."""

    script: ClassVar[str] = "upstream_pause"
    writes: ClassVar[bool] = False

    name: bytes = b""
    what: What = "ask"
    """`ask`: may this call be sent; `tell`: it was refused; `ok`: it was not; `free`: it has had no
    answer. The last two say something only of the probe."""
    call: str = ""
    """Names the call, among all of the fleet: letters and digits."""
    first_ms: int = 0
    """Of `ask`: for how long the call is the probe, if it is. Of `tell`: for how long the upstream
    has asked to wait; 0: it has not said. Of `ok`: when it became the probe, ms since the epoch."""
    second_ms: int = 0
    """Of `tell`: the longest pause."""
    jitter: int = 0
    """Of `tell`: by how many thousandths the pause is longer than said."""

    @property
    def keys(self) -> list[bytes]:
        return [self.name]

    def arguments(self) -> list[bytes | int | str]:
        return [
            time_argument(self.now_ms), self.what, self.call, self.first_ms, self.second_ms,
            self.jitter,
        ]  # fmt: skip

    def reply(self, raw: ScriptReply) -> PauseReply:
        return PauseReply(raw[1], raw[2], *raw[3:])


class LowerReply(NamedTuple):
    """The reply of `upstream_lower`."""

    added: tuple[int, ...]
    """The permits by which each ring was raised."""
    now_ms: int


@dataclass(slots=True, eq=False)
class Lower(Command[LowerReply]):
    """Have each ring of `charges` count at least `cost` permits in its window, and at most its
    limit: what others have used. To send it again changes nothing."""

    script: ClassVar[str] = "upstream_lower"
    writes: ClassVar[bool] = False

    resets_ms: tuple[int, ...] = ()
    """Of each ring: for how long what is added counts, rounded up to its buckets; 0: as long as a
    call of now."""

    def arguments(self) -> list[bytes | int | str]:
        return [*ring_arguments(self.charges), time_argument(self.now_ms), *self.resets_ms]

    def reply(self, raw: ScriptReply) -> LowerReply:
        return LowerReply(tuple(raw[3:]), raw[2])


UPSTREAM_COMMANDS: tuple[type[Command[Any]], ...] = (PauseCommand, Lower)
