"""The replies of the scripts as named tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from .ring import MAX_TOTAL
from .stats import Bucket, RingState

PAST_DEADLINE = -2
"""The word behind the stamp in a reply if the script ran after its deadline, and so did nothing."""


class AcquireReply(NamedTuple):
    """The reply of `acquire` and `peek` to a number of equal calls."""

    admitted: int
    """The number of calls that are admitted: the first ones."""
    binding_index: int
    """The index of the binding ring, from 0: the refusing one, if any call is refused."""
    left: int
    """Permits left in it afterwards; negative where the limit was lowered below what is counted."""
    reset_ms: int
    """Time until it is empty if no more calls come."""
    retry_ms: int
    """Time until a refused call would be admitted; 0 when none is refused."""
    now_ms: int
    """The store's time."""
    admitted_binding: tuple[int, int, int] | None = None
    """Binding ring, left and reset_ms of the admitted calls, where others are refused."""
    bucket_starts_ms: tuple[int, ...] | None = None
    """The start of each ring's bucket in which the admitted calls were counted, if any of them is
    after `now_ms`, because the store's clock was set back; otherwise None.
    """
    wait_us: int | None = None
    """How long the admitted call has to wait, us; None where no limit is paced or warms up."""


class ReadReply(NamedTuple):
    """The reply of `read`: the state of each ring (None: no such ring), the store's time, and with
    `ReadShaped` how each ring's limit is shaped (None: it is not, or nothing is stored).
    """

    states: tuple[RingState | None, ...]
    now_ms: int
    shapings: tuple[Any, ...] = ()


class CountReply(NamedTuple):
    """The reply of `refund` and `reset`."""

    affected: int
    """The permits given back (the most of any ring), or the rings deleted."""
    now_ms: int


class LeaseReply(NamedTuple):
    """The reply of `lease`."""

    acquire_reply: AcquireReply
    extra: int
    """Permits charged beyond the call's own cost."""
    ends_in_ms: int
    """Time until the bucket ends in which they were charged, ms, by the store's clock."""


class FleetCounts(NamedTuple):
    """The reply of `flush`: the store's time; if pulled, each ring's passes by bucket start."""

    passed: tuple[dict[int, int], ...]
    now_ms: int


def parse_acquire_reply(raw: Sequence[Any], calls: int) -> AcquireReply:
    """Parse the reply of `acquire` or `peek` to this many calls (its forms: `lua/acquire.lua`)."""
    if raw[1] >= 0:
        _, left, now, index, reset_ms, *starts = raw
        return AcquireReply(calls, index - 1, left, reset_ms, 0, now, None, tuple(starts) or None)
    _, _, now, index, left, reset_ms, retry_ms, admitted, *rest = raw
    admitted_by = (rest[0] - 1, rest[1], rest[2]) if rest else None
    ahead = tuple(rest[3:]) or None
    return AcquireReply(admitted, index - 1, left, reset_ms, retry_ms, now, admitted_by, ahead)


def split_reply(reply: AcquireReply, calls: int, costs: Sequence[int]) -> list[AcquireReply]:
    """Return the replies that `calls` equal calls, each of `costs`, would have got in turn."""
    if calls == 1:
        return [reply]  # with its wait: calls that wait are not combined
    admitted, refused = reply.admitted, calls - reply.admitted
    refusing = (reply.binding_index, reply.left, reply.reset_ms)
    index, left, reset_ms = reply.admitted_binding or refusing
    cost, now = costs[index], reply.now_ms
    left_after_first = left + (admitted - 1) * cost
    starts = reply.bucket_starts_ms
    each = [
        AcquireReply(1, index, left_after_first - i * cost, reset_ms, 0, now, None, starts)
        for i in range(admitted)
    ]
    if refused:
        each += [reply._replace(admitted=0, admitted_binding=None, bucket_starts_ms=None)] * refused
    return each


def hash_fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the reply of HGETALL, [field, value, ...], as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def ring_state(fields: dict[bytes, bytes], bucket_ms: int, span: int) -> RingState | None:
    """Return the ring in a hash of these fields (`lua/README.md`); None if there are none.

    Raises `ConfigurationError` if they are not those of a ring.
    """
    if not fields:
        return None
    try:
        first, *others = fields[b"head"].split()  # with coming borrowed permits the second
        start = int(first) if int(first) <= MAX_TOTAL else int(others[0])
        used, closed = int(fields[b"used"]), int(fields[b"closed"])
        newest = start // bucket_ms
        limit, finished = int(fields[b"limit"]), fields[b"finished"]
        borrowed = _borrowed_by_start(fields, bucket_ms, newest - span)
        buckets = [
            _parse_bucket((newest - (newest - int(slot)) % span) * bucket_ms, value.split())
            for slot, value in fields.items()
            if slot.isdigit() and int(slot) != newest % span
        ]
        counters = [fields[b"block"], *(finished.split() if finished != b"0" else [])]
        buckets.append(_parse_bucket(start, [b"%d" % (used - closed), *counters]))
        buckets = [
            replace(b, borrowed=borrowed[b.start]) if b.start in borrowed else b
            for b in buckets
            if b.passed or b.blocked or b.success or b.error
        ]
        buckets.sort(key=lambda bucket: bucket.start)
        coming = tuple(Bucket(at, borrowed=borrowed[at]) for at in sorted(borrowed) if at > start)
        limit_text = f"{abs(limit)} {'strict' if limit < 0 else 'leap'}"
        return RingState(start, used, closed, limit_text, tuple(buckets), coming)
    except (LookupError, ValueError) as exc:
        raise ConfigurationError(
            f"the hash of this key is not a distwindow ring ({exc!r}); use a prefix that no other "
            "program uses"
        ) from exc


def _borrowed_by_start(fields: dict[bytes, bytes], bucket_ms: int, expired: int) -> dict[int, int]:
    """Return the borrowed permits by start of bucket, without buckets up to `expired`."""
    of_buckets = [
        value.split() for name, value in fields.items() if name[:1] == b"b" and name[1:].isdigit()
    ]
    numbers = {int(number): int(permits) for number, permits in of_buckets}
    return {number * bucket_ms: permits for number, permits in numbers.items() if number > expired}


def _parse_bucket(start: int, counts: Sequence[bytes]) -> Bucket:
    """Return the bucket of a slot: `counts` are its words, of which the last may be missing."""
    missing = [b"0"] * (6 - len(counts))
    passed, block, success, error, rt_sum, rt_min = map(int, [*counts, *missing])
    return Bucket(
        start, passed, block, success, error, rt_sum, rt_min if success or error else None
    )
