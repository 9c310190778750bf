"""The URL of a storage and its options, read and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import unquote_plus, urlencode

from ...away.policy import check_options
from ...errors import ConfigurationError, short_repr
from ...lifecycle.connect import check_url
from ...ring.limit import Limit
from ...runtime.options import Options
from ...stores.redis.urls import SCHEMES

ResetTime = Literal["seconds", "exact"]
STORAGE_SCHEMES = [
    f"distwindow+{scheme}" for scheme in (*SCHEMES, "redis+unix", "valkey+unix", "memory")
]
ASYNC_STORAGE_SCHEMES = [f"async+{scheme}" for scheme in STORAGE_SCHEMES]


_OWN: dict[str, Callable[[str], Any]] = {
    "timeout": float, "prefix": str, "key_prefix": str, "consistency": str, "buckets": int,
    "reset": str, "time": str,
}  # fmt: skip
"""The options of a storage, and what makes them of a text."""


class StorageSettings(NamedTuple):
    """What a URL of a storage, and its options, say."""

    url: str
    options: Options
    buckets: int | None
    reset: ResetTime


def read_settings(uri: str, given: dict[str, Any]) -> StorageSettings:
    """Read the options in a URL of a storage, and those beside it, which win. What is none of the
    storage's is one of redis-py, and is put into the URL.
    """
    found: dict[str, Any] = {}
    scheme, separator, rest = (
        uri.removeprefix("async+").removeprefix("distwindow+").partition("://")
    )
    if scheme in ("redis+unix", "valkey+unix"):  # as limits has it
        scheme = "unix"
    address, _, query = rest.partition("?")
    kept = []
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name in _OWN:
            found[name] = unquote_plus(value)
        else:
            kept.append(part)
    for name, value in given.items():
        if name in _OWN:
            found[name] = value
        elif name == "ssl_cert_reqs" and value is None:
            kept.append("ssl_cert_reqs=none")
        elif isinstance(value, (str, int, float)):
            if name != "implementation":  # the client library of limits' own storages
                kept.append(urlencode({name: value}))
        elif value is not None:
            raise ConfigurationError(
                f"{name}={short_repr(value)}: the storage makes its connections by the URL; give "
                "what they need as text or number, such as socket_keepalive=1"
            )
    for name, value in found.items():
        if isinstance(value, str):
            try:
                found[name] = _OWN[name](value)
            except ValueError:
                raise ConfigurationError(f"{name}={short_repr(value)} is no number") from None
    url = f"{scheme}{separator}{address}" + ("?" if kept else "") + "&".join(kept)
    try:
        check_url(url)
    except ConfigurationError as exc:
        own = "; a storage has timeout, prefix, consistency, buckets and reset, too" if kept else ""
        raise ConfigurationError(f"{exc}{own}") from None
    reset = found.pop("reset", "seconds")
    if reset not in get_args(ResetTime):
        raise ConfigurationError(f'reset={short_repr(reset)} is neither "seconds" nor "exact"')
    buckets = found.pop("buckets", None)
    key_prefix = found.pop("key_prefix", "limits")  # as limits' own storages have it
    found.setdefault("prefix", key_prefix)
    options = Options(**found)
    check_options(options)
    Limit(1, per=3600, buckets=buckets)  # raises for what is no number of buckets
    return StorageSettings(url, options, buckets, reset)
