"""A command: the call of one script, as a frame of Redis's protocol; and the scripts themselves."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pkgutil
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from ..errors import ConfigurationError
from .decision import Charge

Reply = TypeVar("Reply")
C = TypeVar("C", bound="Command[Any]")
ScriptReply: TypeAlias = "Sequence[Any]"
"""A script's reply as RESP has it: the stamp, then integers; `read` and `flush` append lists."""
STAMP_BYTES = 20
"""13 digits of ms, a point, 6 digits of nonce."""
STAMP_LENGTH = b"$%d\r\n" % STAMP_BYTES
NO_DEADLINE_MS = 9_999_999_999_999
"""The deadline in a stamp as long as the time of the server is unknown (year 2286)."""
_NONCES = 1_000_000


@dataclass(slots=True, eq=False)
class Command(Generic[Reply]):
    """One script call. `now_ms` is the client's time with `clock="client"`; with None the script
    uses the server's.

    A command is equal only to itself. Callers of one key use one command object, so that stores can
    let them share a script call. Therefore it is never changed, except for what it caches. (As a
    frozen dataclass it would take three times as long to make, and each new key makes two.)

    It is one EVALSHA, a frame in RESP. The first argument is the *stamp*, `<deadline ms>.<nonce>`.
    The script does nothing once the server's clock has passed the deadline, and its reply begins
    with the stamp, so that a reply that belongs to another call (client libraries have crossed
    replies) is never used. The stamp is one word because each argument costs the server 0.1 us.

      1700000000250.000042
      |             |
      |             nonce: a reply that begins with another stamp belongs to another call
      deadline: the server's time after which the script does nothing
    """

    script: ClassVar[str]
    writes: ClassVar[bool] = True
    """False if a reply does not show that the server writes: the script only reads or frees, which
    servers do that refuse to write, or may have done no more than that.
    """

    charges: tuple[Charge, ...]
    now_ms: int | None = None
    hash_slot: int | None = field(default=None, init=False, repr=False)
    """The slot of its rings in a Redis Cluster, once a store has computed it."""

    def has_written(self, now_ms: int) -> bool:
        """Return whether its reply, at the store's time `now_ms`, shows that the server writes."""
        return self.writes

    @property
    def keys(self) -> list[bytes]:
        """KEYS of the script."""
        return [charge.ring for charge in self.charges]

    def arguments(self) -> list[bytes | int | str]:
        """Return ARGV without the stamp, which is its first word: at least the client's time."""
        return [time_argument(self.now_ms)]

    def reply(self, raw: ScriptReply) -> Reply:
        """Return the script's reply, which begins with the stamp, as a named tuple."""
        raise NotImplementedError  # each script has a reply of its own

    def frame(self, stamp: bytes) -> bytes:
        """Return the EVALSHA in RESP."""
        return self._pack(b"EVALSHA", load_script(self.script).sha, stamp)

    def eval_frame(self, stamp: bytes) -> bytes:
        """Return an EVAL with the whole script, for a server that does not have the script."""
        return self._pack(b"EVAL", load_script(self.script).text, stamp)

    def with_time(self: C, now_ms: int) -> C:
        """Return this command with the client's time."""
        return replace(self, now_ms=now_ms)

    def _pack(self, verb: bytes, script: str, stamp: bytes) -> bytes:
        keys = self.keys
        words = [*keys, stamp, *self.arguments()]
        beginning = _beginning(verb, script, len(keys))
        return b"*%d\r\n%b%b" % (len(words) + 3, beginning, bulk_strings(words))


class ServerClock:
    """An estimate of one server's clock, from its time in the last reply and our time then.

    It is the last reply and not the fastest one, so that a step of the server's clock is corrected
    by the next reply. The server reads its clock before its reply arrives here, so the estimate is
    never ahead of the server, and a deadline by it is never later than the caller's own.
    """

    __slots__ = ("_counter", "answered_at", "enabled", "last_reply", "read_at")

    def __init__(self, *, enabled: bool = True) -> None:
        self._counter = itertools.count()
        self.last_reply: tuple[int, float] | None = None
        """The server's ms, and when they came (monotonic seconds); None at first. Set together."""
        self.answered_at = -math.inf
        """When the last call that writes was answered, monotonic seconds. A handshake is none."""
        self.read_at = -math.inf
        """When the last other call was answered, monotonic seconds."""
        self.enabled = enabled
        """False with clock="client": scripts do not look at the server's time."""

    def on_reply(self, command: Command[Any] | None, now_ms: int, at: float) -> None:
        """Note the server's time in a reply to `command` (None: it was not executed) that has come
        `at` (monotonic seconds).
        """
        if command is not None and command.has_written(now_ms):
            self.answered_at = at
        else:
            self.read_at = at
        self.last_reply = now_ms, at

    def new_stamp(self, deadline: float) -> bytes:
        """A new stamp, for a call that the server must not execute after `deadline` (monotonic
        seconds). It has `NO_DEADLINE_MS` until the first reply.
        """
        last = self.last_reply
        if last is None or not self.enabled:
            until_ms = NO_DEADLINE_MS
        else:
            now_ms, at = last
            until_ms = int(deadline * 1000 + (now_ms - at * 1000))
        return b"%013d.%06d" % (until_ms, next(self._counter) % _NONCES)


def is_later(stamp: bytes, other: bytes) -> bool:
    """Return whether `stamp` was made after `other`, by the same clock."""
    return 0 < (int(stamp[-6:]) - int(other[-6:])) % _NONCES < _NONCES // 2


class FrameParts:
    """The parts of a frame that do not depend on the key: before the keys, and after the stamp.
    Commands with the same limits, cost and number of calls share one of these, so that a new key
    costs only the packing of its own name. Empty until the first frame.
    """

    __slots__ = ("after_stamp", "before_keys")

    def __init__(self) -> None:
        self.before_keys = self.after_stamp = b""


@lru_cache(256)
def _beginning(verb: bytes, script: str, keys: int) -> bytes:
    """Return the words of a frame before its keys."""
    return bulk_strings([verb, script, keys])


def bulk_strings(words: Iterable[bytes | int | str]) -> bytes:
    """Return these words as RESP has them."""
    raws = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(raw), raw) for raw in raws])


def ring_arguments(charges: tuple[Charge, ...], calls: int = 1) -> list[bytes | int | str]:
    """Return (permits, limit, bucket_ms, shape) of each ring."""
    arguments: list[bytes | int | str] = []
    for _, limit, cost, _, _ in charges:
        shape = f"{limit.buckets}+1" if limit.bound == "strict" else limit.buckets
        arguments += (cost * calls, limit.amount, limit.bucket_ms, shape)
    return arguments


def time_argument(now_ms: int | None) -> int | str:
    """Return the client's time; '' where the server's is used."""
    return "" if now_ms is None else now_ms


_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r"^--@include (\S+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*(?:--.*)?\n", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script as it is sent."""

    text: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """Return the script `name`, with its include lines replaced by the pieces that they name.

    Comments and blank lines are removed, because EVAL sends the text and the server keeps it.
    """
    texts = lua_files()
    joined = _INCLUDE.sub(lambda line: texts[line[1]], texts[f"{name}.lua"])
    text = _COMMENT.sub("", joined)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def load_scripts() -> None:
    """Read all scripts now: what a handler raises in a read may be taken for a file's error."""
    for name in script_names():
        load_script(name)


def script_names() -> list[str]:
    """Return the names of all scripts, sorted."""
    return sorted(path[: -len(".lua")] for path in lua_files() if "/" not in path)


@cache
def lua_files() -> dict[str, str]:
    """Return the text of each `.lua` file, by its path in the folder; raise `ConfigurationError` if
    there is none. They are in `lua/` beside the package in a checkout, and in one file in a wheel
    (`hatch_build.py`), which may be imported from a zip archive (zipapp, PEX).
    """
    try:
        bundle = pkgutil.get_data(_PACKAGE.name, "lua.json")
    except OSError:  # a checkout
        bundle = None
    if bundle is not None:
        texts: dict[str, str] = json.loads(bundle)
        return texts
    folder = _PACKAGE.parent / "lua"
    # Not `Path.is_file`: it takes a `ValueError` of a signal handler for a missing file.
    if not os.access(folder / "acquire.lua", os.R_OK):
        raise ConfigurationError(
            f"distwindow's Lua scripts are missing: there is neither {_PACKAGE / 'lua.json'} nor "
            f"{folder / 'acquire.lua'}; reinstall distwindow"
        )
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.lua")
    }
