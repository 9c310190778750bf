"""From a URL to a redis-py client: `redis://`, `rediss://`, `unix://`, and the same with `valkey`;
`redis+sentinel://host:26379,host2:26379/service/0`; `redis+cluster://host:7000,host2:7001`.

The clients provide connection classes and arguments, and serve administration (SCAN, INFO). Calls
of a limiter do not go through them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from ...errors import ConfigurationError
from .wrong_server import Endpoint

SCHEMES = {
    "redis": ("redis", "one"), "valkey": ("redis", "one"),
    "rediss": ("rediss", "one"), "valkeys": ("rediss", "one"),
    "unix": ("unix", "one"),
    "redis+sentinel": ("redis", "sentinel"), "valkey+sentinel": ("redis", "sentinel"),
    "rediss+sentinel": ("rediss", "sentinel"), "valkeys+sentinel": ("rediss", "sentinel"),
    "redis+cluster": ("redis", "cluster"), "valkey+cluster": ("redis", "cluster"),
    "rediss+cluster": ("rediss", "cluster"), "valkeys+cluster": ("rediss", "cluster"),
}  # fmt: skip
_PORTS = {"cluster": 6379, "sentinel": 26379}


def _arguments(*kinds: type) -> set[str]:
    """Return what the constructors of these classes and of their bases take by name."""
    inits = [
        vars(base)["__init__"]
        for kind in kinds
        for base in kind.__mro__[:-1]
        if "__init__" in vars(base)
    ]
    return {
        p.name
        for init in inits
        for p in inspect.signature(init).parameters.values()
        if p.name != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


_CONNECTION = _arguments(redis.Connection, redis.asyncio.Connection, redis.ConnectionPool)
_TLS = _arguments(redis.SSLConnection, redis.asyncio.SSLConnection)
_UNIX = _arguments(redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection)
_CLIENTS = _arguments(redis.Redis)
_OPTIONS = {"redis": _CONNECTION, "rediss": _CONNECTION | _TLS, "unix": _CONNECTION | _UNIX}
"""Options that may stand in a URL of one server, by its scheme. redis-py would raise for others
only when it connects, and its cluster client ignores them.
"""
_USUAL = (
    "db, username, password, client_name, protocol, max_connections, health_check_interval, "
    "socket_connect_timeout, socket_timeout, socket_keepalive; with TLS ssl_ca_certs, "
    "ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname"
)
_LIMITER_ARGUMENTS = ("timeout", "prefix", "consistency", "clock", "sync_interval", "share")
"""Arguments of a limiter that look as if they might stand in a URL."""
_KNOWN = _CONNECTION | _TLS | _UNIX | _CLIENTS | {*_LIMITER_ARGUMENTS}
_ESCAPES = "a user name or password write / ? # @ [ ] as %2F %3F %23 %40 %5B %5D"


def masked_url(url: str) -> str:
    """`url` as messages may show it: without its password, even if it is malformed, and without
    what options have that there are not, such as `pasword`.
    """
    login, at, rest = url.rpartition("@")
    if at:
        scheme = re.match(r"(?:[a-z+]+:/{1,2})?", login, re.IGNORECASE)
        start = scheme[0] if scheme else ""
        user, colon, _ = login[len(start) :].partition(":")
        login = f"{start}{user}:***@" if colon else f"{start}***@"
    masked = re.sub(r"(password=)[^&]*", r"\1***", login + rest)
    return re.sub(
        r"(?<=[?&])([^=&]*)=([^&]*)",
        lambda each: each[0] if each[1].removeprefix("sentinel_") in _KNOWN else f"{each[1]}=***",
        masked,
    )


def _mistake(url: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"store URL {masked_url(url)!r}{what}")


_MAX_CHARS = 300
"""The length of a text of another library in a message: the `repr` of a pool has 1,600."""
_SIGNS_OF_SECRETS = re.compile(
    r"(password=|://[^/@\s]*:(?=[^/\s]*@))(?!\*\*\*)('[^']*'|[^,)>&\s@]+)"
)
"""A password in the `repr` of a connection, or in a URL."""
_QUOTED_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
"""The end of the error of an unknown command, which may be AUTH, or have a key among its words."""
_OF_SENTINELS = re.compile(r" - (.+?)(?=, \w*<|$)", re.DOTALL)
"""What each sentinel was asked in vain with, in the text of redis-py."""


def secrets_of(store: Any) -> tuple[str, ...]:
    """Return the passwords of a URL, however malformed, or of a client, sentinels and TLS key."""
    found = set(_passwords_in(store) if isinstance(store, str) else _passwords_of(store))
    return tuple(sorted(filter(None, found), key=len, reverse=True))


def _passwords_in(url: str) -> Iterator[str]:
    login, at_sign, _ = url.rpartition("@")
    found = re.findall(r"password=([^&]*)", url)
    if at_sign:
        # The text after every colon, because one may be missing: in "redis://user:pw@" both
        # "user:pw" and "pw", in "redis://pw@" the "pw".
        found += [login[colon.end() :].lstrip("/") for colon in re.finditer(":", login)]
    yield from found
    yield from map(unquote, found)


def _passwords_of(client: Any) -> Iterator[str]:
    pool, nodes = (getattr(client, name, None) for name in ("connection_pool", "nodes_manager"))
    pools = [sentinel.connection_pool for sentinel in _sentinels(client)]
    for holder in (client, nodes, pool, *pools):
        kwargs = getattr(holder, "connection_kwargs", {})
        provider = kwargs.get("credential_provider")
        for secret in (
            kwargs.get("password"), kwargs.get("ssl_password"), getattr(provider, "password", None)
        ):  # fmt: skip
            yield secret.decode("utf-8", "replace") if isinstance(secret, bytes) else secret or ""


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without the secrets, in whatever way they are written there."""
    for secret in secrets:
        if len(secret) > 2:  # a shorter one would mask half of the message
            for written in (secret, quote(secret, safe=""), repr(secret)[1:-1]):
                text = text.replace(written, "***")
    return _SIGNS_OF_SECRETS.sub(r"\1***", text)


def safe_text(text: str, secrets: Iterable[str]) -> str:
    """Return a text of another library, without secrets, and shortened in its middle."""
    text = without_secrets(_QUOTED_ARGUMENTS.sub("", text), secrets)
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS - 103]}...{text[-100:]}"
    return text


def hide_secrets(exc: BaseException, secrets: Iterable[str]) -> None:
    """Make the texts of `exc`, and of what it was raised from, safe to be shown. This is done once,
    where an error of redis-py arrives, so that whoever shows it, or logs its traceback, may do so.
    """
    seen: set[int] = set()
    links = [exc]
    while links:
        link = links.pop()
        seen.add(id(link))
        links += [
            each for each in (link.__cause__, link.__context__) if each and id(each) not in seen
        ]
        not_found = isinstance(link, (MasterNotFoundError, AsyncMasterNotFoundError))
        if not_found and not str(link).startswith("no sentinel"):
            found = "; ".join(_OF_SENTINELS.findall(str(link)))
            found = f" ({found})" if found else ""
            link.args = (
                "no sentinel that could be reached knows a primary of this name that is up; "
                f"SENTINEL MASTERS has their names{found}",
            )
        link.args = tuple(
            safe_text(part, secrets) if isinstance(part, str) else part for part in link.args
        )


@dataclass(frozen=True)
class StoreUrl:
    """The parts of a store's URL. Its `repr` shows no password."""

    url: str = field(repr=False)
    kind: str
    """`one`, `sentinel` or `cluster`."""
    plain_url: str = field(default="", repr=False)
    """For `one`: the URL as redis-py reads it."""
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Connection arguments: username, password, db, ssl, ssl_..."""


def parse_url_text(url: str) -> StoreUrl:
    """Parse `url`. Raises `ConfigurationError` that says what is wrong and how to write it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in SCHEMES:
        raise _mistake(
            url,
            " begins with none of redis://, rediss://, unix://, redis+sentinel://, "
            "redis+cluster://, memory:// (or valkey in place of redis); the usual one is "
            '"redis://localhost:6379/0"',
        )
    plain_scheme, kind = SCHEMES[scheme.lower()]
    # `urlsplit` is not given several servers: its newer versions refuse brackets in a list.
    servers = "" if kind == "one" else re.split("[/?#]", rest, maxsplit=1)[0]
    try:
        parts = urlsplit(f"{plain_scheme}://{rest.removeprefix(servers)}")
    except ValueError:
        parts = None
    if parts is None:
        # Not in the `except`, and without its text: it may have a password in brackets in it.
        why = f"inside {_ESCAPES}" if "@" in url else "an IPv6 address lacks a bracket"
        raise _mistake(url, f": {why}")
    parts = parts._replace(netloc=servers or parts.netloc)
    _check_escapes(parts, url)
    if kind == "one":
        address = StoreUrl(url, kind, f"{plain_scheme}://{rest}")
        _check_single_server(address, parts)
        return address
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    options = _options(parts.query, url)
    if username:
        options["username"] = unquote(username)
    if password:
        options["password"] = unquote(password)
    if plain_scheme == "rediss":
        options["ssl"] = True
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = ""
    if kind == "sentinel":
        if not path:
            raise _mistake(
                url,
                ' names no service; write "redis+sentinel://host:26379,host2:26379/mymaster/0"',
            )
        service, path = path[0], path[1:]
    if path:
        options["db"] = _number(path[0], "a database number", url)
    if kind == "cluster" and options.pop("db", 0):
        raise _mistake(url, ": a cluster has database 0 only; leave the number out")
    return StoreUrl(url, kind, "", tuple(_hosts(hosts, _PORTS[kind], url)), service, options)


def endpoints_in(url: StoreUrl) -> list[Endpoint]:
    """Return the servers that a URL names; for a Unix socket none."""
    if url.kind != "one":
        service, sentinel = _split_sentinel_options(url.options)
        tls = bool((sentinel if url.kind == "sentinel" else service).get("ssl"))
        return [Endpoint(host, port, tls) for host, port in url.hosts]
    options: dict[str, Any] = parse_url(url.plain_url)  # type: ignore[no-untyped-call]  # not annotated
    if "path" in options:
        return []
    host, port = options.get("host", "localhost"), int(options.get("port", 6379))
    return [Endpoint(host, port, options.get("connection_class") is redis.SSLConnection)]


def make_client(address: StoreUrl, timeout: float, *, is_async: bool = False) -> Any:
    """A redis-py client without retries, of one server or of a Sentinel set."""
    kinds: tuple[Any, ...] = (redis, Retry, Sentinel)
    if is_async:
        kinds = (redis.asyncio, AsyncRetry, AsyncSentinel)
    clients, retry, sentinels = kinds
    timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    no_retries: dict[str, Any] = {"retry": retry(NoBackoff(), 0), **timeouts}
    if address.kind == "one":
        return clients.Redis.from_url(address.plain_url, **no_retries)
    service, sentinel = _split_sentinel_options(address.options)
    manager = sentinels(list(address.hosts), sentinel_kwargs=sentinel | no_retries)
    for each in manager.sentinels:
        each.sentinel_masters = _with_reason_in_repr(each.sentinel_masters, is_async=is_async)
    return manager.master_for(address.service, **service, **no_retries)


class _SentinelFailure(redis.ConnectionError):
    """Why a sentinel has not answered; its `repr` says it, too."""

    def __repr__(self) -> str:
        return str(self)


@contextmanager
def _reason_in_repr() -> Iterator[None]:
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        raise _SentinelFailure(f"{type(exc).__name__}: {exc}") from exc


def _with_reason_in_repr(ask: Any, *, is_async: bool) -> Any:
    """Return `ask`, with the reason in the `repr` of what it raises: redis-py joins those of all
    sentinels to the text of one error, and its own have none from some version before 8.1 on.
    """

    def ask_now(*arguments: Any, **options: Any) -> Any:
        with _reason_in_repr():
            return ask(*arguments, **options)

    async def ask_async(*arguments: Any, **options: Any) -> Any:
        with _reason_in_repr():
            return await ask(*arguments, **options)

    return ask_async if is_async else ask_now


def make_cluster_client(address: StoreUrl, timeout: float) -> redis.RedisCluster:
    """A redis-py client of a cluster, which connects at once and has retries: for SCAN and INFO."""
    nodes = [ClusterNode(*host) for host in address.hosts]  # type: ignore[no-untyped-call]  # not annotated
    timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return redis.RedisCluster(startup_nodes=nodes, **(address.options | timeouts))


def connection_template(address: StoreUrl, *, is_async: bool) -> tuple[Any, dict[str, Any]]:
    """Return redis-py's class of connections to the nodes of a cluster, and their arguments."""
    client: Any = (redis.asyncio if is_async else redis).Redis(**address.options)
    return client.connection_pool.connection_class, client.connection_pool.connection_kwargs


def close_client(client: Any) -> None:
    """Close a client that `make_client` made, and its connections to sentinels."""
    client.close()
    for sentinel in _sentinels(client):
        sentinel.close()


async def aclose_client(client: Any) -> None:
    """Do as `close_client`, for an asyncio client."""
    await client.aclose()
    for sentinel in _sentinels(client):
        await sentinel.aclose()


def _sentinels(client: Any) -> list[Any]:
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def _split_sentinel_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into those for the servers and for the sentinels (`sentinel_...`)."""
    sentinel = {
        name.removeprefix("sentinel_"): value
        for name, value in options.items()
        if name.startswith("sentinel_")
    }
    service = {name: value for name, value in options.items() if not name.startswith("sentinel_")}
    if service.get("ssl"):
        # Sentinels have the TLS options of the servers, but for those of their own.
        sentinel = {n: value for n, value in service.items() if n.startswith("ssl")} | sentinel
    return service, sentinel


def _check_escapes(parts: SplitResult, url: str) -> None:
    """Raise for a password with / ? # in it: its rest would be shown as a host or port."""
    cut = "@" in parts.path + parts.fragment and parts.scheme != "unix"
    if cut or ("@" in parts.query and ":" in parts.netloc and "@" not in parts.netloc):
        raise _mistake(url, f": inside {_ESCAPES}")


def _options(query: str, url: str) -> dict[str, Any]:
    """The options in a query, with the types that redis-py gives them."""
    try:
        options: dict[str, Any] = parse_url(f"redis://host?{query}")  # type: ignore[no-untyped-call]  # not annotated
    except ValueError as exc:
        raise _mistake(url, f": {exc}") from None
    del options["host"]
    for name in options:
        _check_option(name, name.removeprefix("sentinel_"), _CLIENTS, url)
    return options


def _check_option(name: str, plain: str, known: set[str], url: str) -> None:
    if plain in known:
        return
    if name in _LIMITER_ARGUMENTS:
        hint = f"give it to the limiter: {name}=..."
    elif name.startswith("ssl") and name in _TLS | _CLIENTS:
        hint = "write rediss:// for TLS"
    else:
        hint = f"there are {_USUAL}, and what else redis-py takes"
    raise _mistake(url, f": there is no option {name!r}; {hint}")


def _check_single_server(address: StoreUrl, parts: SplitResult) -> None:
    database = parts.path.strip("/")
    if parts.scheme == "unix" and "@" in parts.path:
        raise _mistake(address.url, ": write a '/' in a password as %2F")
    if parts.scheme == "unix" and not database:
        raise _mistake(address.url, ' names no socket; write "unix:///run/redis/redis.sock?db=0"')
    if database and parts.scheme != "unix":
        _number(database, "a database number", address.url)
    try:
        # No pool is made of the URL: its destructor is Python code, and Python drops what a signal
        # handler raises in a destructor.
        options: dict[str, Any] = parse_url(address.plain_url)  # type: ignore[no-untyped-call]  # not annotated
    except (ValueError, TypeError) as exc:
        raise _mistake(address.url, f": {exc}") from None
    for name in options.keys() - {"connection_class"}:
        _check_option(name, name, _OPTIONS[parts.scheme], address.url)


def _hosts(text: str, port: int, url: str) -> list[tuple[str, int]]:
    found = []
    for part in text.split(","):
        host, colon, number = part.strip().rpartition(":")
        if part.endswith("]") or not colon:  # an IPv6 address without a port, or a bare name
            host, number = part.strip(), str(port)
        if not host:
            raise _mistake(url, " has an empty host name")
        name = host[1:-1] if host[0] == "[" and host[-1] == "]" else host
        if "[" in name or "]" in name or (":" in name and name is host):
            raise _mistake(url, f": write an IPv6 address in brackets, as [::1] or [::1]:{port}")
        found.append((name, _number(number, "a port", url)))
    return found


def _number(text: str, what: str, url: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise _mistake(url, f": {text!r} is not {what}")
    return int(text)
