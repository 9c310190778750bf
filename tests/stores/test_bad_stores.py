"""Stores that cannot be one: each URL, option of a URL or client raises one clear error that names
it and what to do.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from distwindow.stores.redis.urls import masked_url
from tests.limiter.first_call import SECRET, each_limiter, error_of

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
    "redis://localhost/\u00b2": "is not a database number",
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
    "redis+cluster://a,[::1": "write an IPv6 address in brackets, as [::1] or [::1]:6379",
    "redis+sentinel://::1,a/service": "write an IPv6 address in brackets, as [::1] or [::1]:26379",
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
        ("redis://h?socket_timout=1", "no option 'socket_timout'; there are db, username, "),
        ("rediss://h?ssl_ca_cert=x", "no option 'ssl_ca_cert'; there are "),
        ("unix:///x?usrname=x", "no option 'usrname'; there are "),
        ("redis://h?timeout=1", "no option 'timeout'; give it to the limiter: timeout=..."),
        ("redis://h?ssl_ca_certs=x", "no option 'ssl_ca_certs'; write rediss:// for TLS"),
        ("redis://h?ssl=true", "no option 'ssl'; write rediss:// for TLS"),
        ("redis+sentinel://h/s?usernam=x", "no option 'usernam'; there are "),
        ("redis+sentinel://h/s?sentinel_usernam=x", "no option 'sentinel_usernam'; there are "),
        ("redis+cluster://h?usernam=x", "no option 'usernam'; there are "),
    ],
)
def test_an_unknown_option_is_reported_before_anything_is_connected_to(
    limiter_class: type, url: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        limiter_class(url, "5/minute")
    assert f"store URL {masked_url(url)!r}: there is {message}" in str(caught.value)


@each_limiter
@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix"])
def test_options_that_a_url_may_have(limiter_class: type, scheme: str) -> None:
    options = "db=1&client_name=x&socket_keepalive=1&health_check_interval=3&max_connections=4"
    options += "&ssl_ca_certs=x&ssl_cert_reqs=none" if scheme == "rediss" else ""
    path = "/run/redis.sock" if scheme == "unix" else ""
    limiter = limiter_class(f"{scheme}://user:{SECRET}@host{path}?{options}", "5/minute")
    assert SECRET not in repr(limiter)
