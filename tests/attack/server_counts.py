"""The counts of the server, read by a connection of redis-py, and the check of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis

from distwindow.ring.key import ring_name, ring_name_prefix
from distwindow.ring.limit import Limit
from distwindow.ring.replies import ring_state
from tests.attack.harness import Violation


class Counts(NamedTuple):
    """The sums of a ring's buckets."""

    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0


def read_counts(server: redis.Redis, prefix: str, key: str, limit: Limit) -> Counts:
    """Return what the ring of `key` holds. `server` must not decode replies."""
    fields: Any = server.hgetall(ring_name(ring_name_prefix(prefix, key), limit))
    # Only the buckets of the ring matter here, whatever other fields there are.
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


def read_all_counts(
    server: redis.Redis, prefix: str, keys: Iterable[str], limit: Limit
) -> dict[str, Counts]:
    """Return the counts of many keys."""
    return {key: read_counts(server, prefix, key, limit) for key in keys}


def check_conserved(
    what: str,
    counted: Mapping[str, int],
    certain: Mapping[str, int],
    unsure: Mapping[str, int],
    *,
    stranded: int = 0,
    lost: int = 0,
    history: Iterable[Any] = (),
) -> tuple[int, int]:
    """Raise `Violation` unless, for each key, the server has counted what calls that returned have
    counted (`certain`), and beyond that at most what calls of unknown outcome have (`unsure`).

    `stranded` and `lost` are allowed over all keys: permits of leases that no process holds any
    more, and counts that killed processes had not sent. Return how many were stranded and lost.
    """
    too_many: dict[str, int] = {}
    too_few: dict[str, int] = {}
    for key in counted.keys() | certain.keys() | unsure.keys():
        in_store, sure = counted.get(key, 0), certain.get(key, 0)
        more = in_store - sure - unsure.get(key, 0)
        if more > 0:
            too_many[key] = more
        elif in_store < sure:
            too_few[key] = sure - in_store
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
