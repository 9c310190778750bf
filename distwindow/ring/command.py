"""A command: the call of one script, as a frame of Redis's protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from .decision import Charge
from .scripts import load_script


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


# --------------------------------------------------------------------------------------------------
#
# What all commands have in common: one EVALSHA, and its frame in RESP.
#
# Its first argument is the *stamp*, `<deadline ms>.<nonce>`. The script does nothing once the
# server's clock has passed the deadline, and its reply begins with the stamp, so that a reply that
# belongs to another call (client libraries have crossed replies) is never used. The stamp is one
# word because each argument costs the server 0.1 us.

Reply = TypeVar("Reply")
C = TypeVar("C", bound="Command[Any]")


ScriptReply: TypeAlias = "Sequence[Any]"
"""A script's reply as RESP has it: the stamp, then integers; `read` and `flush` append lists."""

STAMP_BYTES = 20
"""13 digits of ms, a point, 6 digits of nonce."""
STAMP_LENGTH = b"$%d\r\n" % STAMP_BYTES

NO_DEADLINE_MS = 9_999_999_999_999
"""The deadline in a stamp as long as the time of the server is unknown (year 2286)."""


class FrameParts:
    """The parts of a frame that do not depend on the key: before the keys, and after the stamp.
    Commands with the same limits, cost and number of calls share one of these, so that a new key
    costs only the packing of its own name. Empty until the first frame.
    """

    __slots__ = ("after_stamp", "before_keys")

    def __init__(self) -> None:
        self.before_keys = self.after_stamp = b""


@dataclass(slots=True, eq=False)
class Command(Generic[Reply]):
    """One script call. `now_ms` is the client's time with `clock="client"`; with None the script
    uses the server's.

    A command is equal only to itself. Callers of one key use one command object, so that stores can
    let them share a script call. Therefore it is never changed, except for what it caches. (As a
    frozen dataclass it would take three times as long to make, and each new key makes two.)
    """

    script: ClassVar[str]

    charges: tuple[Charge, ...]
    now_ms: int | None = None
    _split_frame: tuple[bytes, bytes] | None = field(default=None, repr=False, kw_only=True)
    """The parts before and after the stamp in `frame`; None until the first call of it."""

    @property
    def keys(self) -> list[bytes]:
        """KEYS of the script."""
        return [charge.ring for charge in self.charges]

    def arguments(self) -> list[bytes | int | str]:
        """Return ARGV without the stamp, which is its first word."""
        raise NotImplementedError  # each command has arguments of its own

    def reply(self, raw: ScriptReply) -> Reply:
        """Return the script's reply, which begins with the stamp, as a named tuple."""
        raise NotImplementedError  # each script has a reply of its own

    def frame(self, stamp: bytes) -> bytes:
        """Return the EVALSHA in RESP. All stamps have 20 bytes, so what surrounds them is built
        once.
        """
        split = self._split_frame
        if split is None:
            split = self._split_frame = self._split_around_stamp()
        return split[0] + stamp + split[1]

    def eval_frame(self, stamp: bytes) -> bytes:
        """Return an EVAL with the whole script, for a server that does not have the script."""
        before_keys, after_stamp = self._frame_parts(b"EVAL", load_script(self.script).text)
        return before_keys + self._keys_frame() + stamp + after_stamp

    def with_time(self: C, now_ms: int) -> C:
        """Return this command with the client's time."""
        return replace(self, now_ms=now_ms, _split_frame=None)

    def _split_around_stamp(self) -> tuple[bytes, bytes]:
        """Return what comes before and after the stamp in an EVALSHA."""
        before_keys, after_stamp = self._frame_parts(b"EVALSHA", load_script(self.script).sha)
        return before_keys + self._keys_frame(), after_stamp

    def _frame_parts(self, verb: bytes, script: str) -> tuple[bytes, bytes]:
        """Return what comes before the keys, and what comes after the stamp."""
        keys, arguments = len(self.keys), self.arguments()
        opening = bulk_strings([verb, script, keys])
        words = bulk_strings(arguments)
        return b"*%d\r\n%s" % (keys + len(arguments) + 4, opening), b"\r\n" + words

    def _keys_frame(self) -> bytes:
        """Return the keys, and the length of the stamp, which follows them."""
        return bulk_strings(self.keys) + STAMP_LENGTH


def bulk_strings(words: Iterable[bytes | int | str]) -> bytes:
    """Return these words as RESP has them."""
    parts = []
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)
