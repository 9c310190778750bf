"""The bytes of one key in Redis, by `MEMORY USAGE key SAMPLES 0`, and of one of many limiters in
this process.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import get_args

from benchmarks import peers
from benchmarks.measure import error_text, log
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, running
from benchmarks.server_cost import GUARD
from distwindow import Limiter
from distwindow.lifecycle.connect import open_store
from distwindow.ring import key as keys
from distwindow.ring.command import load_script
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.limit import Bound, Limit
from distwindow.runtime.options import Consistency, Options

RINGS: tuple[tuple[int, Bound, float | None], ...] = (
    (10, "leap", 200),
    (60, "strict", 450),
    (500, "leap", None),
)
EACH = (10, 1_000)
PEER_LIMITS = (100, 600)
INTERVAL = 60
LIMITERS = 1_000


def _ring_bytes(connection: Socket, limit: Limit, each: int) -> int:
    """Return the bytes of a ring with `each` passes in every bucket of its window."""
    connection.call("FLUSHALL")
    now = int(time.time() * 1000)
    charges = charges_of("user:42", keys.ring_name_prefix("distwindow", "user:42"), [limit], each)
    for age in range(limit.span - 1, -1, -1):
        command = Acquire(charges, now_ms=now - age * limit.bucket_ms)
        (reply,) = connection.pipeline([command.frame(GUARD)])
        if not isinstance(reply, list) or reply[1] < 0:
            raise RuntimeError(f"the script answered {reply!r}")
    return sum(connection.sizes().values())


def _peer_bytes(server: Server, connection: Socket, peer: peers.Peer, limit: int) -> int:
    """Return the bytes of one key of a peer whose limit is used up."""
    connection.call("FLUSHALL")
    with peer.open(server.url, peers.Quota(limit, INTERVAL)) as acquire:
        for _ in range(limit):
            if not acquire("user:42"):
                raise RuntimeError(f"refused below its limit of {limit}")
    return sum(connection.sizes().values())


def _add_limiters(section: Section, url: str) -> None:
    """Add the bytes of one of many limiters over one store, as made and after one call each."""
    store = open_store(url, Options(timeout=5.0))
    for consistency in get_args(Consistency):
        tracemalloc.start()
        limiters = [
            Limiter(
                store,
                f"{100 + number}/minute",
                prefix=consistency,
                consistency=consistency,
                timeout=5.0,
            )
            for number in range(LIMITERS)
        ]
        made = tracemalloc.get_traced_memory()[0] / LIMITERS
        for limiter in limiters:
            limiter.try_acquire("user:42")
        called = tracemalloc.get_traced_memory()[0] / LIMITERS
        tracemalloc.stop()
        name = f"one of {LIMITERS:,} limiters over one store, {consistency}"
        section.add(f"{name}, made", made, target=Target(2_000), unit="B")
        section.add(f"{name}, called once", called, detail="with its key", unit="B")
        for limiter in limiters:
            limiter.close()
    store.close()


def run(quick: bool) -> Section:
    section = Section("memory", "memory: bytes of one key that carries pass counts alone")
    with running() as server, Socket(server.port) as connection:
        _add_limiters(section, server.url)
        connection.call("SCRIPT", "LOAD", load_script("acquire").text)
        for buckets, bound, target in RINGS:
            for each in EACH:
                span = buckets + (bound == "strict")
                limit = Limit(each * span, per=INTERVAL, buckets=buckets, bound=bound)
                section.add(
                    f"distwindow, {buckets} buckets ({bound}), {each:,} in each",
                    float(_ring_bytes(connection, limit, each)),
                    target=Target(target) if target else None,
                    detail=f"limit {limit.amount:,}",
                    unit="B",
                )
        for limit_of_peers in PEER_LIMITS:
            for peer in peers.blocking_peers(pools=(peers.SHARED,), clients=("redis-py",)):
                name = f"{peer.name}, limit {limit_of_peers}"
                log(f"memory: {name}")
                try:
                    size = _peer_bytes(server, connection, peer, limit_of_peers)
                    section.add(name, float(size), detail=f"{limit_of_peers} admitted", unit="B")
                except Exception as error:
                    section.add_failures({name: error_text(error)})
    return section
