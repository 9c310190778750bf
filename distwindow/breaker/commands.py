"""The commands of circuit breakers: calls of `breaker_flush`, `breaker_probe` and
`breaker_adaptive`.

A breaker is a hash, `prefix:{resource}:breaker:kind:name=value,...` (lua/README.md), with every
parameter of its rule: two breakers that differ in anything, one inside the other on one key, must
not count each other's calls, or take each other's probe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Literal, NamedTuple, get_args

from ..ring.command import Command, ScriptReply
from ..ring.key import AnyKey, breaker_name_suffix, ring_name_prefix, senders_name, unescape
from .record import CLOSED, AdaptiveCounts, CallCounts
from .rules import BreakerRule, settings_of

ADAPTIVE_KIND = "adaptive"
ADAPTIVE = -1
"""In place of the state of a `StoredBreaker` that is adaptive, and so has none."""
ProbeAction = Literal["take", "succeed", "fail", "free", "renew", "open", "close"]
PROBE_ACTIONS: tuple[ProbeAction, ...] = get_args(ProbeAction)
_BREAKER = re.compile(
    rb"\{([^{}]*)\}([^{}]*):breaker:([a-z_]+):([a-z_]+=[^:=,]+(?:,[a-z_]+=[^:=,]+)*)(:senders)?",
    re.DOTALL,
)


def breaker_name(prefix: str, key: AnyKey, rule: BreakerRule) -> bytes:
    """Return the Redis key of the breaker of `key`."""
    return ring_name_prefix(prefix, key) + breaker_name_suffix(rule.kind, settings_of(rule))


class BreakerNameParts(NamedTuple):
    """The parts of a breaker's Redis key."""

    key: str
    """As `unescape` has it; of a tagged key `{tag}resource`."""
    kind: str
    settings: tuple[tuple[str, float], ...]
    """The parameters of the rule, each with its name."""
    bucket_ms: int
    buckets: int
    is_senders: bool
    """True if it is the key of the breaker's sender records."""


def parse_breaker_name(prefix: str, name: bytes) -> BreakerNameParts | None:
    """Return the parts of a breaker's Redis key; None if it is not one of this prefix."""
    start = prefix.encode() + b":"
    found = _BREAKER.fullmatch(name, len(start)) if name.startswith(start) else None
    if found is None:
        return None
    tag, rest, kind, words, senders = found.groups()
    key = f"{{{unescape(tag)}}}{unescape(rest)}" if rest else unescape(tag)
    try:
        settings = {
            name: int(value) if value.isdigit() else float(value)
            for name, value in (word.split("=") for word in words.decode().split(","))
        }
        buckets = int(settings["buckets"])
        bucket_ms = round(settings["window"] * 1000) // buckets
    except (ArithmeticError, LookupError, ValueError):
        return None
    if bucket_ms < 1 or buckets < 1:
        return None
    pairs = tuple(settings.items())
    return BreakerNameParts(key, kind.decode(), pairs, bucket_ms, buckets, senders is not None)


class BreakerReply(NamedTuple):
    """The reply of both scripts."""

    done: bool
    """True if the counts were taken, a probe was handed out, renewed or ended, or the breaker was
    opened or closed by hand.
    """
    state: int
    """An index into `record.STATES`."""
    epoch: int
    retry_in_ms: int
    """Time until a call may be let through; 0 for now."""
    total: int
    """Calls that ended in the window; with the measure `in_a_row` those of `bad`."""
    bad: int
    """Bad ones among them; with the measure `in_a_row` those since the last good call."""
    now_ms: int
    """The store's time."""


@dataclass(slots=True, eq=False)
class BreakerCommand(Command[BreakerReply]):
    """A command on one breaker. `charges` is empty, as nothing is charged."""

    rule: BreakerRule | None = None
    name: bytes = b""

    @property
    def keys(self) -> list[bytes]:
        return [self.name, senders_name(self.name)]

    def rule_arguments(self) -> list[bytes | int | str]:
        """Return the arguments that both scripts begin with."""
        rule = self.rule
        assert rule is not None
        return [
            rule.measure,
            # As plain digits: Lua reads `1e-05`, too, but other spellings are refused as malformed.
            format(Decimal(repr(rule.threshold)), "f"),
            rule.min_calls,
            rule.open_ms,
            rule.probe_ms,
            rule.probes,
            rule.bucket_ms,
            rule.buckets,
            "" if self.now_ms is None else self.now_ms,
        ]

    def reply(self, raw: ScriptReply) -> BreakerReply:
        _, done, now, state, epoch, retry_in_ms, total, bad = raw
        return BreakerReply(bool(done), state, epoch, retry_in_ms, total, bad, now)


@dataclass(slots=True, eq=False)
class BreakerFlush(BreakerCommand):
    """The calls that ended in a process, by epoch and bucket. Without any, the state is read.

    A breaker takes each `seq` (rising) of a `sender` (hexadecimal) once, so that a flush whose
    outcome is unknown can be sent again; without a sender it takes every flush.
    """

    script: ClassVar[str] = "breaker_flush"

    counts: tuple[CallCounts, ...] = ()
    sender: str = ""
    seq: int = 0

    def arguments(self) -> list[bytes | int | str]:
        counts = "".join(f"{c.epoch} {c.start} {c.total} {c.bad};" for c in self.counts)
        return [*self.rule_arguments(), self.sender, self.seq, counts]


@dataclass(slots=True, eq=False)
class BreakerProbe(BreakerCommand):
    """Ask for a probe, renew or end one; or open or close by hand (any id). May be sent again."""

    script: ClassVar[str] = "breaker_probe"

    action: ProbeAction = "take"
    probe_id: str = ""
    """Hexadecimal digits and points; no other probe of this breaker has the same."""

    def arguments(self) -> list[bytes | int | str]:
        return [*self.rule_arguments(), self.action, self.probe_id]


BREAKER_COMMANDS: dict[str, type[BreakerCommand]] = {
    command.script: command for command in (BreakerFlush, BreakerProbe)
}
"""Every command on breakers by the name of its script."""


def adaptive_name_suffix(k: float, bucket_ms: int, buckets: int) -> bytes:
    """Return what follows `ring_name_prefix` in the Redis key, in the form of other breakers."""
    settings = {"k": k, "window": bucket_ms * buckets / 1000, "buckets": buckets}
    return breaker_name_suffix(ADAPTIVE_KIND, settings)


class AdaptiveReply(NamedTuple):
    """The reply of `breaker_adaptive`."""

    forced: bool
    """True if a pass was claimed and granted."""
    passed_ms: int
    """When a call of the fleet last passed although some are dropped; 0 for never."""
    window: tuple[AdaptiveCounts, ...]
    """The fleet's calls by bucket, oldest first."""
    now_ms: int
    """The store's time."""


@dataclass(slots=True, eq=False)
class AdaptiveFlush(Command[AdaptiveReply]):
    """The calls that ended in a process, by bucket. `charges` is empty, as nothing is charged.

    A breaker takes each `seq` (rising) of a `sender` (hexadecimal) once; without a sender it takes
    every flush. With `force_ms` above 0 a pass is claimed.
    """

    script: ClassVar[str] = "breaker_adaptive"

    name: bytes = b""
    bucket_ms: int = 250
    buckets: int = 40
    passed_ms: int = 0
    force_ms: int = 0
    counts: tuple[AdaptiveCounts, ...] = ()
    sender: str = ""
    seq: int = 0

    @property
    def keys(self) -> list[bytes]:
        return [self.name, senders_name(self.name)]

    def arguments(self) -> list[bytes | int | str]:
        return [
            self.bucket_ms,
            self.buckets,
            "" if self.now_ms is None else self.now_ms,
            self.passed_ms,
            self.force_ms,
            self.sender,
            self.seq,
            "".join(f"{c.start} {c.success} {c.failure} {c.drop};" for c in self.counts),
        ]

    def reply(self, raw: ScriptReply) -> AdaptiveReply:
        _, forced, now, passed_ms, *flat = raw
        window = tuple(
            AdaptiveCounts(number * self.bucket_ms, success, failure, drop)
            for number, success, failure, drop in zip(*[iter(flat)] * 4, strict=True)
        )
        return AdaptiveReply(bool(forced), passed_ms, window, now)


class StoredBreaker(NamedTuple):
    """The content of a breaker's hash at some time."""

    state: int
    """An index into `record.STATES`, or `ADAPTIVE`."""
    epoch: int
    retry_ms: int
    probes: int
    """Probes that are under way, or were given up."""
    total: int
    bad: int


def parse_breaker_hash(
    fields: dict[bytes, bytes], name: BreakerNameParts, now_ms: int
) -> StoredBreaker | None:
    """Return the breaker in a hash of these fields; None if it has expired or is none.

    Of an adaptive breaker the state is `ADAPTIVE`, and what is bad are failures and drops.
    """
    is_adaptive = name.kind == ADAPTIVE_KIND
    try:
        words = [b"%d" % ADAPTIVE, *[b"0"] * 4] if is_adaptive else fields[b"state"].split()
        state, epoch, retry_ms, in_a_row, expires_ms = map(int, words)
        newest, total, bad = now_ms // name.bucket_ms, 0, 0
        if state == CLOSED and not is_adaptive:
            total = bad = in_a_row
        for field, value in fields.items():
            if field.isdigit():
                number, *counted = map(int, value.split())
                if newest - name.buckets < number <= newest:
                    total += sum(counted) if is_adaptive else counted[0]
                    bad += sum(counted[1:])
    except (LookupError, ValueError):
        return None
    if is_adaptive:
        return StoredBreaker(state, 0, 0, 0, total, bad) if total else None
    probes = sum(field.startswith(b"p:") for field in fields)
    if now_ms >= expires_ms or state not in (0, 1, 2):
        return None
    return StoredBreaker(state, epoch, retry_ms, probes, total, bad)
