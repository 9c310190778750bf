"""What the server has counted, read past distwindow's connections, and the checks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis

from distwindow.core.limit import Limit
from distwindow.protocol.keys import key_prefix, ring_name
from distwindow.protocol.replies import ring_state
from tests.attack.frame import Violation


class Counts(NamedTuple):
    """The sums of a ring's buckets."""

    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0


def stored(server: redis.Redis, prefix: str, key: str, limit: Limit) -> Counts:
    """What the ring of `key` holds. `server` must not decode replies."""
    fields: Any = server.hgetall(ring_name(key_prefix(prefix, key), limit))
    # A ring's buckets; what other fields there may be (senders of flushes) is none of our business.
    state = ring_state(fields, limit.bucket_ms, limit.span)
    if state is None:
        return Counts()
    counts = Counts(
        *(
            sum(getattr(bucket, name) for bucket in state.buckets)
            for name in ("passed", "blocked", "success", "error")
        )
    )
    if counts.passed != state.used:
        raise Violation(
            f"the ring of {key!r} has used={state.used}, its buckets sum up to {counts.passed}",
            [repr(state)],
        )
    return counts


def all_stored(
    server: redis.Redis, prefix: str, keys: Iterable[str], limit: Limit
) -> dict[str, Counts]:
    """The same for many keys."""
    return {key: stored(server, prefix, key, limit) for key in keys}


def conserved(
    what: str,
    counted: Mapping[str, int],
    certain: Mapping[str, int],
    unsure: Mapping[str, int],
    *,
    stranded: int = 0,
    lost: int = 0,
    history: Iterable[Any] = (),
) -> tuple[int, int]:
    """For each key: what the server has counted is what returned calls have counted, and at most
    what calls of unknown outcome have. `stranded` and `lost` are allowed over all keys: permits
    that leases may have left behind, counts that killed processes had not told.

    Returns how many were stranded and lost.
    """
    too_many: dict[str, int] = {}
    too_few: dict[str, int] = {}
    for key in counted.keys() | certain.keys() | unsure.keys():
        here, sure = counted.get(key, 0), certain.get(key, 0)
        more = here - sure - unsure.get(key, 0)
        if more > 0:
            too_many[key] = more
        elif here < sure:
            too_few[key] = sure - here
    for word, by_key, allowed in (
        ("more than was called", too_many, stranded),
        ("less than was called", too_few, lost),
    ):
        if sum(by_key.values()) > allowed:
            worst = sorted(by_key, key=lambda key: by_key[key], reverse=True)[:8]
            raise Violation(
                f"{what}: {sum(by_key.values())} {word}, over {len(by_key)} of "
                f"{len(certain)} keys; {allowed} are explained",
                [
                    *history,
                    *(
                        {
                            "key": key,
                            "stored": counted.get(key, 0),
                            "returned": certain.get(key, 0),
                            "unknown": unsure.get(key, 0),
                        }
                        for key in worst
                    ),
                ],
            )
    return sum(too_many.values()), sum(too_few.values())
