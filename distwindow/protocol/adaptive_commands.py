"""The command of adaptive breakers: the call of the script `breaker_adaptive`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..core.adaptive_record import AdaptiveCounts
from .frames import Command, ScriptReply
from .keys import breaker_name_suffix, senders_name

ADAPTIVE_KIND = "adaptive"


def adaptive_name_suffix(k: float, bucket_ms: int, buckets: int) -> bytes:
    """Return what follows `ring_name_prefix` in the Redis key of an adaptive breaker. It has the
    form of other breakers' names.
    """
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
