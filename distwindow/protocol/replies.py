"""What the scripts answer, as named tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.errors import ConfigurationError
from ..core.interrupts import is_interruption
from ..core.stats import Bucket, RingState

EXPIRED = -2
"""The verdict of a script that was run after its deadline, and therefore did nothing."""


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


def _hash_fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def ring_state(fields: dict[bytes, bytes], width: int, span: int) -> RingState | None:
    """A ring from the fields of its hash (`lua/README.md`); None when there are none."""
    if not fields:
        return None
    try:
        start, used, closed = (int(fields[n].split()[0]) for n in (b"head", b"used", b"closed"))
        newest, told, done = start // width, int(fields[b"limit"]), fields[b"finished"]
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
