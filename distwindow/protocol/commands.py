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
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from ..core.errors import ConfigurationError
from ..core.interrupts import is_interruption
from ..core.limit import Limit
from ..core.stats import Bucket, RingState
from .keys import AnyKey, ring_name, senders_name
from .scripts import load_script

Reply = TypeVar("Reply")
C = TypeVar("C", bound="Command[Any]")

EXPIRED = -2
"""The verdict of a script that was run after its deadline, and therefore did nothing."""

_MAX_CACHED_COMBINED = 64

GUARD_BYTES = 20
"""13 digits of ms, a point, 6 digits of nonce."""

CURRENT_BUCKET = 10**13
"""The start, in a `Flush`, of whatever bucket is the newest."""

NO_DEADLINE_MS = 9_999_999_999_999
"""Of a call whose server's clock is not known yet (year 2286)."""


class Charge(NamedTuple):
    """One ring and what one call counts in it."""

    ring: bytes
    limit: Limit
    cost: int
    key: AnyKey
    bucket_start_ms: int | None = None
    """The start of the bucket it was counted in, where that may not be the bucket of the decision's
    `now_ms`: a ring is ahead of a clock that was set back, or a lease was charged before.
    """


def charged_in(charges: tuple[Charge, ...], starts: Sequence[int]) -> tuple[Charge, ...]:
    """The same charges, counted in the buckets of these starts."""
    return tuple(
        charge._replace(bucket_start_ms=start)
        for charge, start in zip(charges, starts, strict=True)
    )


def charges_of(key: AnyKey, stem: bytes, limits: Sequence[Limit], cost: int) -> tuple[Charge, ...]:
    """What a call of `cost` counts for `key` under `limits`."""
    return tuple(Charge(ring_name(stem, limit), limit, cost, key) for limit in limits)


class AcquireReply(NamedTuple):
    """The answer of `acquire` and `peek` to `times` equal calls."""

    admitted: int
    """How many of them are admitted: the first ones."""
    binding_ring: int
    """Which ring binds (from 0): the refusing one, if any call is refused."""
    left: int
    """Permits left there after all this; below 0 where a lowered limit is overdrawn."""
    reset_ms: int
    retry_ms: int
    """Until the refused ones would be admitted; 0 when none is refused."""
    now_ms: int
    admitted_by: tuple[int, int, int] | None = None
    """ring, left, reset_ms for the admitted ones, where some are and some are not."""
    bucket_starts_ms: tuple[int, ...] | None = None
    """The start of the bucket of each ring in which the admitted ones were counted, where that of
    any ring is after `now_ms`: the store's clock was set back.
    """


class ReadReply(NamedTuple):
    """The answer of `read`: a state for each ring that exists, and the store's time."""

    states: tuple[RingState | None, ...]
    now_ms: int


class CountReply(NamedTuple):
    """The answer of commands that say how much they did."""

    done: int
    now_ms: int


class LeaseReply(NamedTuple):
    """The answer of `lease`."""

    acquire_reply: AcquireReply
    extra: int
    """Permits charged beyond the call's own cost."""
    ends_in_ms: int
    """Until the bucket ends in which they were charged, as the store saw it."""


class FleetCounts(NamedTuple):
    """The answer of `flush`: for each ring the passes of all processes by bucket start, where asked
    for, and the store's time.
    """

    passed: tuple[dict[int, int], ...]
    now_ms: int


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


def _acquire_reply(raw: Sequence[Any], calls: int) -> AcquireReply:
    if raw[1] >= 0:
        _, left, now, index, reset, *starts = raw
        return AcquireReply(calls, index - 1, left, reset, 0, now, None, tuple(starts) or None)
    _, _, now, index, left, reset, retry, admitted, *by = raw
    admitted_by = (by[0] - 1, by[1], by[2]) if by else None
    starts_of_admitted = tuple(by[3:]) or None
    return AcquireReply(
        admitted, index - 1, left, reset, retry, now, admitted_by, starts_of_admitted
    )


def split_reply(verdict: AcquireReply, calls: int, costs: Sequence[int]) -> list[AcquireReply]:
    """The verdicts that `times` equal calls would have got one after the other."""
    admitted, refused = verdict.admitted, calls - verdict.admitted
    index, left, reset = verdict.admitted_by or (
        verdict.binding_ring,
        verdict.left,
        verdict.reset_ms,
    )
    cost, now = costs[index], verdict.now_ms
    first = left + (admitted - 1) * cost
    starts = verdict.bucket_starts_ms
    each = [
        AcquireReply(1, index, first - i * cost, reset, 0, now, None, starts)
        for i in range(admitted)
    ]
    if refused:
        each += [verdict._replace(admitted=0, admitted_by=None, bucket_starts_ms=None)] * refused
    return each


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


def _hash_fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def ring_state(fields: dict[bytes, bytes], width: int, span: int) -> RingState | None:
    """A ring from the fields of its hash (`lua/README.md`); None when there are none."""
    if not fields:
        return None
    try:
        start, used, closed = (int(fields[n].split()[0]) for n in (b"start", b"used", b"closed"))
        newest, told, done = start // width, int(fields[b"limit"]), fields[b"done"]
        buckets = [
            _bucket_stats((newest - (newest - int(slot)) % span) * width, value.split())
            for slot, value in fields.items()
            if slot.isdigit() and int(slot) != newest % span
        ]
        tallies = [fields[b"block"], *(done.split() if done != b"0" else [])]
        buckets.append(_bucket_stats(start, [b"%d" % (used - closed), *tallies]))
        buckets = [b for b in buckets if b.passed or b.blocked or b.success or b.error]
        buckets.sort(key=lambda bucket: bucket.start)
        limit = f"{abs(told)} {'strict' if told < 0 else 'leap'}"
        return RingState(start, used, closed, limit, tuple(buckets))
    except (LookupError, ValueError) as exc:
        if is_interruption(exc):
            raise
        raise ConfigurationError(
            f"the hash of this key is no distwindow ring ({exc!r}); is the prefix used by others?"
        ) from exc


def _bucket_stats(start: int, counts: Sequence[bytes]) -> Bucket:
    missing = [b"0"] * (6 - len(counts))
    passed, block, success, error, rt_sum, rt_min = map(int, [*counts, *missing])
    return Bucket(
        start, passed, block, success, error, rt_sum, rt_min if success or error else None
    )
