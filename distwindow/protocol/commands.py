"""The language spoken with the scripts: commands, how they are sent, what comes back.

Every command is one EVALSHA. Its first argument is the *guard*, `<deadline ms>.<nonce>` in one
word because each argument costs the server 0.1 us: the script does nothing once the server's clock
has passed the deadline, and answers with the guard, so that a reply that belongs to another call
(client libraries have crossed replies) is never acted on.

A command says its script, its rings, and the arguments behind the guard; a reply is a named tuple.
`MemoryStore` executes the same commands, and a property test demands equal replies from all stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from ..core.charge import Charge
from ..core.key import AnyKey
from ..core.limit import Limit
from ..core.stats import Bucket
from .keys import ring_name, senders_name
from .replies import (
    AcquireReply,
    CountReply,
    FleetCounts,
    LeaseReply,
    ReadReply,
    _acquire_reply,
    _hash_fields,
    ring_state,
)
from .scripts import load_script

Reply = TypeVar("Reply")
C = TypeVar("C", bound="Command[Any]")


_MAX_CACHED_COMBINED = 64

GUARD_BYTES = 20
"""13 digits of ms, a point, 6 digits of nonce."""

CURRENT_BUCKET = 10**13
"""The start, in a `Flush`, of whatever bucket is the newest."""

NO_DEADLINE_MS = 9_999_999_999_999
"""Of a call whose server's clock is not known yet (year 2286)."""


def charges_of(key: AnyKey, stem: bytes, limits: Sequence[Limit], cost: int) -> tuple[Charge, ...]:
    """What a call of `cost` counts for `key` under `limits`."""
    return tuple(Charge(ring_name(stem, limit), limit, cost, key) for limit in limits)


@dataclass(frozen=True, slots=True, eq=False)
class Command(Generic[Reply]):
    """One script call. `now_ms` is the caller's clock where the server's is not to be asked.

    Equal only to itself: callers of one key use one command object, and share its script calls.
    """

    script: ClassVar[str]

    charges: tuple[Charge, ...]
    now_ms: int | None = None
    _packed: list[tuple[bytes, bytes]] = field(default_factory=list, repr=False, kw_only=True)

    @property
    def keys(self) -> list[bytes]:
        return [charge.ring for charge in self.charges]

    def arguments(self) -> list[bytes | int | str]:
        """ARGV behind the guard."""
        raise NotImplementedError

    def reply(self, raw: Sequence[Any]) -> Reply:
        """The reply from the script's, guard included."""
        raise NotImplementedError

    def frame(self, guard: bytes) -> bytes:
        """The EVALSHA of this command in RESP. A guard has 20 bytes, so the rest is packed once."""
        if not self._packed:
            self._packed.append(self._pack(b"EVALSHA", load_script(self.script).sha))
        head, tail = self._packed[0]
        return head + guard + tail

    def eval_frame(self, guard: bytes) -> bytes:
        """The same as an EVAL of the whole script, for a server that does not have it."""
        head, tail = self._pack(b"EVAL", load_script(self.script).text)
        return head + guard + tail

    def with_time(self: C, now_ms: int) -> C:
        """This command with the caller's time."""
        return replace(self, now_ms=now_ms, _packed=[])

    def _pack(self, verb: bytes, script: str) -> tuple[bytes, bytes]:
        """What goes before and behind the guard."""
        keys, arguments = self.keys, self.arguments()
        words = len(keys) + len(arguments) + 4
        opening: list[bytes | int | str] = [verb, script, len(keys), *keys]
        head = b"*%d\r\n%s$%d\r\n" % (
            words, b"".join(map(_bulk_string, opening)), GUARD_BYTES,
        )  # fmt: skip
        return head, b"\r\n" + b"".join(map(_bulk_string, arguments))


def _bulk_string(word: bytes | int | str) -> bytes:
    raw = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%s\r\n" % (len(raw), raw)


def _ring_arguments(charges: tuple[Charge, ...], calls: int = 1) -> list[bytes | int | str]:
    arguments: list[bytes | int | str] = []
    for _, limit, cost, _, _ in charges:
        shape = f"{limit.buckets}+1" if limit.bound == "strict" else limit.buckets
        arguments += (cost * calls, limit.amount, limit.bucket_ms, shape)
    return arguments


def _time_argument(now_ms: int | None) -> int | str:
    return "" if now_ms is None else now_ms


@dataclass(frozen=True, slots=True, eq=False)
class Acquire(Command[AcquireReply]):
    """`times` calls of the same cost, decided one after the other."""

    script: ClassVar[str] = "acquire"

    calls: int = 1
    store_limit: bool = False
    """Note the limits in their rings now (a ring's first call from this process), for `stats`."""

    _combined: dict[int, Acquire] = field(default_factory=dict, repr=False, kw_only=True)

    def arguments(self) -> list[bytes | int | str]:
        arguments = _ring_arguments(self.charges, self.calls)
        if self.store_limit:
            return [*arguments, self.calls, _time_argument(self.now_ms), 1]
        if self.now_ms is not None:
            return [*arguments, self.calls, self.now_ms]
        return [*arguments, self.calls] if self.calls > 1 else arguments

    def reply(self, raw: Sequence[Any]) -> AcquireReply:
        if len(raw) == 3:
            limit, left, now = self.charges[0].limit, raw[1], raw[2]
            width = limit.bucket_ms
            return AcquireReply(self.calls, 0, left, limit.span * width - now % width, 0, now)
        return _acquire_reply(raw, self.calls)

    def with_time(self, now_ms: int) -> Acquire:
        return replace(self, now_ms=now_ms, _packed=[], _combined={})

    def combined(self, calls: int) -> Acquire:
        """The one call that stands for `times` calls like this one."""
        if calls == 1:
            return self
        shared = self._combined.get(calls)
        if shared is None:
            shared = replace(self, calls=calls, _packed=[], _combined={})
            if calls <= _MAX_CACHED_COMBINED:
                self._combined[calls] = shared
        return shared


@dataclass(frozen=True, slots=True, eq=False)
class Peek(Command[AcquireReply]):
    """What `Acquire` would answer."""

    script: ClassVar[str] = "peek"

    def arguments(self) -> list[bytes | int | str]:
        return [*_ring_arguments(self.charges), 1, _time_argument(self.now_ms)]

    def reply(self, raw: Sequence[Any]) -> AcquireReply:
        return _acquire_reply(raw, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Lease(Command[LeaseReply]):
    """A call, and permits for its process to spend until the bucket ends.

    `quiet`: nobody has called yet, so a refusal is no block.
    """

    script: ClassVar[str] = "lease"

    extra: int = 0
    prefetch: bool = False

    def arguments(self) -> list[bytes | int | str]:
        ring = _ring_arguments(self.charges)
        return [*ring, 1, _time_argument(self.now_ms), self.extra, int(self.prefetch)]

    def reply(self, raw: Sequence[Any]) -> LeaseReply:
        if raw[1] < 0:
            return LeaseReply(_acquire_reply(raw, 1), 0, 0)
        return LeaseReply(_acquire_reply([*raw[:5], *raw[7:]], 1), raw[5], raw[6])


@dataclass(frozen=True, slots=True, eq=False)
class Flush(Command[FleetCounts]):
    """What a process has counted, by ring and bucket.

    A ring takes each `seq` (rising) of a `sender` (hexadecimal) once, so that a flush whose outcome
    is unknown can be sent again; without a sender it is taken whenever it is sent. With `pull` the
    reply tells what the whole fleet has passed.
    """

    script: ClassVar[str] = "flush"

    counts: tuple[tuple[Bucket, ...], ...] = ()
    sender: str = ""
    seq: int = 0
    pull: bool = False

    @property
    def keys(self) -> list[bytes]:
        rings = [charge.ring for charge in self.charges]
        return [*rings, *map(senders_name, rings)]

    def arguments(self) -> list[bytes | int | str]:
        ring = _ring_arguments(self.charges)
        parts = [_counts_argument(part) for part in self.counts] or [""] * len(self.charges)
        return [
            *ring,
            1,
            _time_argument(self.now_ms),
            self.sender,
            self.seq,
            int(self.pull),
            *parts,
        ]

    def reply(self, raw: Sequence[Any]) -> FleetCounts:
        passed = (dict(zip(part[::2], part[1::2], strict=True)) for part in raw[3:])
        return FleetCounts(tuple(passed), raw[2])


def _counts_argument(buckets: Sequence[Bucket]) -> str:
    return "".join(
        f"{b.start} {b.passed} {b.blocked} {b.success} {b.error} {b.rt_sum_ms} {b.rt_min_ms or 0};"
        for b in buckets
    )


@dataclass(frozen=True, slots=True, eq=False)
class Refund(Command[CountReply]):
    """Give back what was charged at `charged_ms`, out of the bucket of that time, or where a charge
    names its bucket, out of that.
    """

    script: ClassVar[str] = "refund"

    charged_ms: int = 0

    def bucket_starts_ms(self) -> list[int]:
        """The start of the bucket of each ring."""
        at = self.charged_ms
        return [
            at - at % c.limit.bucket_ms if c.bucket_start_ms is None else c.bucket_start_ms
            for c in self.charges
        ]

    def arguments(self) -> list[bytes | int | str]:
        return [
            *_ring_arguments(self.charges),
            1,
            _time_argument(self.now_ms),
            *self.bucket_starts_ms(),
        ]

    def reply(self, raw: Sequence[Any]) -> CountReply:
        return CountReply(raw[1], raw[2])


@dataclass(frozen=True, slots=True, eq=False)
class Read(Command[ReadReply]):
    """The rings as they are."""

    script: ClassVar[str] = "read"

    def arguments(self) -> list[bytes | int | str]:
        return [_time_argument(self.now_ms)]

    def reply(self, raw: Sequence[Any]) -> ReadReply:
        states = (
            ring_state(_hash_fields(fields), charge.limit.bucket_ms, charge.limit.span)
            for fields, charge in zip(raw[3:], self.charges, strict=True)
        )
        return ReadReply(tuple(states), raw[2])


@dataclass(frozen=True, slots=True, eq=False)
class Reset(Command[CountReply]):
    """Forget the rings."""

    script: ClassVar[str] = "reset"

    def arguments(self) -> list[bytes | int | str]:
        return [_time_argument(self.now_ms)]

    def reply(self, raw: Sequence[Any]) -> CountReply:
        return CountReply(raw[1], raw[2])


COMMANDS: dict[str, type[Command[Any]]] = {
    command.script: command for command in (Acquire, Lease, Peek, Flush, Refund, Read, Reset)
}
"""Every command by the name of its script."""
