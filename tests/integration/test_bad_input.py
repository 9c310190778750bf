"""Every argument works, or raises one clear error that names the value and what to do. No error
shows a password, and no failed call leaves keys in Redis.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import re
import socketserver
import threading
import time as system_time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import (
    AsyncLimiter,
    ConfigurationError,
    DistwindowError,
    Key,
    Limit,
    Limiter,
    StoreError,
    StoreUnavailable,
)
from distwindow.protocol.keys import escape
from tests.event_loops import uvloop_param
from tests.servers import Standalone
from tests.unit.clock_and_stores import fresh_key

SECRET = "hunter2-x9"


async def attempt(
    limiter_class: type, store: Any, key: Any = "key", limits: Any = "5/minute", **options: Any
) -> Any:
    """Make the first call of a new limiter."""
    options = {"timeout": 5.0, **options}
    if limiter_class is Limiter:
        with Limiter(store, limits, **options) as limiter:
            return limiter.try_acquire(key)
    async with AsyncLimiter(store, limits, **options) as async_limiter:
        return await async_limiter.try_acquire(key)


def error_of(limiter_class: type, store: Any, **options: Any) -> BaseException:
    """Return what the first call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the callers check the type
        asyncio.run(attempt(limiter_class, store, **options))
    return caught.value


def all_texts_of(exc: BaseException) -> str:
    """Return the message, the repr, and what a log would show, with all causes and contexts."""
    texts = [str(exc), repr(exc), *traceback.format_exception(exc)]
    seen: BaseException | None = exc
    while seen is not None:
        texts += [str(seen), repr(seen), repr(seen.args)]
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)


each_limiter = pytest.mark.parametrize(
    "limiter_class",
    [
        pytest.param(Limiter, id="blocking"),
        pytest.param(AsyncLimiter, id="asyncio"),
        uvloop_param(AsyncLimiter),
    ],
)


# -- stores ---------------------------------------------------------------------------------------

URLS: dict[str, str] = {
    "": 'the usual one is "redis://localhost:6379/0"',
    "localhost": "begins with none of",
    "localhost:6379": "begins with none of",
    "http://localhost": "redis+cluster://",
    "reddis://localhost": "begins with none of",
    "redis:/localhost": "begins with none of",
    "redis//localhost": "begins with none of",
    "memory:": 'write "memory://"',
    "memory://x": 'write "memory://"',
    "redis://localhost:port": "port",
    "redis://localhost:99999": "0-65535",
    "redis://localhost/notadb": "is not a database number",
    "redis://localhost?db=x": "'db'",
    "redis://localhost?socket_timeout=soon": "'socket_timeout'",
    "redis+sentinel://localhost:26379": "names no service",
    "redis+sentinel://localhost:x/service": "is not a port",
    "redis+sentinel://localhost/service/x": "is not a database number",
    "redis+cluster://localhost/3": "database 0 only",
    "redis+cluster://localhost?db=3": "database 0 only",
    "redis+cluster://": "empty host name",
    "redis+cluster://:7000": "empty host name",
    "redis+cluster://a:1,,b:2": "empty host name",
    "redis+cluster://a:70000": "is not a port",
}


@each_limiter
@pytest.mark.parametrize("url", URLS)
def test_a_url_that_is_none(limiter_class: type, url: str) -> None:
    exc = error_of(limiter_class, url)
    assert isinstance(exc, ConfigurationError)
    assert isinstance(exc, ValueError)
    assert repr(url) in str(exc)
    assert URLS[url] in str(exc)


@each_limiter
def test_a_url_with_an_unclosed_ipv6_address(limiter_class: type) -> None:
    exc = error_of(limiter_class, "redis://[::1")
    assert isinstance(exc, ConfigurationError)
    assert "redis://[::1" in str(exc)


@each_limiter
def test_a_unix_url_without_a_path(limiter_class: type) -> None:
    assert isinstance(error_of(limiter_class, "unix://"), ConfigurationError)


@each_limiter
@pytest.mark.parametrize("store", [None, 5, b"redis://localhost", object(), ["redis://localhost"]])
def test_a_store_that_is_none(limiter_class: type, store: Any) -> None:
    exc = error_of(limiter_class, store)
    assert isinstance(exc, ConfigurationError)
    assert f"{type(store).__name__} is no store: give a URL as a str, or a redis" in str(exc)


@each_limiter
@pytest.mark.parametrize(
    "store",
    [
        f"redis://:{SECRET}@host".encode(),
        [f"redis://:{SECRET}@host"],
        {"password": SECRET},
        f"unix://u:a/{SECRET}@/tmp/x.sock",
    ],
)
def test_no_password_of_what_is_no_store(limiter_class: type, store: Any) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, store))


@each_limiter
def test_no_password_where_a_limit_or_a_clock_should_be(limiter_class: type) -> None:
    url = f"redis://:{SECRET}@host"
    assert SECRET not in all_texts_of(error_of(limiter_class, "1/second", limits=url))
    assert SECRET not in all_texts_of(error_of(limiter_class, "memory://", clock=url))


@pytest.mark.event_loops
def test_a_client_of_the_other_kind() -> None:
    blocking, asynchronous = redis.Redis(), redis.asyncio.Redis()
    assert "use AsyncLimiter with it" in str(error_of(Limiter, asynchronous))
    assert "use Limiter with it" in str(error_of(AsyncLimiter, blocking))
    blocking.close()


@each_limiter
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://h?socket_timout=1", "no option 'socket_timout'; did you mean socket_timeout"),
        ("rediss://h?ssl_ca_cert=x", "no option 'ssl_ca_cert'; did you mean ssl_ca_certs"),
        ("unix:///x?usrname=x", "no option 'usrname'; did you mean username?"),
        ("valkey://h?colour=blue", "no option 'colour'; leave it out; db, username, "),
        ("redis://h?timeout=1", "no option 'timeout'; give it to the limiter: timeout=..."),
        ("redis://h?ssl_ca_certs=x", "no option 'ssl_ca_certs'; write rediss:// for TLS"),
        ("redis://h?ssl=true", "no option 'ssl'; write rediss:// for TLS"),
        ("redis+sentinel://h/s?usernam=x", "no option 'usernam'; did you mean username?"),
        ("redis+sentinel://h/s?sentinel_usernam=x", "no option 'sentinel_usernam'; did you mean"),
        ("redis+cluster://h?usernam=x", "no option 'usernam'; did you mean username?"),
    ],
)
def test_a_misspelt_option_is_reported_before_anything_is_connected_to(
    limiter_class: type, url: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        limiter_class(url, "5/minute")
    assert f"store URL {url!r}: there is {message}" in str(caught.value)


@each_limiter
@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix"])
def test_options_that_a_url_may_have(limiter_class: type, scheme: str) -> None:
    options = "db=1&client_name=x&socket_keepalive=1&health_check_interval=3&max_connections=4"
    options += "&ssl_ca_certs=x&ssl_cert_reqs=none" if scheme == "rediss" else ""
    path = "/run/redis.sock" if scheme == "unix" else ""
    limiter = limiter_class(f"{scheme}://user:{SECRET}@host{path}?{options}", "5/minute")
    assert SECRET not in repr(limiter)


@each_limiter
def test_an_unknown_option_in_the_url(limiter_class: type, redis_url: str) -> None:
    exc = error_of(limiter_class, redis_url + "?colour=blue")
    assert isinstance(exc, ConfigurationError)
    assert "colour" in str(exc)


@each_limiter
def test_an_unknown_option(limiter_class: type) -> None:
    with pytest.raises(TypeError, match="colour"):
        limiter_class("memory://", "5/minute", colour="blue")


@each_limiter
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("timeout", v, "is not a number of seconds above 0")
          for v in (0, -1, math.nan, math.inf, "1", None, True)),
        *(("clock", v, 'is neither "server" nor "client"') for v in ("redis", None, 1)),
        *(("name", v, "is not a word of printable ASCII")
          for v in ("", "two words", "é", 5, "a\n")),
        *(("prefix", v, "must be a word without")
          for v in ("", "a b", "a{b", "a*", "a\n", None, b"a", 5)),
        *(("consistency", v, "is none of direct, leased, eventual")
          for v in ("strong", "Direct", "", None, 1)),
        *((option, v, "is not a number of seconds above 0")
          for option in ("sync_interval", "flush_interval")
          for v in (0, -1, math.nan, math.inf, True, "x", None)),
        *(("share", v, "is not a part of the limit, above 0 and at most 1")
          for v in (0, -0.1, 1.1, math.nan, True, "x")),
        *(("max_local_keys", v, "is not a whole number of at least 1")
          for v in (0, -1, 1.5, math.nan, True, "x", None)),
        ("on_store_error", "allow", "this version has"),
        *(("time", v, "is no clock, as it has no now_ms()")
          for v in (1, None, "now", datetime.time(), system_time)),
    ],
)  # fmt: skip
def test_an_option_that_can_never_work(
    limiter_class: type, option: str, value: Any, message: str
) -> None:
    exc = error_of(limiter_class, "memory://", **{option: value})
    assert isinstance(exc, ConfigurationError)
    assert repr(value) in str(exc)
    assert message in str(exc)


@each_limiter
@pytest.mark.parametrize("store", ["memory://", "redis://127.0.0.1:1"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "direct", "share": 0.5}, "share=0.5 means nothing"),
        ({"consistency": "leased", "share": 1}, "share=1 means nothing"),
        ({"consistency": "leased", "clock": "client"}, 'needs clock="server"'),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(
    limiter_class: type, store: str, options: dict[str, Any], message: str
) -> None:
    exc = error_of(limiter_class, store, **options)
    assert isinstance(exc, ConfigurationError)
    assert message in str(exc)


@each_limiter
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize(
    ("key", "cost"),
    [("", 1), (None, 1), (5, 1), (["k"], 1), ("k", 0), ("k", -1), ("k", 1.0), ("k", True),
     ("k", "1"), ("k", None), ("k", 6)],
)  # fmt: skip
def test_a_call_that_can_never_work_raises_in_every_mode(
    limiter_class: type, redis_url: str, prefix: str, consistency: str, key: Any, cost: Any
) -> None:
    """This holds also where the process would decide without the store, and where the window is
    full.
    """

    async def check() -> None:
        limiter = limiter_class(
            redis_url, "5/hour", prefix=prefix, consistency=consistency, timeout=5
        )

        async def call(key: Any, cost: Any) -> Any:
            made = limiter.try_acquire(key, cost)
            return await made if asyncio.iscoroutine(made) else made

        messages = set()
        for _ in range(8):
            with pytest.raises((ValueError, TypeError)) as caught:
                await call(key, cost)
            messages.add(str(caught.value))
            await call("k", 1)
        assert len(messages) == 1
        closed = limiter.close() if limiter_class is Limiter else limiter.aclose()
        if closed is not None:
            await closed

    asyncio.run(check())


# -- limits ---------------------------------------------------------------------------------------

LIMITS: dict[Any, str] = {
    "": "not understood",
    " ": "not understood",
    "100": "not understood",
    "/second": "not understood",
    "100/": "not understood",
    "100//second": "not understood",
    "100/second/minute": "not understood",
    "-1/second": "not understood",
    "1.5/second": "not understood",
    "1e3/second": "not understood",
    "١٠/second": "not understood",
    "nan/second": "not understood",
    "inf/second": "not understood",
    "100/second loose": "not understood",
    "100 per second per minute": "not understood",
    "100/second;": "not understood",
    "100/fortnight": "is not a unit of time",
    "100/0s": "outside 0.001 s to ten years",
    "100/11 years": "is not a unit of time",
    "10/month": 'a month has no fixed length; write days, such as "10/30 days"',
    "10 per 2 Months": 'a month has no fixed length; write days, such as "10/60 days"',
    "5000/year strict": 'a year has no fixed length; write days, such as "5000/365 days"',
    "1,000/minute": "write amounts without a comma: '1000/minute'",
    "5/s; 1,000,000/day": "write amounts without a comma: '5/s; 1000000/day'",
    "5/minute|6/fortnight": "'fortnight' is not a unit of time",
    "100/999999 days": "outside 0.001 s to ten years",
    "100/0.5ms": "not a whole number of milliseconds",
    "0/second": "amount=0 is not a whole number from 1 to",
    "1000000000001/second": "is not a whole number from 1 to 1000000000000",
    "100/second 7 buckets": "the nearest that do: 5 or 8",
    "100/second 0 buckets": "buckets=0 is not a whole number from 1 to 512",
    "100/second 513 buckets": "buckets=513 is not a whole number from 1 to 512",
    "5/minute; 7/minute": "count the same buckets",
    None: "is not a limit",
    5: "is not a limit",
    1.5: "is not a limit",
    True: "is not a limit",
    b"5/minute": "is not a limit",
    (): "no limit was given",
    (5,): "5 is not a limit",
    (None,): "None is not a limit",
}


@each_limiter
@pytest.mark.parametrize("limits", LIMITS, ids=repr)
def test_limits_that_are_none(limiter_class: type, limits: Any) -> None:
    exc = error_of(limiter_class, "memory://", limits=limits)
    assert isinstance(exc, ConfigurationError)
    assert LIMITS[limits] in str(exc)


BOTH_SHOWN = "5/minute; 7/minute"  # each of the two strings is valid


@pytest.mark.event_loops
@pytest.mark.parametrize("text", [t for t in LIMITS if isinstance(t, str) and t != BOTH_SHOWN])
def test_a_limit_string_that_is_none_is_shown(text: str) -> None:
    assert repr(text) in str(error_of(Limiter, "memory://", limits=text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amount": 0}, "amount=0"),
        ({"amount": -1}, "amount=-1"),
        ({"amount": 1.5}, "amount=1.5"),
        ({"amount": True}, "amount=True"),
        ({"amount": math.nan}, "amount=nan"),
        ({"amount": None}, "amount=None"),
        ({"amount": 10**12 + 1}, "amount=1000000000001"),
        ({"amount": 5, "per": 0}, "outside 0.001 s to ten years"),
        ({"amount": 5, "per": -1}, "outside 0.001 s to ten years"),
        ({"amount": 5, "per": math.nan}, "per=nan"),
        ({"amount": 5, "per": math.inf}, "per=inf"),
        ({"amount": 5, "per": "60"}, "per='60'"),
        ({"amount": 5, "per": True}, "per=True"),
        ({"amount": 5, "per": 0.0015}, "per=0.0015"),
        ({"amount": 5, "buckets": 3}, "the nearest that do: 2 or 4"),
        ({"amount": 5, "buckets": 1.0}, "buckets=1.0"),
        ({"amount": 5, "buckets": True}, "buckets=True"),
        ({"amount": 5, "buckets": 0}, "buckets=0"),
        ({"amount": 5, "bound": "loose"}, 'neither "leap" nor "strict"'),
        ({"amount": "5/minute", "per": 1}, "already has an interval"),
    ],
)
def test_a_limit_that_is_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Limit(**arguments)
    assert message in str(caught.value)


# -- costs ----------------------------------------------------------------------------------------


COSTS: list[Any] = [
    0, -1, 1.5, 1.0, True, False, math.nan, math.inf, "1", None, b"1", [1], 6, 10**30,
]  # fmt: skip


@pytest.fixture(scope="module")
def watched() -> Iterator[Standalone]:
    """Yield a server of its own, so that every key in it was written by these tests."""
    with Standalone() as server:
        yield server


@each_limiter
@pytest.mark.parametrize("cost", COSTS, ids=repr)
def test_a_cost_that_is_none(limiter_class: type, watched: Standalone, cost: Any) -> None:
    async def acquire(name: str) -> None:
        if limiter_class is Limiter:
            with Limiter(watched.url, "5/minute") as blocking:
                getattr(blocking, name)("key", cost)
        else:
            async with AsyncLimiter(watched.url, "5/minute") as async_limiter:
                await getattr(async_limiter, name)("key", cost)

    for name in ("try_acquire", "acquire"):
        with pytest.raises(ValueError, match="cost=") as caught:
            asyncio.run(acquire(name))
        assert not isinstance(caught.value, DistwindowError)
        assert f"cost={cost!r}" in str(caught.value)
        remedy = "the smallest limit is 5" if cost in (6, 10**30) else "at least 1"
        assert remedy in str(caught.value)
    with watched.client() as client:
        assert client.dbsize() == 0, "nothing was sent"


def test_a_cost_above_one_of_several_limits() -> None:
    limiter = Limiter("memory://", ["5/second", "3/minute"])
    with pytest.raises(ValueError, match="cost=4 can never be admitted: the smallest limit is 3"):
        limiter.try_acquire("key", 4)
    assert limiter.try_acquire("key", 3).allowed


# -- keys -----------------------------------------------------------------------------------------

KEYS: list[Any] = [
    "x", "x" * 64, "x" * 65, "x" * 1_000_000, b"\xff" * 1_000_000, "漢" * 300_000, "{", "}", "{}",
    "{a}b", "}{", "\x00", "a\x00b", "\n", "a\r\nb", " ", "\t", "\x7f", "%41", "~", ":", "*", "[a]",
    "\ud800", "\udfff\ud800", b"\xff\xfe", b"\x80", "é", "🙂", "'; DROP", "$(x)", "\\", "\u202e",
    Key("a", "b"), Key("{", "}"), Key(b"\xff", "\ud800"), Key("x" * 1_000_000, "y" * 1_000_000),
]  # fmt: skip


@pytest.mark.event_loops
@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:20])
@pytest.mark.parametrize(
    ("limiter_class", "server"),
    [(Limiter, "memory"), (Limiter, "redis"), (Limiter, "cluster"), (AsyncLimiter, "redis")],
)
def test_a_key_of_any_content(
    request: pytest.FixtureRequest, limiter_class: type, server: str, key: Any
) -> None:
    url = "memory://" if server == "memory" else request.getfixturevalue(f"{server}_url")
    prefix = fresh_key("weird")
    decision = asyncio.run(attempt(limiter_class, url, key, prefix=prefix))
    assert (decision.allowed, decision.key, decision.remaining) == (True, key, 4)
    if server == "redis":
        with redis.Redis.from_url(url) as client:
            (name,) = client.scan_iter(f"{prefix}:*", count=10_000)
            assert len(name) <= len(prefix) + 64 * 2 + 12
            text = name.decode("utf-8")
            assert not re.search(r"[\x00-\x20\x7f]", text)
            assert text.count("{") == text.count("}") == 1


@each_limiter
@pytest.mark.parametrize("key", ["", b""])
def test_an_empty_key(limiter_class: type, key: Any) -> None:
    exc = error_of(limiter_class, "memory://", key=key)
    assert isinstance(exc, ValueError)
    assert "must not be empty" in str(exc)


@each_limiter
@pytest.mark.parametrize(
    "key", [None, 5, 1.5, True, ("a",), ["a"], {"a": 1}, bytearray(b"a"), object], ids=repr
)
def test_a_key_that_is_none(limiter_class: type, key: Any) -> None:
    exc = error_of(limiter_class, "memory://", key=key)
    assert isinstance(exc, TypeError)
    assert repr(key) in str(exc)
    assert "a key is str, bytes or Key" in str(exc)


@pytest.mark.event_loops
def test_ten_thousand_weird_keys_are_ten_thousand_windows(redis_url: str) -> None:
    keys = [f"{{{n}}}\x00%{n:x}~\n" for n in range(5_000)] + [b"\xff%d" % n for n in range(5_000)]
    assert len({escape(key) for key in keys}) == 10_000

    async def all_of_them() -> list[int]:
        async with AsyncLimiter(
            redis_url, "5/hour", timeout=30, prefix=fresh_key("many")
        ) as limiter:
            return [d.remaining for d in await asyncio.gather(*map(limiter.try_acquire, keys))]

    assert asyncio.run(all_of_them()) == [4] * 10_000


# -- keys that exist already ----------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
def test_a_key_whose_type_is_something_else(limiter_class: type, redis_url: str, kind: str) -> None:
    prefix = fresh_key("taken")
    ring = f"{prefix}:{{key}}:6000:10"
    with redis.Redis.from_url(redis_url) as client:
        {
            "string": lambda: client.set(ring, "mine"),
            "list": lambda: client.rpush(ring, "mine"),
            "set": lambda: client.sadd(ring, "mine"),
            "zset": lambda: client.zadd(ring, {"mine": 1}),
            "stream": lambda: client.xadd(ring, {"mine": 1}),
        }[kind]()
        before = client.dump(ring)
        exc = error_of(limiter_class, redis_url, prefix=prefix)
        assert isinstance(exc, ConfigurationError)
        assert ring in str(exc)
        assert "choose a prefix that nothing else uses" in str(exc)
        assert client.dump(ring) == before


@each_limiter
def test_a_refusal_writes_nothing_to_the_other_rings(limiter_class: type, redis_url: str) -> None:
    """One of several rings is a key of another type: the other rings are not charged."""
    prefix = fresh_key("half")
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{key}}:360000:10", "mine")
        exc = error_of(limiter_class, redis_url, limits=["5/minute", "50/hour"], prefix=prefix)
        assert "WRONGTYPE" in str(exc)
        assert list(client.scan_iter(f"{prefix}:*", count=10_000)) == [
            f"{prefix}:{{key}}:360000:10".encode()
        ]


# -- servers that cannot be used ------------------------------------------------------------------


class OldServer(socketserver.StreamRequestHandler):
    """Answers INFO as Redis 5 would, and all other commands without an error."""

    def handle(self) -> None:
        with suppress(OSError):
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:-2].upper())
                self.wfile.write(self.answer(words))

    def answer(self, words: list[bytes]) -> bytes:
        if words[0] == b"INFO":
            info = b"# Server\r\nredis_version:5.0.3\r\nredis_mode:standalone\r\n"
            return b"$%d\r\n%s\r\n" % (len(info), info)
        if words[0] == b"TIME":
            return b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"
        if words[0].startswith(b"EVAL"):
            return b"-ERR it must not come to this\r\n"
        return b"+OK\r\n"


@each_limiter
def test_a_server_that_is_too_old(limiter_class: type) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            port = server.server_address[1]
            exc = error_of(limiter_class, f"redis://127.0.0.1:{port}/0")
        finally:
            server.shutdown()
            thread.join()
    assert isinstance(exc, ConfigurationError)
    for text in (str(port), "5.0", "6.2"):
        assert text in str(exc)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Standalone]:
    """Yield a server with a password, and with a user who has almost no rights."""
    with Standalone(password=SECRET, users=[f"reader on >{SECRET} ~* +get +info +time"]) as server:
        yield server


def address(server: Standalone) -> str:
    return f"127.0.0.1:{server.port}"


@each_limiter
def test_a_wrong_password(limiter_class: type, guarded: Standalone) -> None:
    for login in (f":{SECRET}wrong", f"nobody:{SECRET}wrong", f"default:{SECRET}wrong"):
        exc = error_of(limiter_class, f"redis://{login}@{address(guarded)}/0")
        assert isinstance(exc, ConfigurationError)
        assert "password" in str(exc)
        assert address(guarded) in str(exc)
        assert SECRET not in all_texts_of(exc)


@each_limiter
def test_no_password(limiter_class: type, guarded: Standalone) -> None:
    exc = error_of(limiter_class, f"redis://{address(guarded)}/0")
    assert isinstance(exc, ConfigurationError)
    assert re.search("password|[Aa]uth", str(exc))


@each_limiter
def test_too_few_rights(limiter_class: type, guarded: Standalone) -> None:
    exc = error_of(limiter_class, f"redis://reader:{SECRET}@{address(guarded)}/0")
    assert isinstance(exc, ConfigurationError)
    assert re.search("NOPERM|permission", str(exc))
    assert "rights" in str(exc)
    assert SECRET not in all_texts_of(exc)
    with guarded.client() as client:
        assert client.dbsize() == 0


@each_limiter
def test_the_right_password(limiter_class: type, guarded: Standalone) -> None:
    decision = asyncio.run(attempt(limiter_class, guarded.url, "right"))
    assert decision.allowed
    assert SECRET not in repr(decision)
    with guarded.client() as client:
        client.flushdb()


@each_limiter
def test_a_database_that_the_server_does_not_have(limiter_class: type, redis_url: str) -> None:
    exc = error_of(limiter_class, redis_url.rpartition("/")[0] + "/4711")
    assert isinstance(exc, ConfigurationError)
    assert "out of range" in str(exc)


@each_limiter
@pytest.mark.parametrize(
    "url",
    [
        "redis://user:{0}@127.0.0.1:1/0",
        "redis://:{0}@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password={0}",
        "redis://user:{0}@127.0.0.1:x/0",
        "redis://user:{0}@127.0.0.1:99999/0",
        "redis://user:{0}@127.0.0.1/db",
        "redis://user:{0}@127.0.0.1/0?db=x",
        "redis://user:{0}@127.0.0.1:1/0?colour=blue",
        "reddis://user:{0}@127.0.0.1:1/0",
        "rediss://user:{0}@127.0.0.1:1/0",
        "unix://user:{0}@/tmp/there-is-no-such.sock?db=0",
        "redis+cluster://user:{0}@127.0.0.1:1",
        "redis+cluster://user:{0}@127.0.0.1:x",
        "redis+cluster://user:{0}@127.0.0.1:1/7",
        "redis+cluster://user:{0}@127.0.0.1:1?colour=blue",
        "redis+sentinel://user:{0}@127.0.0.1:1",
        "redis+sentinel://user:{0}@127.0.0.1:1/service",
        "redis+sentinel://127.0.0.1:1/service?sentinel_password={0}",
        "redis+sentinel://user:{0}@127.0.0.1:1/service/x",
        "redis+sentinel://user:{0}@127.0.0.1:1/service?colour=blue",
    ],
)
def test_no_password_in_any_message(limiter_class: type, url: str) -> None:
    exc = error_of(limiter_class, url.format(SECRET), timeout=1.0)
    assert isinstance(exc, (ConfigurationError, StoreUnavailable))
    assert SECRET not in all_texts_of(exc)


@each_limiter
def test_no_password_in_the_message_of_memory_either(limiter_class: type) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, f"memory://user:{SECRET}@host"))


@each_limiter
def test_no_password_in_any_repr(limiter_class: type) -> None:
    limiter = limiter_class(f"redis://user:{SECRET}@127.0.0.1:1/0", "5/minute", name="me")
    for thing in (limiter, limiter._store, vars(limiter._store)):
        assert SECRET not in repr(thing)


@each_limiter
def test_an_unknown_option_of_a_sentinel_set(limiter_class: type, sentinel_url: str) -> None:
    exc = error_of(limiter_class, sentinel_url + "?colour=blue")
    assert isinstance(exc, ConfigurationError)
    assert "colour" in str(exc)


@each_limiter
def test_an_unknown_option_of_a_cluster(limiter_class: type, cluster_url: str) -> None:
    exc = error_of(limiter_class, cluster_url + "?colour=blue")
    assert isinstance(exc, ConfigurationError)
    assert "colour" in str(exc)


@each_limiter
def test_a_service_that_sentinel_does_not_know(limiter_class: type, sentinel_url: str) -> None:
    url = sentinel_url.replace(sentinel_url.rstrip("/0").rpartition("/")[2], "nosuchservice")
    exc = error_of(limiter_class, url, timeout=2.0)
    assert isinstance(exc, (ConfigurationError, StoreError))
    assert "nosuchservice" in str(exc)


@each_limiter
def test_a_cluster_node_without_the_clusters_url(limiter_class: type, cluster: Any) -> None:
    """The URL of a single node works for the slots of that node; the error for another slot says
    which URL to use.
    """
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}/0"
    messages = []
    for n in range(12):
        try:
            asyncio.run(attempt(limiter_class, url, f"key-{n}"))
        except ConfigurationError as exc:
            messages.append(str(exc))
    assert messages
    assert all("use redis+cluster://" in message for message in messages)
