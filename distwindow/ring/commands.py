"""Commands: the calls of the Lua scripts, their arguments, and how their replies are read.

A command has the name of its script, its rings, and the arguments behind the stamp (`command.py`);
its reply is a named tuple. `MemoryStore` executes the same commands, and a property test compares
the replies of all stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .command import (
    STAMP_BYTES,
    STAMP_LENGTH,
    Command,
    FrameParts,
    ScriptReply,
    bulk_strings,
    ring_arguments,
    time_argument,
)
from .decision import BorrowedCharge, Charge
from .key import AnyKey, ring_name, senders_name
from .limit import Limit, expires_in_ms
from .replies import (
    AcquireReply,
    CountReply,
    FleetCounts,
    LeaseReply,
    ReadReply,
    hash_fields,
    parse_acquire_reply,
    ring_state,
)
from .stats import Bucket

_NO_STAMP = bytes(STAMP_BYTES)
_MAX_CACHED_COMBINED = 64
"""An `Acquire` caches its combined commands up to this number of calls."""

CURRENT_BUCKET = 10**13
"""The start, in a `Flush`, of counts that belong in whatever bucket is the newest."""


def charges_of(
    key: AnyKey, key_prefix: bytes, limits: Sequence[Limit], cost: int
) -> tuple[Charge, ...]:
    """Return what a call of `cost` counts for `key` under `limits`."""
    return tuple(Charge(ring_name(key_prefix, limit), limit, cost, key) for limit in limits)


@dataclass(slots=True, eq=False)
class Acquire(Command[AcquireReply]):
    """`calls` calls of the same cost, decided one after the other."""

    script: ClassVar[str] = "acquire"
    has_own_moment: ClassVar[bool] = False
    """True if each call is promised a moment of its own: it neither borrows nor waits in a line."""

    calls: int = 1
    write_limit: bool = False
    """Store the limits in their rings, for `stats`: on the first call of a key in this process."""

    frame_parts: FrameParts | None = field(default=None, repr=False, kw_only=True)
    """Shared by commands that differ in their key only; None for a command on its own."""
    unleased_demand: Any = field(default=0.0, init=False, repr=False)
    """Not a part of the command: `leased` keeps here what it knows of the demand for a key that has
    no key state (`local/leases.py`), which saves a look-up in each call.
    """
    _split_frame: tuple[bytes, bytes] | None = field(default=None, init=False, repr=False)
    """The parts before and after the stamp in `frame`; None until the first call of it."""
    _combined: dict[int, Acquire] | None = field(default=None, init=False, repr=False)
    """The cached commands of `combined`, by their number of calls; None until there is one."""
    ring_link: Any = field(default=None, init=False, repr=False)
    """Not a part of the command: here a store in this process keeps the command's ring."""
    counts: Any = field(default=None, repr=False, kw_only=True)
    """Not a part of the command: for each charge what counts its decisions for an observer."""

    def arguments(self) -> list[bytes | int | str]:
        arguments = ring_arguments(self.charges, self.calls)
        if self.write_limit:
            return [*arguments, self.calls, time_argument(self.now_ms), 1]
        if self.now_ms is not None:
            return [*arguments, self.calls, self.now_ms]
        return [*arguments, self.calls] if self.calls > 1 else arguments

    def reply(self, raw: ScriptReply) -> AcquireReply:
        if len(raw) == 3:
            left, now = raw[1], raw[2]
            return AcquireReply(
                self.calls, 0, left, expires_in_ms(self.charges[0].limit, now), 0, now
            )
        return parse_acquire_reply(raw, self.calls)

    def with_time(self, now_ms: int) -> Acquire:
        return replace(self, frame_parts=None, counts=None, now_ms=now_ms)

    def combined(self, calls: int) -> Acquire:
        """Return the one command that stands for `calls` commands like this one."""
        if calls == 1:
            return self
        known = self._combined
        if known is None:
            known = self._combined = {}
        shared = known.get(calls)
        if shared is None:
            shared = replace(self, frame_parts=None, counts=None, calls=calls)
            if calls <= _MAX_CACHED_COMBINED:
                known[calls] = shared
        return shared

    def frame(self, stamp: bytes) -> bytes:
        """Return the EVALSHA in RESP. All stamps have 20 bytes, so the rest is built once."""
        split = self._split_frame
        if split is None:
            split = self._split_frame = self._split_around_stamp()
        return split[0] + stamp + split[1]

    def _split_around_stamp(self) -> tuple[bytes, bytes]:
        parts = self.frame_parts
        if parts is None:
            return self._split_whole()
        if len(self.charges) == 1:
            ring = self.charges[0].ring
            keys = b"$%d\r\n%b\r\n%b" % (len(ring), ring, STAMP_LENGTH)
        else:
            keys = bulk_strings(self.keys) + STAMP_LENGTH
        if not parts.after_stamp:
            head, after_stamp = self._split_whole()
            parts.before_keys = head.removesuffix(keys)
            parts.after_stamp = after_stamp  # last: with it, another thread takes both
        return parts.before_keys + keys, parts.after_stamp

    def _split_whole(self) -> tuple[bytes, bytes]:
        head, _, tail = Command.frame(self, _NO_STAMP).partition(_NO_STAMP)
        return head, tail


@dataclass(slots=True, eq=False)
class Peek(Command[AcquireReply]):
    """The reply that `Acquire` would get now; nothing is written."""

    script: ClassVar[str] = "peek"
    writes: ClassVar[bool] = False

    def arguments(self) -> list[bytes | int | str]:
        return [*ring_arguments(self.charges), 1, time_argument(self.now_ms)]

    def reply(self, raw: ScriptReply) -> AcquireReply:
        return parse_acquire_reply(raw, 1)


@dataclass(slots=True, eq=False)
class Lease(Command[LeaseReply]):
    """One call, and up to `extra` permits for its process to spend until the bucket ends.

    With `prefetch` no caller waits for it, so a refusal counts no block.
    """

    script: ClassVar[str] = "lease"

    extra: int = 0
    prefetch: bool = False

    def arguments(self) -> list[bytes | int | str]:
        rings = ring_arguments(self.charges)
        return [*rings, 1, time_argument(self.now_ms), self.extra, int(self.prefetch)]

    def reply(self, raw: ScriptReply) -> LeaseReply:
        if raw[1] < 0:
            return LeaseReply(parse_acquire_reply(raw, 1), 0, 0)
        return LeaseReply(parse_acquire_reply([*raw[:5], *raw[7:]], 1), raw[5], raw[6])


@dataclass(slots=True, eq=False)
class Flush(Command[FleetCounts]):
    """The counts of a process, by ring and bucket.

    A ring takes each `seq` (rising) of a `sender` (hexadecimal) once, so that a flush whose outcome
    is unknown can be sent again; without a sender the ring takes every flush. With `pull` the reply
    has the passes of all processes.
    """

    script: ClassVar[str] = "flush"

    counts: tuple[tuple[Bucket, ...], ...] = ()
    sender: str = ""
    seq: int = 0
    pull: bool = False

    def has_written(self, now_ms: int) -> bool:
        """Return whether any count was of a bucket that is not over: others are dropped."""
        return any(
            bucket.start > now_ms - charge.limit.interval_ms
            for charge, buckets in zip(self.charges, self.counts, strict=False)
            for bucket in buckets
        )

    @property
    def keys(self) -> list[bytes]:
        rings = [charge.ring for charge in self.charges]
        return [*rings, *map(senders_name, rings)]

    def arguments(self) -> list[bytes | int | str]:
        rings = ring_arguments(self.charges)
        counts = [_counts_argument(buckets) for buckets in self.counts] or [""] * len(self.charges)
        now, pull = time_argument(self.now_ms), int(self.pull)
        return [*rings, 1, now, self.sender, self.seq, pull, *counts]

    def reply(self, raw: ScriptReply) -> FleetCounts:
        passed = (dict(zip(ring[::2], ring[1::2], strict=True)) for ring in raw[3:])
        return FleetCounts(tuple(passed), raw[2])


def _counts_argument(buckets: Sequence[Bucket]) -> str:
    return "".join(
        f"{b.start} {b.passed} {b.blocked} {b.success} {b.error} {b.rt_sum_ms} {b.rt_min_ms or 0};"
        for b in buckets
    )


@dataclass(slots=True, eq=False)
class Refund(Command[CountReply]):
    """Give back what was charged, out of the bucket that a charge names, or of `charged_ms`."""

    script: ClassVar[str] = "refund"
    writes: ClassVar[bool] = False

    charged_ms: int = 0

    def bucket_starts_ms(self) -> list[int]:
        """Return the start of the bucket in each ring."""
        at = self.charged_ms
        return [
            at - at % c.limit.bucket_ms if c.bucket_start_ms is None else c.bucket_start_ms
            for c in self.charges
        ]

    def borrowed_flags(self) -> list[bool]:
        """Return for each ring whether the permits were borrowed from their bucket."""
        return [isinstance(charge, BorrowedCharge) for charge in self.charges]

    def arguments(self) -> list[bytes | int | str]:
        borrowed = self.borrowed_flags()
        return [
            *ring_arguments(self.charges),
            1,
            time_argument(self.now_ms),
            *self.bucket_starts_ms(),
            *(map(int, borrowed) if any(borrowed) else ()),
        ]

    def reply(self, raw: ScriptReply) -> CountReply:
        return CountReply(raw[1], raw[2])


@dataclass(slots=True, eq=False)
class Read(Command[ReadReply]):
    """The rings as they are stored."""

    script: ClassVar[str] = "read"
    writes: ClassVar[bool] = False

    def reply(self, raw: ScriptReply) -> ReadReply:
        states = [
            ring_state(hash_fields(fields), charge.limit.bucket_ms, charge.limit.span)
            for fields, charge in zip(raw[3:], self.charges, strict=False)
        ]
        return ReadReply(tuple(states), raw[2])


@dataclass(slots=True, eq=False)
class Reset(Command[CountReply]):
    """Delete the rings."""

    script: ClassVar[str] = "reset"
    writes: ClassVar[bool] = False

    def reply(self, raw: ScriptReply) -> CountReply:
        return CountReply(raw[1], raw[2])


RING_COMMANDS: tuple[type[Command[Any]], ...] = (Acquire, Lease, Peek, Flush, Refund, Read, Reset)
"""The commands on plain rings. Each feature lists its own."""
