"""`distwindow doctor`: checks whether a store is fit for limits."""

from __future__ import annotations

import importlib.metadata
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import redis
import typer
from rich.console import Console
from rich.text import Text

from .. import Concurrency, ConfigurationError, DistwindowError, Limiter, __version__
from ..concurrency.commands import SLOT_COMMANDS
from ..errors import counted
from ..inspect.servers import Server, open_servers
from ..ring.clock import SYSTEM
from ..ring.command import load_script, script_names
from ..ring.commands import CURRENT_BUCKET, Flush, Lease, Reset
from ..ring.key import check_prefix, senders_name
from ..ring.limit import MAX_BUCKETS
from ..ring.stats import Bucket
from ..runtime.options import ClockChoice
from ..stores.redis.handshake import MIN_VERSION, time_ms
from ..stores.redis.outcome import GIVE_TIME
from ..stores.redis.urls import masked_url, parse_url_text
from .command import (
    DEFAULT_PREFIX,
    DEFAULT_URL,
    JsonOption,
    PrefixOption,
    UrlOption,
    mask_passwords,
    report_errors,
)
from .render import make_console, printable

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    level: Level
    found: str
    fix: str = ""
    """What to do about it; empty where nothing needs to be done."""


class Forbidden(Exception):
    """The server forbids a command that a check needs. The text is the server's error."""


def execute(server: Server, *words: str) -> Any:
    """Send a command, and return its reply. `Forbidden` if it is not allowed or not known."""
    try:
        return server.client.execute_command(*words)
    except redis.ResponseError as exc:  # NOPERM, or a provider has renamed the command
        raise Forbidden(str(exc)) from None


def read_info(server: Server, section: str) -> dict[str, Any]:
    fields: dict[str, Any] = execute(server, "INFO", section)
    return fields


def read_config(server: Server, pattern: str) -> dict[str, str]:
    """Return the settings whose names match `pattern`."""
    reply = execute(server, "CONFIG GET", pattern)
    return {_text(name): _text(value) for name, value in reply.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class Check(NamedTuple):
    """One check of the settings of a server."""

    name: str
    find: Callable[[Server], Finding | list[Finding]]
    fix_if_forbidden: str
    """What to do where the server forbids the commands of this check."""

    def run(self, server: Server) -> list[Finding]:
        """Return what it finds. Where the server forbids the check, that is the finding."""
        try:
            found = self.find(server)
        except Forbidden as exc:
            fix = self.fix_if_forbidden
            found = Finding(self.name, "warning", f"could not check: {exc}", fix)
        return found if isinstance(found, list) else [found]


_MAX_CLOCK_OFFSET_MS = 1000
"""With more, times in the logs of client and server cannot be matched."""
_MEMORY_WARNING_SHARE = 0.8
_SAFE_POLICY = "noeviction"
_CLUSTER_SLOTS = 16_384


def check_installation() -> Iterator[Finding]:
    """Yield the versions of the packages that run here, and whether the scripts are there."""
    try:
        hiredis = f"hiredis {importlib.metadata.version('hiredis')}"
    except importlib.metadata.PackageNotFoundError:
        yield Finding("library", "problem", "hiredis is missing", "pip install 'redis[hiredis]'")
        hiredis = "no hiredis"
    yield Finding(
        "library", "ok", f"distwindow {__version__}, redis-py {redis.__version__}, {hiredis}"
    )
    yield Finding("lua", "ok", f"{len(script_names())} scripts of the package can be read")


def _slots(server: Server) -> Finding:
    """Check that a cluster serves every slot, by what one of its nodes reports."""
    reply = execute(server, "CLUSTER INFO")
    fields: dict[str, Any] = reply if isinstance(reply, dict) else {}
    if not fields:
        fields = dict(line.split(":", 1) for line in _text(reply).splitlines() if ":" in line)
    slots, state = int(fields.get("cluster_slots_ok", 0)), fields.get("cluster_state")
    if slots == _CLUSTER_SLOTS and state == "ok":
        return Finding("cluster", "ok", f"all {_CLUSTER_SLOTS:,} slots served")
    return Finding(
        "cluster",
        "problem",
        f"state {state}, {slots:,} of {_CLUSTER_SLOTS:,} slots served: calls fail for keys in "
        "the others",
        "redis-cli --cluster check, then --cluster fix",
    )


def _version(server: Server) -> Finding:
    fields = read_info(server, "server")
    version = str(fields.get("redis_version", "?"))
    name = f"Redis {version}"
    if "valkey_version" in fields:
        name = f"Valkey {fields['valkey_version']} (compatible with Redis {version})"
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and tuple(numbers) < MIN_VERSION:
        return Finding(
            "version", "problem", f"{name} is too old", "use Redis 6.2 or newer, or Valkey"
        )
    return Finding("version", "ok", name)


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


def _replicas(server: Server) -> Finding:
    fields = read_info(server, "replication")
    if fields.get("role") == "slave":
        return Finding(
            "replicas",
            "problem",
            "this is a replica, which refuses writes",
            "name the primary in the URL, or use redis+sentinel://",
        )
    count = int(fields.get("connected_slaves", 0))
    if not count:
        return Finding(
            "replicas",
            "ok",
            "none; if the server is lost, so are the counts, and windows start empty",
        )
    replicas = f"{count} replica{'s' if count > 1 else ''}"
    # INFO has this field only where min-replicas-to-write is set. CONFIG GET may be forbidden.
    if "min_slaves_good_slaves" in fields:
        return Finding("replicas", "ok", f"{replicas}, min-replicas-to-write is set")
    return Finding(
        "replicas",
        "warning",
        f"{replicas}, but min-replicas-to-write is 0: a failover loses counts that were not "
        "replicated yet, and a primary that is cut off continues to admit calls",
        "CONFIG SET min-replicas-to-write 1",
    )


def _persistence(server: Server) -> Finding:
    fields = read_info(server, "persistence")
    if str(fields.get("rdb_last_bgsave_status", "ok")) != "ok":
        return Finding(
            "persistence",
            "warning",
            "the last snapshot failed, after which Redis refuses writes (MISCONF)",
            'repair the disk, or CONFIG SET save "": limits need no persistence',
        )
    state = "append-only file on" if fields.get("aof_enabled") else "append-only file off"
    return Finding("persistence", "ok", f"{state}; limits need none")


def _clock(server: Server) -> Finding:
    before = time.time_ns() // 1_000_000
    server_ms = time_ms(execute(server, "TIME"))
    after = time.time_ns() // 1_000_000
    offset = server_ms - (before + after) // 2
    if abs(offset) <= _MAX_CLOCK_OFFSET_MS + (after - before) // 2:
        return Finding("clock", "ok", f"{offset:+d} ms from this machine's")
    return Finding(
        "clock",
        "warning",
        f"{offset / 1000:+,.1f} s from this machine's: limits hold, because they use the "
        "server's clock, but the times in decisions and statistics are not this machine's",
        "synchronize both by NTP",
    )


def _encoding(server: Server) -> Finding:
    for name in ("hash-max-listpack-entries", "hash-max-ziplist-entries"):
        value = read_config(server, name).get(name)
        if value is None:
            continue
        if int(value) >= MAX_BUCKETS:
            return Finding("encoding", "ok", f"{name} {value}")
        return Finding(
            "encoding",
            "warning",
            f"{name} {value}: a limit with more buckets than about that takes many times the "
            "memory",
            f"CONFIG SET {name} {MAX_BUCKETS}, or use fewer buckets",
        )
    raise Forbidden("CONFIG GET returns neither hash-max-listpack-entries nor its old name")


_CLUSTER_CHECK = Check("cluster", _slots, "grant the user +cluster|info")
_CHECKS = (
    Check(
        "version", _version, "grant +info, or make sure that it is Redis 6.2 or newer, or Valkey"
    ),
    Check(
        "eviction", _memory, f"grant +info, or make sure that maxmemory-policy is {_SAFE_POLICY}"
    ),
    Check(
        "replicas",
        _replicas,
        "grant +info, or make sure that min-replicas-to-write is 1 if there are replicas",
    ),
    Check("persistence", _persistence, "grant +info, or make sure that snapshots do not fail"),
    Check("clock", _clock, "grant +time, if the server has TIME"),
    Check(
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


_CALLS = 200
_SLOW_MS = 25.0
"""With a p99 above this, many calls come close to their default deadline of 250 ms."""
_TIMEOUT_S = 5.0
_LIMIT = "1000000/minute"
"""So high that nothing is refused."""
_SCRIPT_COMMANDS = ("evalsha", "eval")
_CLUSTER_COMMANDS = ("cluster|slots", "cluster|shards", "command", "asking")


def acl_rule(prefix: str, *, cluster: bool = False) -> str:
    """Return the ACL rule for all but concurrency limits, derived from the scripts' text."""
    called = _commands_of(name for name in script_names() if name not in SLOT_COMMANDS)
    connecting = _CLUSTER_COMMANDS if cluster else ()
    rights = " ".join(f"+{name}" for name in (*_SCRIPT_COMMANDS, *connecting, *sorted(called)))
    return f"ACL SETUSER <user> ~{prefix}:* {rights}"


def _commands_of(names: Iterable[str]) -> set[str]:
    """Return the commands that the scripts of these names call."""
    return {
        command.lower()
        for name in names
        for command in re.findall(r"""call\(['"](\w+)['"]""", load_script(name).text)
    }


class _AdvanceableClock:
    """The system's clock plus `ahead_ms`, so that a new bucket needs no waiting."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return SYSTEM.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return SYSTEM.monotonic()

    def sleep(self, seconds: float, /) -> None:
        SYSTEM.sleep(seconds)


_CLIENT_CLOCK = (
    'give clock="client" to the limiters and RateLimits of all processes, whose clocks then have '
    'to agree; consistency="leased" does not work with it'
)


def refusal_of_time(url: str, prefix: str) -> str:
    """Return the error of a server that executes TIME for nobody; empty for all others."""
    try:
        with Limiter(url, _LIMIT, prefix=prefix, timeout=_TIMEOUT_S) as limiter:
            limiter.peek(_new_key())
    except DistwindowError as exc:
        return str(exc) if GIVE_TIME in str(exc) else ""
    return ""


def probe_scripts(
    servers: Sequence[Server], url: str, prefix: str, clock: ClockChoice
) -> Iterator[Finding]:
    """Call the scripts on temporary keys, and measure their latency."""
    try:
        for server in servers:
            # The library sends a script that a server does not have yet with EVAL.
            execute(server, "EVAL", "return 1", "0")
        _rotate_buckets(url, prefix)
        with Limiter(url, _LIMIT, prefix=prefix, timeout=_TIMEOUT_S, clock=clock) as limiter:
            key, store = _new_key(), limiter.decider.store
            (charge,) = limiter.decider.commands.acquire_command(key).charges
            try:
                limiter.try_acquire(key)
                limiter.peek(key)
                limiter.stats(key)
                counts = ((Bucket(CURRENT_BUCKET, 1),),)
                # By a sender of which the ring has no record yet.
                store.execute(Flush((charge,), counts=counts, sender=secrets.token_hex(5), seq=1))
                store.execute(Lease((charge,), extra=1))
                found = f"acquire, peek, lease, read, flush, refund and reset run on {prefix}:*"
                yield Finding("scripts", "ok", found)
                yield _measure_latency(limiter, key)
            finally:
                limiter.reset(key)
                # It keeps the records of senders, which would expire a window later.
                store.execute(Reset((charge._replace(ring=senders_name(charge.ring)),)))
    except (ConfigurationError, Forbidden) as exc:
        denied = re.search(r"NOPERM|permission|can't run this command", str(exc))
        cluster = parse_url_text(url).kind == "cluster"
        yield Finding(
            "scripts", "problem", str(exc), acl_rule(prefix, cluster=cluster) if denied else ""
        )
    except DistwindowError as exc:
        yield Finding("scripts", "problem", f"{exc}; every call would fail with this error")


def probe_concurrency(url: str, prefix: str, clock: ClockChoice) -> Iterator[Finding]:
    """Hold a slot of a temporary key, and be refused another."""
    try:
        with Concurrency(url, 1, prefix=prefix, timeout=_TIMEOUT_S, clock=clock) as slots:
            key = _new_key()
            with slots.hold(key):
                slots.try_hold(key)
                slots.stats(key)
        found = f"concurrency limits work on {prefix}:*"
        yield Finding("concurrency", "ok", found)
    except ConfigurationError as exc:
        denied = re.search(r"NOPERM|permission|can't run this command", str(exc))
        found = f"concurrency limits cannot be used, other limits can: {exc}"
        rights = " ".join(f"+{name}" for name in sorted(_commands_of(SLOT_COMMANDS)))
        fix = f"ACL SETUSER <user> {rights}" if denied else ""
        yield Finding("concurrency", "warning", found, fix)
    except DistwindowError as exc:
        yield Finding("concurrency", "problem", f"{exc}; every slot would fail with this error")


def _rotate_buckets(url: str, prefix: str) -> None:
    """Rotate buckets until some have expired: each branch of the scripts has its own rights."""
    clock = _AdvanceableClock()
    with Limiter(
        url, _LIMIT, prefix=prefix, timeout=_TIMEOUT_S, clock="client", time=clock
    ) as limiter:
        key, bucket_ms = _new_key(), limiter.limits[0].bucket_ms
        try:
            for buckets in (0, 1, 3, limiter.limits[0].buckets - 2):
                clock.ahead_ms += buckets * bucket_ms
                limiter.refund(limiter.try_acquire(key))
                limiter.try_acquire(key)
        finally:
            limiter.reset(key)


def _new_key() -> str:
    return f"doctor-{secrets.token_hex(6)}"


def _measure_latency(limiter: Limiter, key: str) -> Finding:
    latencies_ms = []
    for _ in range(_CALLS):
        started_at = time.perf_counter()
        limiter.try_acquire(key)
        latencies_ms.append((time.perf_counter() - started_at) * 1000)
    latencies_ms.sort()
    p50, p99 = latencies_ms[_CALLS // 2], latencies_ms[_CALLS * 99 // 100]
    found = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {_CALLS} calls"
    if p99 <= _SLOW_MS:
        return Finding("latency", "ok", found)
    return Finding(
        "latency",
        "warning",
        f"{found}: every admission waits this long, and the default deadline is 250 ms",
        "use a server nearer by, or find what else keeps it busy (SLOWLOG, LATENCY DOCTOR)",
    )


_LABELS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


@report_errors
def doctor(
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Check what limits depend on: version, eviction, replicas, clock, script rights, latency.

    A finding that is unsafe is printed with its fix. Exit 0: fit, perhaps with warnings. Exit 1: a
    problem. Exit 2: the store cannot be reached.
    """
    check_prefix(prefix)
    console = make_console()
    findings: list[Finding] = []
    with open_servers(url) as servers:
        for finding in _findings(servers, url, prefix):
            masked = finding._replace(found=mask_passwords(finding.found, url))
            findings.append(masked)
            if not as_json:
                _print_finding(masked, console)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        report = {"url": masked_url(url), "fit": not problems}
        print(json.dumps(report | {"findings": [one._asdict() for one in findings]}, indent=1))
    else:
        console.print()
        console.print(Text(f"{masked_url(url)}: {_summary(problems, warnings)}", style="bold"))
    if problems:
        raise typer.Exit(1)


def _findings(servers: Sequence[Server], url: str, prefix: str) -> Iterator[Finding]:
    for server in servers:
        # A failure to connect ends the command. PING may be forbidden, which is an answer.
        with suppress(redis.exceptions.NoPermissionError):
            server.client.ping()
    yield from check_installation()
    several = len(servers) > 1
    for server in servers:
        for check in _CHECKS:
            for one in check.run(server):
                yield one._replace(found=f"{server.name}: {one.found}") if several else one
    if parse_url_text(url).kind == "cluster":
        yield from _CLUSTER_CHECK.run(servers[0])
    clock: ClockChoice = "server"
    if refusal := refusal_of_time(url, prefix):
        clock = "client"
        yield Finding("scripts", "warning", refusal, _CLIENT_CLOCK)
    yield from probe_scripts(servers, url, prefix, clock)
    yield from probe_concurrency(url, prefix, clock)


def _print_finding(finding: Finding, console: Console) -> None:
    label, style = _LABELS[finding.level]
    head = Text(f"{label:7}", style=style).append(
        f"  {finding.check:11}  ", style="not bold default"
    )
    indent = len(head)
    width = max(30, console.width - indent)
    lines = Text(printable(finding.found)).wrap(console, width)
    lines[0] = head.append_text(lines[0])
    if finding.fix:
        fix = Text("fix: ", style="cyan").append(printable(finding.fix), style="default")
        lines.extend(fix.wrap(console, width))
    for i, line in enumerate(lines):
        console.print(Text(" " * indent if i else "").append_text(line))


def _summary(problems: int, warnings: int) -> str:
    found = ((problems, "problem"), (warnings, "warning"))
    return " and ".join(counted(*one) for one in found if one[0]) or "fit for limits"
