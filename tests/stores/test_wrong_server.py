"""What answers where no connection to Redis can be opened: another server, TLS, or none. It is a
mistake only if the answer says so.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, get_args

import fakeredis
import pytest
import redis

from distwindow import AsyncLimiter, ConfigurationError, StoreError
from distwindow.away.policy import Answer
from distwindow.runtime.options import Consistency
from distwindow.stores.redis.wrong_server import endpoints_of
from tests.harness import Harness, LimiterAdapter
from tests.servers import (
    Certificates,
    Delay,
    Proxy,
    ResetAfterSend,
    ResetBeforeSend,
    SentinelSet,
    Standalone,
    until,
)
from tests.servers.other import (
    BLANK,
    GRPC,
    HTTP,
    HTTP_AFTER_HEAD,
    HTTP_WITHOUT_STATUS,
    IMAP,
    MEMCACHED,
    MYSQL,
    SILENT,
    SMTP,
    SSH,
    Manner,
    OtherServer,
)

# CPython leaves one open whose peer resets the connection before the handshake, also for redis-py.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket")

PORT = "the port of the URL is wrong"
HTTP_SERVER = f"answers as an HTTP server does, and not as Redis; {PORT}"
WANTS_TLS = "wants TLS; write rediss:// in place of redis://"
IN_PLAIN = "answers in plain, without TLS; write redis:// in place of rediss://"

OTHERS = {
    "http": (HTTP, HTTP_SERVER),
    "http-after-head": (HTTP_AFTER_HEAD, HTTP_SERVER),
    "http-without-status": (HTTP_WITHOUT_STATUS, HTTP_SERVER),
    "grpc": (GRPC, "an HTTP/2 or gRPC server"),
    "smtp": (SMTP, "a mail or FTP server"),
    "imap": (IMAP, "a mail server"),
    "ssh": (SSH, "an SSH server"),
    "mysql": (MYSQL, "MySQL"),
    "memcached": (MEMCACHED, "memcached"),
}
SCHEMES = ["redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel"]
TIMEOUT_S = 5.0
"""That the machine is busy is no mistake either."""


@pytest.fixture(scope="module", autouse=True)
def _collects_what_is_left_here() -> Iterator[None]:
    yield
    gc.collect()


def url_of(scheme: str, address: str) -> str:
    """Return the URL of a store that is said to be at `address`."""
    return f"{scheme}://{address}" + ("/service" if "sentinel" in scheme else "")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server() -> Iterator[Standalone]:
    with Standalone(tls=True) as server:
        yield server


@pytest.mark.compat
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("other", OTHERS)
def test_another_server_is_named_by_each_call_and_by_health(
    harness: Harness, caplog: pytest.LogCaptureFixture, other: str, scheme: str
) -> None:
    manner, text = OTHERS[other]
    with OtherServer(manner) as server:
        limiter = harness.limiter(
            url_of(scheme, server.address), timeout=TIMEOUT_S, on_store_error="allow"
        )
        # On a busy machine an answer may come too late for the first look.
        until(lambda: text in str(error_in(lambda: limiter.try_acquire("k"))), 30)
        errors = [error_in(lambda: limiter.try_acquire("k")) for _ in range(3)]
        assert {type(error) for error in errors} == {ConfigurationError}
        (message,) = set(map(str, errors))
        assert f"{server.address} answers" in message
        assert text in message
        until(lambda: text in caplog.text, what="the log line")
        health = limiter.limiter.health()
        assert (health.up, health.last_error) == (False, message)
        lines = [line for line in caplog.messages if PORT in line]
        assert len(lines) == 1
        assert "cannot be used: " in lines[0]
        assert lines[0].endswith("; calls raise ConfigurationError")


def test_in_shadow_the_log_says_that_calls_are_admitted(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    manner, text = next(iter(OTHERS.values()))
    with OtherServer(manner) as server:
        url = url_of("redis", server.address)
        limiter = harness.limiter(url, timeout=TIMEOUT_S, shadow=True)

        def is_logged() -> bool:
            assert limiter.try_acquire("k")
            return "cannot be used" in caplog.text

        until(is_logged, 30)
    (line,) = [line for line in caplog.messages if "cannot be used" in line]
    assert text in line
    assert line.endswith("; calls are admitted, as the limit is in shadow")


TLS_CASES: dict[str, tuple[Callable[[Standalone], str], str]] = {
    "plain-to-tls": (lambda s: f"redis://{s.host}:{s.tls_port}/0", WANTS_TLS),
    "tls-to-plain": (lambda s: f"rediss://{s.host}:{s.port}/0", IN_PLAIN),
    "cluster-plain-to-tls": (lambda s: f"redis+cluster://{s.host}:{s.tls_port}", WANTS_TLS),
    "cluster-tls-to-plain": (lambda s: f"rediss+cluster://{s.host}:{s.port}", IN_PLAIN),
    "sentinel-plain-to-tls": (lambda s: f"redis+sentinel://{s.host}:{s.tls_port}/s", WANTS_TLS),
    "sentinel-tls-to-plain": (lambda s: f"rediss+sentinel://{s.host}:{s.port}/s", IN_PLAIN),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", TLS_CASES)
@pytest.mark.parametrize("policy", get_args(Answer))
def test_tls_and_plain_are_told_apart_under_every_policy(
    harness: Harness, tls_server: Standalone, case: str, policy: str
) -> None:
    make_url, text = TLS_CASES[case]
    limiter = harness.limiter(make_url(tls_server), timeout=TIMEOUT_S, on_store_error=policy)
    until(lambda: text in str(error_in(lambda: limiter.try_acquire("k"))), 30)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=text):
            limiter.try_acquire("k")


@pytest.mark.compat
@pytest.mark.parametrize("case", [case for case in TLS_CASES if case.endswith("tls-to-plain")])
def test_the_first_call_is_told_before_its_timeout(
    harness: Harness, tls_server: Standalone, case: str
) -> None:
    """Redis waits for more of what it takes for the beginning of a command."""
    make_url, text = TLS_CASES[case]

    def is_told() -> bool:
        limiter = harness.limiter(make_url(tls_server), timeout=2.0)
        return text in str(error_in(lambda: limiter.try_acquire("k")))

    until(is_told, 30)  # on a busy machine the look may come too late, too


@pytest.mark.compat
@pytest.mark.parametrize("consistency", get_args(Consistency))
@pytest.mark.parametrize("case", ["plain-to-tls", "tls-to-plain"])
def test_each_call_says_so_in_every_consistency(
    harness: Harness, tls_server: Standalone, case: str, consistency: str
) -> None:
    make_url, text = TLS_CASES[case]
    limiter = harness.limiter(
        make_url(tls_server), timeout=TIMEOUT_S, consistency=consistency, on_store_error="allow",
        sync_interval=0.02,
    )  # fmt: skip
    until(lambda: text in str(error_in(lambda: limiter.try_acquire("k"))), 30)
    assert text in str(error_in(lambda: limiter.try_acquire("other")))
    assert text in str(limiter.limiter.health().last_error)


def error_in(call: Callable[[], object]) -> Exception | None:
    """Return what `call` raises, if it does."""
    try:
        call()
    except Exception as exc:
        return exc
    return None


@pytest.mark.compat
@pytest.mark.parametrize("manner", [HTTP, SMTP], ids=["http", "smtp"])
def test_a_server_within_tls_is_named(
    harness: Harness, certificates: Certificates, manner: Manner
) -> None:
    """Its certificate is right, so TLS is no mistake here, but the port is."""
    with OtherServer(manner, tls=certificates.server_context()) as server:
        url = f"rediss://{server.address}/0?ssl_ca_certs={certificates.ca}"
        limiter = harness.limiter(url, timeout=5.0)
        with pytest.raises(ConfigurationError, match=PORT):
            limiter.try_acquire("k")


# -- what is no mistake ----------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("manner", [BLANK, SILENT], ids=["closes", "is-silent"])
def test_a_server_that_says_nothing_is_away(harness: Harness, manner: Manner, scheme: str) -> None:
    """A load balancer without a server behind it closes what it accepts."""
    with OtherServer(manner) as server:
        limiter = harness.limiter(url_of(scheme, server.address), timeout=0.2)
        for _ in range(4):
            with pytest.raises(StoreError):
                limiter.try_acquire("k")


@pytest.mark.compat
@pytest.mark.parametrize("fault", [ResetBeforeSend(), ResetAfterSend()], ids=str)
@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_resets_is_away(
    harness: Harness, tls_server: Standalone, fault: Any, tls: bool
) -> None:
    port = tls_server.tls_port if tls else tls_server.port
    with Proxy(port) as proxy, proxy.inject(fault):
        url = proxy.url if not tls else f"rediss://127.0.0.1:{proxy.port}/0"
        limiter = harness.limiter(url, timeout=1.0)
        for _ in range(4):
            with pytest.raises(StoreError):
                limiter.try_acquire("k")


def test_one_of_several_addresses_is_no_proof(harness: Harness) -> None:
    """The others may be the right ones, and away."""
    with OtherServer(HTTP) as server:
        for scheme in ("redis+cluster", "redis+sentinel"):
            url = url_of(scheme, f"{server.address},127.0.0.1:1")
            limiter = harness.limiter(url, timeout=5.0)
            with pytest.raises(StoreError):
                limiter.try_acquire("k")


@pytest.mark.compat
@pytest.mark.parametrize("tls", [False, True])
def test_a_slow_link_is_no_mistake(harness: Harness, tls_server: Standalone, tls: bool) -> None:
    """Connecting takes longer than the wait before the look at who answers."""
    port = tls_server.tls_port if tls else tls_server.port
    query = tls_server.tls_url.partition("?")[2]
    with Proxy(port) as proxy, proxy.inject(Delay(replies=0.15)):
        scheme, options = ("rediss", f"?{query}") if tls else ("redis", "")
        url = f"{scheme}://127.0.0.1:{proxy.port}/0{options}"
        limiter = harness.limiter(url, timeout=0.8)
        until(lambda: _is_admitted(limiter))


def _is_admitted(limiter: LimiterAdapter) -> bool:
    try:
        return bool(limiter.try_acquire("k"))
    except StoreError:
        return False


def test_an_outage_is_looked_into_rarely(harness: Harness) -> None:
    """Each look costs a struggling server two connections; the probes cost one each."""
    with OtherServer(BLANK) as server:
        limiter = harness.limiter(f"redis://{server.address}/0", timeout=TIMEOUT_S)
        began = time.monotonic()
        with pytest.raises(StoreError):
            limiter.try_acquire("k")
        until(lambda: len(server.received) >= 12, what="some probes")
        looks = sum(first.startswith(b"PING") for first in server.received)
        assert 1 <= looks <= 1 + (time.monotonic() - began) / 5


def test_connections_of_other_classes_are_not_looked_at() -> None:
    """They may go nowhere: a fake one has the host and port of a real server."""
    fake = fakeredis.FakeRedis(host="127.0.0.1", port=6379)
    for pool in (fake.connection_pool, redis.ConnectionPool.from_url("unix:///run/redis.sock")):
        assert endpoints_of(pool.make_connection()) == []


# -- what changes later ----------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("other", ["http", "smtp"])
def test_calls_are_admitted_as_soon_as_redis_is_there(
    harness: Harness, redis_url: str, prefix: str, other: str
) -> None:
    manner, text = OTHERS[other]
    with ExitStack() as stack:
        server = stack.enter_context(OtherServer(manner))
        proxy = stack.enter_context(Proxy(server.port))
        limiter = harness.limiter(
            f"redis://127.0.0.1:{proxy.port}/0", prefix=prefix, timeout=5.0, on_store_error="deny"
        )
        for _ in range(3):
            with pytest.raises(ConfigurationError, match=text):
                limiter.try_acquire("k")
        proxy.upstream = int(redis_url.rpartition(":")[2].partition("/")[0])
        assert limiter.try_acquire("k")
        assert limiter.try_acquire("k").source == "store"
        until(lambda: limiter.limiter.health().up)


@pytest.mark.compat
@pytest.mark.parametrize("to_tls", [True, False])
def test_tls_that_is_switched_on_or_off_is_noticed(
    harness: Harness, tls_server: Standalone, to_tls: bool
) -> None:
    plain, tls = tls_server.port, tls_server.tls_port
    query = tls_server.tls_url.partition("?")[2]
    with Proxy(plain if to_tls else tls) as proxy:
        scheme, options = ("redis", "") if to_tls else ("rediss", f"?{query}")
        limiter = harness.limiter(
            f"{scheme}://127.0.0.1:{proxy.port}/0{options}", timeout=1.0,
            on_store_error="allow",
        )  # fmt: skip
        until(lambda: _is_admitted(limiter) and limiter.try_acquire("k").source == "store")
        proxy.upstream = tls if to_tls else plain
        proxy.cut()
        text = WANTS_TLS if to_tls else IN_PLAIN
        until(lambda: text in str(error_in(lambda: limiter.try_acquire("k"))), 30)
        assert text in str(error_in(lambda: limiter.try_acquire("k")))
        proxy.upstream = plain if to_tls else tls
        until(lambda: _is_admitted(limiter) and limiter.try_acquire("k").source == "store")


@pytest.mark.slow
def test_the_port_of_a_sentinel_is_named(harness: Harness) -> None:
    with SentinelSet() as sentinels:
        address = sentinels.url.partition("://")[2].partition(",")[0]
        limiter = harness.limiter(f"redis://{address}/0", timeout=5.0)
        with pytest.raises(ConfigurationError, match=r"is a sentinel.*redis\+sentinel://"):
            limiter.try_acquire("k")


# -- what cancels and closes -----------------------------------------------------------------------


async def test_a_call_that_is_cancelled_meanwhile_leaves_nothing(
    tls_server: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "asyncio")
    url = TLS_CASES["tls-to-plain"][0](tls_server)
    for seconds in (0.0, 0.1, 0.25, 0.255, 0.3):
        async with AsyncLimiter(url, "10/second", timeout=TIMEOUT_S) as limiter:
            call = asyncio.ensure_future(limiter.try_acquire("k"))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    assert not caplog.messages
