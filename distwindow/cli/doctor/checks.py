"""The settings of one server that limits depend on: what is safe, what is not, and the mend."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from ...core.limit import MAX_BUCKETS
from ...store.redis.handshake import MIN_VERSION, time_ms
from ..servers import Server
from .finding import Finding, Forbidden, asked, config, info, looked

_CLOCK_MS = 1000
"""Further apart than this, and logs on both sides stop matching."""
_FULL = 0.8
_SAFE = "noeviction"


def examined(server: Server) -> Iterator[Finding]:
    """All findings about one server."""
    for check, look, instead in _LOOKS:
        yield from looked(check, functools.partial(look, server), instead)


def _version(server: Server) -> list[Finding]:
    fields = info(server, "server")
    said = str(fields.get("redis_version", "?"))
    name = f"Redis {said}"
    if "valkey_version" in fields:
        name = f"Valkey {fields['valkey_version']} (compatible with Redis {said})"
    numbers = [int(part) for part in said.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and tuple(numbers) < MIN_VERSION:
        return [
            Finding("version", "problem", f"{name} is too old", "Redis 6.2 or newer, or Valkey")
        ]
    return [Finding("version", "ok", name)]


def _memory(server: Server) -> list[Finding]:
    fields = info(server, "memory")
    policy, most = str(fields.get("maxmemory_policy", "?")), int(fields.get("maxmemory", 0))
    used = int(fields.get("used_memory", 0))
    findings = []
    if policy == "?":
        raise Forbidden("INFO memory does not say")
    if policy == _SAFE:
        findings.append(Finding("eviction", "ok", policy))
    else:
        when = "when" if most else "once a maxmemory is set and"
        findings.append(
            Finding(
                "eviction",
                "problem",
                f"{policy}: {when} memory is full, counters are evicted, and an evicted "
                "counter is a limit that starts anew",
                f"CONFIG SET maxmemory-policy {_SAFE}, and in redis.conf; "
                "or a server of their own for limits",
            )
        )
    if not most:
        findings.append(Finding("memory", "ok", f"{_bytes(used)} used, no maxmemory"))
    elif used < _FULL * most:
        findings.append(Finding("memory", "ok", f"{_bytes(used)} of {_bytes(most)} used"))
    else:
        findings.append(
            Finding(
                "memory",
                "warning",
                f"{_bytes(used)} of {_bytes(most)} used: when it is full, calls fail (OOM)",
                "raise maxmemory, or give limits a server of their own",
            )
        )
    return findings


def _replicas(server: Server) -> list[Finding]:
    fields = info(server, "replication")
    if fields.get("role") == "slave":
        return [
            Finding(
                "replicas",
                "problem",
                "this is a replica: it takes no writes",
                "name the primary, or use redis+sentinel://",
            )
        ]
    count = int(fields.get("connected_slaves", 0))
    if not count:
        return [Finding("replicas", "ok", "none; counts are lost with the server, and start anew")]
    told = f"{count} replica{'s' if count > 1 else ''}"
    # INFO tells of good replicas where min-replicas-to-write is set; CONFIG may be forbidden.
    if "min_slaves_good_slaves" in fields:
        return [Finding("replicas", "ok", f"{told}, min-replicas-to-write is set")]
    return [
        Finding(
            "replicas",
            "warning",
            f"{told}, but min-replicas-to-write is 0: a failover forgets what was not replicated "
            "yet, and a primary that is cut off goes on counting for itself",
            "CONFIG SET min-replicas-to-write 1",
        )
    ]


def _persistence(server: Server) -> list[Finding]:
    fields = info(server, "persistence")
    if str(fields.get("rdb_last_bgsave_status", "ok")) != "ok":
        return [
            Finding(
                "persistence",
                "warning",
                "the last snapshot failed, and Redis then refuses writes (MISCONF)",
                'mend the disk, or CONFIG SET save "": limits need no persistence',
            )
        ]
    state = "append-only file on" if fields.get("aof_enabled") else "append-only file off"
    return [Finding("persistence", "ok", f"{state}; limits need none")]


def _clock(server: Server) -> list[Finding]:
    before = time.time_ns() // 1_000_000
    theirs = time_ms(asked(server, "TIME"))
    after = time.time_ns() // 1_000_000
    apart = theirs - (before + after) // 2
    if abs(apart) <= _CLOCK_MS + (after - before) // 2:
        return [Finding("clock", "ok", f"{apart:+d} ms from this machine's")]
    return [
        Finding(
            "clock",
            "warning",
            f"{apart / 1000:+,.1f} s from this machine's: limits hold, for they go by the server's "
            "clock, but times in decisions and statistics are not yours",
            "set both by NTP",
        )
    ]


def _encoding(server: Server) -> list[Finding]:
    for name in ("hash-max-listpack-entries", "hash-max-ziplist-entries"):
        value = config(server, name).get(name)
        if value is None:
            continue
        if int(value) >= MAX_BUCKETS:
            return [Finding("encoding", "ok", f"{name} {value}")]
        return [
            Finding(
                "encoding",
                "warning",
                f"{name} {value}: a limit of more buckets than about that takes many times the "
                "memory",
                f"CONFIG SET {name} {MAX_BUCKETS}, or keep to fewer buckets",
            )
        ]
    raise Forbidden("CONFIG GET names neither hash-max-listpack-entries nor its old name")


_LOOKS = (
    ("version", _version, "grant +info, or see that it is Redis 6.2 or newer, or Valkey"),
    ("eviction", _memory, f"grant +info, or see that maxmemory-policy is {_SAFE}"),
    ("replicas", _replicas, "grant +info, or see that min-replicas-to-write is 1 with replicas"),
    ("persistence", _persistence, "grant +info, or see that snapshots, if any, do not fail"),
    ("clock", _clock, "grant +time"),
    (
        "encoding",
        _encoding,
        f"grant +config|get, or see that hash-max-listpack-entries is at least {MAX_BUCKETS}",
    ),
)
"""What is looked at, and what to do where that is forbidden."""


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
