"""Checks of what limits depend on, without calling scripts: settings of each server, the slots of a
cluster, the packages installed here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import redis

from distwindow import __version__

from ...core.limit import MAX_BUCKETS
from ...protocol import scripts
from ...store.redis.handshake import MIN_VERSION, time_ms
from ..servers import Server
from .finding import Finding, Forbidden, execute, read_config, read_info, run_check

_MAX_CLOCK_OFFSET_MS = 1000
"""With more, times in the logs of client and server cannot be matched."""
_MEMORY_WARNING_SHARE = 0.8
_SAFE_POLICY = "noeviction"
_CLUSTER_SLOTS = 16_384


def check_server(server: Server) -> Iterator[Finding]:
    """Yield all findings about the settings of one server."""
    for check in _CHECKS:
        find = functools.partial(check.find, server)
        yield from run_check(check.name, find, check.fix_if_forbidden)


def check_installation() -> Iterator[Finding]:
    """Yield the versions of the packages that run here, and the folder of the scripts."""
    try:
        hiredis = f"hiredis {importlib.metadata.version('hiredis')}"
    except importlib.metadata.PackageNotFoundError:
        yield Finding("library", "problem", "hiredis is missing", "pip install 'redis[hiredis]'")
        hiredis = "no hiredis"
    yield Finding(
        "library", "ok", f"distwindow {__version__}, redis-py {redis.__version__}, {hiredis}"
    )
    yield Finding("lua", "ok", f"scripts from {scripts.scripts_folder()}")


def check_slots(server: Server) -> list[Finding]:
    """Check that a cluster serves every slot, by what one of its nodes reports."""
    return run_check("cluster", functools.partial(_slots, server), "grant the user +cluster|info")


def _slots(server: Server) -> list[Finding]:
    reply = execute(server, "CLUSTER INFO")
    fields: dict[str, Any] = reply if isinstance(reply, dict) else _parse_lines(reply)
    slots, state = int(fields.get("cluster_slots_ok", 0)), fields.get("cluster_state")
    if slots == _CLUSTER_SLOTS and state == "ok":
        return [Finding("cluster", "ok", f"all {_CLUSTER_SLOTS:,} slots served")]
    return [
        Finding(
            "cluster",
            "problem",
            f"state {state}, {slots:,} of {_CLUSTER_SLOTS:,} slots served: calls fail for keys in "
            "the others",
            "redis-cli --cluster check, then --cluster fix",
        )
    ]


def _parse_lines(reply: Any) -> dict[str, Any]:
    text = reply.decode() if isinstance(reply, bytes) else str(reply)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _version(server: Server) -> list[Finding]:
    fields = read_info(server, "server")
    version = str(fields.get("redis_version", "?"))
    name = f"Redis {version}"
    if "valkey_version" in fields:
        name = f"Valkey {fields['valkey_version']} (compatible with Redis {version})"
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and tuple(numbers) < MIN_VERSION:
        return [
            Finding("version", "problem", f"{name} is too old", "use Redis 6.2 or newer, or Valkey")
        ]
    return [Finding("version", "ok", name)]


def _memory(server: Server) -> list[Finding]:
    fields = read_info(server, "memory")
    policy = str(fields.get("maxmemory_policy", "?"))
    maxmemory, used = int(fields.get("maxmemory", 0)), int(fields.get("used_memory", 0))
    findings = []
    if policy == "?":
        raise Forbidden("INFO memory does not contain maxmemory_policy")
    if policy == _SAFE_POLICY:
        findings.append(Finding("eviction", "ok", policy))
    else:
        when = "when" if maxmemory else "once a maxmemory is set and"
        findings.append(
            Finding(
                "eviction",
                "problem",
                f"{policy}: {when} memory is full, counters are evicted, and their "
                "limits admit the whole amount again",
                f"CONFIG SET maxmemory-policy {_SAFE_POLICY}, and in redis.conf; "
                "or use a separate server for limits",
            )
        )
    if not maxmemory:
        findings.append(Finding("memory", "ok", f"{_bytes(used)} used, no maxmemory"))
    elif used < _MEMORY_WARNING_SHARE * maxmemory:
        findings.append(Finding("memory", "ok", f"{_bytes(used)} of {_bytes(maxmemory)} used"))
    else:
        findings.append(
            Finding(
                "memory",
                "warning",
                f"{_bytes(used)} of {_bytes(maxmemory)} used: when it is full, calls fail (OOM)",
                "raise maxmemory, or use a separate server for limits",
            )
        )
    return findings


def _replicas(server: Server) -> list[Finding]:
    fields = read_info(server, "replication")
    if fields.get("role") == "slave":
        return [
            Finding(
                "replicas",
                "problem",
                "this is a replica, which refuses writes",
                "name the primary in the URL, or use redis+sentinel://",
            )
        ]
    count = int(fields.get("connected_slaves", 0))
    if not count:
        return [
            Finding(
                "replicas",
                "ok",
                "none; if the server is lost, so are the counts, and windows start empty",
            )
        ]
    replicas = f"{count} replica{'s' if count > 1 else ''}"
    # INFO has this field only where min-replicas-to-write is set. CONFIG GET may be forbidden.
    if "min_slaves_good_slaves" in fields:
        return [Finding("replicas", "ok", f"{replicas}, min-replicas-to-write is set")]
    return [
        Finding(
            "replicas",
            "warning",
            f"{replicas}, but min-replicas-to-write is 0: a failover loses counts that were not "
            "replicated yet, and a primary that is cut off continues to admit calls",
            "CONFIG SET min-replicas-to-write 1",
        )
    ]


def _persistence(server: Server) -> list[Finding]:
    fields = read_info(server, "persistence")
    if str(fields.get("rdb_last_bgsave_status", "ok")) != "ok":
        return [
            Finding(
                "persistence",
                "warning",
                "the last snapshot failed, after which Redis refuses writes (MISCONF)",
                'repair the disk, or CONFIG SET save "": limits need no persistence',
            )
        ]
    state = "append-only file on" if fields.get("aof_enabled") else "append-only file off"
    return [Finding("persistence", "ok", f"{state}; limits need none")]


def _clock(server: Server) -> list[Finding]:
    before = time.time_ns() // 1_000_000
    server_ms = time_ms(execute(server, "TIME"))
    after = time.time_ns() // 1_000_000
    offset = server_ms - (before + after) // 2
    if abs(offset) <= _MAX_CLOCK_OFFSET_MS + (after - before) // 2:
        return [Finding("clock", "ok", f"{offset:+d} ms from this machine's")]
    return [
        Finding(
            "clock",
            "warning",
            f"{offset / 1000:+,.1f} s from this machine's: limits hold, because they use the "
            "server's clock, but the times in decisions and statistics are not this machine's",
            "synchronize both by NTP",
        )
    ]


def _encoding(server: Server) -> list[Finding]:
    for name in ("hash-max-listpack-entries", "hash-max-ziplist-entries"):
        value = read_config(server, name).get(name)
        if value is None:
            continue
        if int(value) >= MAX_BUCKETS:
            return [Finding("encoding", "ok", f"{name} {value}")]
        return [
            Finding(
                "encoding",
                "warning",
                f"{name} {value}: a limit with more buckets than about that takes many times the "
                "memory",
                f"CONFIG SET {name} {MAX_BUCKETS}, or use fewer buckets",
            )
        ]
    raise Forbidden("CONFIG GET returns neither hash-max-listpack-entries nor its old name")


class _Check(NamedTuple):
    name: str
    find: Callable[[Server], list[Finding]]
    fix_if_forbidden: str
    """What to do where the server forbids the commands of this check."""


_CHECKS = (
    _Check(
        "version", _version, "grant +info, or make sure that it is Redis 6.2 or newer, or Valkey"
    ),
    _Check(
        "eviction", _memory, f"grant +info, or make sure that maxmemory-policy is {_SAFE_POLICY}"
    ),
    _Check(
        "replicas",
        _replicas,
        "grant +info, or make sure that min-replicas-to-write is 1 if there are replicas",
    ),
    _Check("persistence", _persistence, "grant +info, or make sure that snapshots do not fail"),
    _Check("clock", _clock, "grant +time"),
    _Check(
        "encoding",
        _encoding,
        f"grant +config|get, or make sure that hash-max-listpack-entries is at least {MAX_BUCKETS}",
    ),
)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
