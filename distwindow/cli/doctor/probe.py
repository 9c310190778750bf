"""Calls of the scripts as a program makes them, for `doctor`: their rights and their latency."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from distwindow import Concurrency, ConfigurationError, DistwindowError, Limiter

from ...core.clock import SYSTEM
from ...core.stats import Bucket
from ...protocol import scripts
from ...protocol.commands import CURRENT_BUCKET, Flush, Lease, Reset
from ...protocol.keys import senders_name
from ...protocol.slot_commands import SLOT_COMMANDS
from ...store.redis.urls import parse_url_text
from ..servers import Server
from .finding import Finding, Forbidden, execute

_CALLS = 200
_SLOW_MS = 25.0
"""With a p99 above this, many calls come close to their default deadline of 250 ms."""
_TIMEOUT_S = 5.0
_LIMIT = "1000000/minute"
"""So high that nothing is refused."""
_SCRIPT_COMMANDS = ("evalsha", "eval")
_CLUSTER_COMMANDS = ("cluster|slots", "cluster|shards", "command")


def acl_rule(prefix: str, *, cluster: bool = False) -> str:
    """Return the ACL rule that a user of this prefix needs for all but concurrency limits, derived
    from the scripts' text.
    """
    called = _commands_of(name for name in scripts.script_names() if name not in SLOT_COMMANDS)
    connecting = _CLUSTER_COMMANDS if cluster else ()
    rights = " ".join(f"+{name}" for name in (*_SCRIPT_COMMANDS, *connecting, *sorted(called)))
    return f"ACL SETUSER <user> ~{prefix}:* {rights}"


def concurrency_acl_rule() -> str:
    """Return the ACL rule with which the user of `acl_rule` may also use concurrency limits."""
    return "ACL SETUSER <user> " + " ".join(f"+{n}" for n in sorted(_commands_of(SLOT_COMMANDS)))


def _commands_of(names: Iterable[str]) -> set[str]:
    """Return the commands that the scripts of these names call."""
    return {
        command.lower()
        for name in names
        for command in re.findall(r"""call\(['"](\w+)['"]""", scripts.load_script(name).text)
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


def probe_scripts(servers: Sequence[Server], url: str, prefix: str) -> Iterator[Finding]:
    """Call the scripts on temporary keys, and measure their latency."""
    try:
        for server in servers:
            # The library sends a script that a server does not have yet with EVAL.
            execute(server, "EVAL", "return 1", "0")
        _rotate_buckets(url, prefix)
        with Limiter(url, _LIMIT, prefix=prefix, timeout=_TIMEOUT_S) as limiter:
            key = _new_key()
            try:
                limiter.try_acquire(key)
                limiter.peek(key)
                limiter.stats(key)
                _flush(limiter, key)
                _lease(limiter, key)
                found = f"acquire, peek, lease, read, flush, refund and reset run on {prefix}:*"
                yield Finding("scripts", "ok", found)
                yield _measure_latency(limiter, key)
            finally:
                limiter.reset(key)
                _delete_senders(limiter, key)
    except (ConfigurationError, Forbidden) as exc:
        denied = re.search(r"NOPERM|permission|can't run this command", str(exc))
        cluster = parse_url_text(url).kind == "cluster"
        yield Finding(
            "scripts", "problem", str(exc), acl_rule(prefix, cluster=cluster) if denied else ""
        )
    except DistwindowError as exc:
        yield Finding("scripts", "problem", f"{exc}; every call would fail with this error")


def probe_concurrency(url: str, prefix: str) -> Iterator[Finding]:
    """Hold a slot of a temporary key, and be refused another."""
    try:
        with Concurrency(url, 1, prefix=prefix, timeout=_TIMEOUT_S) as slots:
            key = _new_key()
            with slots.hold(key):
                slots.try_hold(key)
                slots.stats(key)
        found = f"concurrency limits work on {prefix}:*"
        yield Finding("concurrency", "ok", found)
    except ConfigurationError as exc:
        denied = re.search(r"NOPERM|permission|can't run this command", str(exc))
        found = f"concurrency limits cannot be used, other limits can: {exc}"
        yield Finding("concurrency", "warning", found, concurrency_acl_rule() if denied else "")
    except DistwindowError as exc:
        yield Finding("concurrency", "problem", f"{exc}; every slot would fail with this error")


def _rotate_buckets(url: str, prefix: str) -> None:
    """Make buckets begin, end and expire, because each branch of the scripts has its own rights."""
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


def _lease(limiter: Limiter, key: str) -> None:
    limiter._store.execute(Lease(limiter._command_cache.acquire_command(key).charges, extra=1))


def _flush(limiter: Limiter, key: str) -> None:
    """Flush as a sender of which the ring has no record yet."""
    charges = limiter._command_cache.acquire_command(key).charges
    limiter._store.execute(
        Flush(charges, counts=((Bucket(CURRENT_BUCKET, 1),),), sender=secrets.token_hex(5), seq=1)
    )


def _delete_senders(limiter: Limiter, key: str) -> None:
    """Delete the records of senders, which a reset keeps and which would expire a window later."""
    (charge,) = limiter._command_cache.acquire_command(key).charges
    limiter._store.execute(Reset((charge._replace(ring=senders_name(charge.ring)),)))


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
