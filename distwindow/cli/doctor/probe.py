"""The part of `doctor` that uses the store as a program would: scripts, their rights, latency."""

from __future__ import annotations

import importlib.metadata
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from distwindow import ConfigurationError, DistwindowError, Limiter, __version__

from ...core.clock import SYSTEM
from ...core.stats import Bucket
from ...protocol import scripts as script
from ...protocol.commands import CURRENT_BUCKET, Flush, Reset
from ...protocol.keys import senders_name
from ...store.redis import urls as address
from ..servers import Server
from .finding import Finding, Forbidden, asked, looked

_CALLS = 200
_SLOW_MS = 25.0
"""At a p99 above this, the default deadline of a call (250 ms) is not far."""
_TIMEOUT = 5.0
_SLOTS = 16_384
_PLENTY = "1000000/minute"
_BESIDE_SCRIPTS = ("evalsha", "eval")
_OF_CLUSTERS = ("cluster|slots", "cluster|shards", "command")


def grant(prefix: str, *, cluster: bool = False) -> str:
    """The ACL rule that a user of this prefix needs, read from the scripts themselves."""
    calls = {
        call.lower()
        for name in script.script_names()
        for call in re.findall(r"""call\(['"](\w+)['"]""", script.load_script(name).text)
    }
    more = _OF_CLUSTERS if cluster else ()
    rights = " ".join(f"+{name}" for name in (*_BESIDE_SCRIPTS, *more, *sorted(calls)))
    return f"ACL SETUSER <user> ~{prefix}:* {rights}"


class _Stepping:
    """A clock that moves when it is told to, so that buckets change without waiting."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return SYSTEM.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return SYSTEM.monotonic()

    def sleep(self, seconds: float, /) -> None:
        SYSTEM.sleep(seconds)


def exercised(nodes: Sequence[Server], url: str, prefix: str) -> Iterator[Finding]:
    """Call the scripts on throw-away keys, and time them."""
    try:
        for server in nodes:
            asked(server, "EVAL", "return 1", "0")  # scripts are sent with EVAL when they are new
        _turn(url, prefix)
        with Limiter(url, _PLENTY, prefix=prefix, timeout=_TIMEOUT) as limiter:
            key = _new_key()
            try:
                limiter.try_acquire(key)
                limiter.peek(key)
                limiter.stats(key)
                _flush(limiter, key)
                said = f"acquire, peek, read, flush and reset run on {prefix}:*"
                yield Finding("scripts", "ok", said)
                yield _latency(limiter, key)
            finally:
                limiter.reset(key)
                _forget_flushes(limiter, key)
    except (ConfigurationError, Forbidden) as exc:
        denied = re.search(r"NOPERM|permission|can't run this command", str(exc))
        mend = (
            grant(prefix, cluster=address.parse_url_text(url).kind == "cluster") if denied else ""
        )
        yield Finding("scripts", "problem", str(exc), mend)
    except DistwindowError as exc:
        yield Finding("scripts", "problem", str(exc), "every call would fail like this")


def _turn(url: str, prefix: str) -> None:
    """Let buckets open, close and expire: each branch of the scripts has its own rights."""
    clock = _Stepping()
    with Limiter(
        url, _PLENTY, prefix=prefix, timeout=_TIMEOUT, clock="client", time=clock
    ) as limiter:
        key, bucket_ms = _new_key(), limiter.limits[0].bucket_ms
        try:
            for buckets in (0, 1, 3, limiter.limits[0].buckets - 2):
                clock.ahead_ms += buckets * bucket_ms
                limiter.refund(limiter.try_acquire(key))
                limiter.try_acquire(key)
        finally:
            limiter.reset(key)


def _flush(limiter: Limiter, key: str) -> None:
    """Flush as a process does that is heard of for the first time."""
    charges = limiter._command_cache.acquire(key).charges
    limiter._store.execute(
        Flush(charges, counts=((Bucket(CURRENT_BUCKET, 1),),), sender=secrets.token_hex(5), seq=1)
    )


def _forget_flushes(limiter: Limiter, key: str) -> None:
    """A reset leaves the records of what was flushed, which would expire a window later."""
    (charge,) = limiter._command_cache.acquire(key).charges
    limiter._store.execute(Reset((charge._replace(ring=senders_name(charge.ring)),)))


def _new_key() -> str:
    return f"doctor-{secrets.token_hex(6)}"


def _latency(limiter: Limiter, key: str) -> Finding:
    took = []
    for _ in range(_CALLS):
        begun = time.perf_counter()
        limiter.try_acquire(key)
        took.append((time.perf_counter() - begun) * 1000)
    took.sort()
    p50, p99 = took[_CALLS // 2], took[_CALLS * 99 // 100]
    found = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {_CALLS} calls"
    if p99 <= _SLOW_MS:
        return Finding("latency", "ok", found)
    return Finding(
        "latency",
        "warning",
        f"{found}: an admission waits for that, and the default deadline is 250 ms",
        "a server nearer by; what else keeps it busy (SLOWLOG, LATENCY DOCTOR)",
    )


def covered(server: Server) -> Iterator[Finding]:
    """Does the cluster serve every slot?"""

    def look() -> list[Finding]:
        said = asked(server, "CLUSTER INFO")
        fields: dict[str, Any] = said if isinstance(said, dict) else _lines(said)
        slots, state = int(fields.get("cluster_slots_ok", 0)), fields.get("cluster_state")
        if slots == _SLOTS and state == "ok":
            return [Finding("cluster", "ok", f"all {_SLOTS:,} slots served")]
        return [
            Finding(
                "cluster",
                "problem",
                f"state {state}, {slots:,} of {_SLOTS:,} slots served: keys in the others fail",
                "redis-cli --cluster check, then --cluster fix",
            )
        ]

    return iter(looked("cluster", look, "grant the user +cluster|info"))


def _lines(said: Any) -> dict[str, Any]:
    text = said.decode() if isinstance(said, bytes) else str(said)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def installed() -> Iterator[Finding]:
    """What runs here."""
    try:
        hiredis = f"hiredis {importlib.metadata.version('hiredis')}"
    except importlib.metadata.PackageNotFoundError:
        yield Finding("library", "problem", "hiredis is missing", "pip install 'redis[hiredis]'")
        hiredis = "no hiredis"
    yield Finding(
        "library", "ok", f"distwindow {__version__}, redis-py {redis.__version__}, {hiredis}"
    )
    yield Finding("lua", "ok", f"scripts from {script.scripts_folder()}")
