"""The address of the client of a request, behind proxies that are named."""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...errors import ConfigurationError, short_repr

_LOG = logging.getLogger("distwindow")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAPPED, _NAT64 = ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96")
_6TO4, _TEREDO = ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32")
_CARRIERS = (_MAPPED, _NAT64, _6TO4, _TEREDO)
"""The networks of IPv6 whose addresses carry one of IPv4."""
_LOW_32_BITS = 2**32 - 1
_UNIX = "unix"
_NO_ADDRESSES = (None, "", "<local>", "localhost")
"""What servers say of the client of a Unix socket: uvicorn, gunicorn and uWSGI, Werkzeug, waitress.
"""
_MAX_KNOWN = 4096
"""Texts of addresses of which the result is kept."""
_LOOKS = 100
"""Of so many requests the fields are looked at, for a proxy that was forgotten."""
_WITH_PORT = re.compile(r"\[(?P<v6>[^\]]*)\](?::\d+)?|(?P<v4>[^:]*):\d+")
_FORWARDED_PAIR = re.compile(
    r'\s*(?P<name>[^\s=;",]+)\s*=\s*'
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<token>[^\s;",]*))\s*(?:;|\Z)'
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class ClientAddress:
    """A key function: the address of the client, as text.

    Without `trusted_proxies` it is the peer of the socket, and no header field is read. With them,
    if the peer is one of them, `header` is walked from the right, and the first address that is no
    trusted proxy is the client's. An entry that is no address ends the walk at the last one before
    it; if all are trusted, it is the leftmost. `trusted_proxies` are addresses and networks such as
    `"10.0.0.0/8"`, and `"unix"` for a server that listens on a Unix socket. `header` is
    `"x-forwarded-for"`, `"forwarded"` (RFC 7239), or one that has a single address, such as
    `"x-real-ip"` and `"cf-connecting-ip"`.

    IPv6 addresses are cut to `ipv6_prefix` bits, because one client has a whole network of them.
    Those that carry an IPv4 address (mapped, of NAT64, 6to4 and Teredo) count as that one. Only of
    a mapped one does it make a trusted proxy: anyone may run a relay that writes the others. A
    peer that is no IP address (of a test client) is used as it is.

    An integration has a subclass that defines `peer` and `header_values`. Raises
    `ConfigurationError` for what would trust everybody.
    """

    def __init__(
        self,
        trusted_proxies: Iterable[str] = (),
        *,
        header: str = "x-forwarded-for",
        ipv6_prefix: int = 64,
    ) -> None:
        self._trusts_unix, self._networks = _read_proxies(trusted_proxies)
        if not isinstance(header, str) or not _TOKEN.fullmatch(header):
            raise ConfigurationError(
                f"header={short_repr(header)} is not the name of a header field"
            )
        self._header = header.lower()
        if type(ipv6_prefix) is not int or not 1 <= ipv6_prefix <= 128:
            raise ConfigurationError(
                f"ipv6_prefix={short_repr(ipv6_prefix)} is not a whole number from 1 to 128"
            )
        self._ipv6_prefix = ipv6_prefix
        self._looks_left = _LOOKS
        self._before: dict[str, list[str]] = {}
        """By peer that a server has read out of a field, what stood before it there."""
        self._read = functools.lru_cache(_MAX_KNOWN)(self._read_uncached)
        # Kept for peers once more, with what is not an address, so that a request is one look-up.
        self._read_peer = functools.lru_cache(_MAX_KNOWN)(self._read_peer_uncached)

    def peer(self, request: Any) -> str | None:
        """Return what the server says is the host of the peer of `request`."""
        raise NotImplementedError

    def header_values(self, request: Any, name: str) -> Sequence[str]:
        """Return the values of a header field, one for each line, by its name in lower case."""
        raise NotImplementedError

    def __call__(self, request: Any) -> str:
        """Return the address of the client of `request`. Raises `ConfigurationError` where the
        server names no peer, and "unix" is not trusted.
        """
        peer, is_trusted = self._read_peer(self.peer(request))
        if is_trusted:
            return self._walk(peer, self.header_values(request, self._header))
        if self._looks_left:
            self._look_for_proxies(peer, request)
        return peer

    def _look_for_proxies(self, peer: str, request: Any) -> None:
        """Log once that `peer` seems to be a proxy that nobody has named. Where a server has read
        the field already, `peer` is in it, and what stands before it tells a proxy from a client.
        """
        self._looks_left -= 1
        for name in {"x-forwarded-for", "forwarded", self._header}:
            entries = _entries(name, self.header_values(request, name))
            addresses = [self.key_of(entry) for entry in entries]
            if not addresses:
                continue
            if peer not in addresses:
                found = "a request from %s has the field %s, which is not believed"
            else:
                before = addresses[addresses.index(peer) + 1 :]
                if not before or before == self._before.setdefault(peer, before):
                    continue
                found = "requests from %s have different addresses before its own in %s"
            self._looks_left = 0
            self._before.clear()
            _LOG.warning(
                found + ": if that is a proxy of yours, all clients behind it have one limit "
                "together; write trusted_proxies=[%r]",
                peer, name, peer,
            )  # fmt: skip
            return

    def key_of(self, text: str) -> str:
        """Return the address in `text` as a key has it; `text` itself if there is none."""
        read = self._read(text)
        return text if read is None else read[0]

    def _read_peer_uncached(self, peer: str | None) -> tuple[str, bool]:
        """Return the peer as a key has it, and whether it is a trusted proxy."""
        if peer not in _NO_ADDRESSES:
            return self._read(peer) or (peer, False)
        if not self._trusts_unix:
            raise ConfigurationError(
                "the server names no address for the client, as on a Unix socket; write "
                f'trusted_proxies=["unix"] if a proxy in front of it sets {self._header}, or limit '
                "by a key of your own: key=..."
            )
        return _UNIX, True

    def _walk(self, peer: str, values: Sequence[str]) -> str:
        """Return the client's address, which the trusted `peer` names in the header field."""
        found = peer
        entries: Iterable[str] = _entries(self._header, values)
        if self._header not in ("forwarded", "x-forwarded-for"):
            entries = list(entries)
            if len(entries) != 1:
                return peer
        for entry in entries:
            read = self._read(entry)
            if read is None:
                return found
            found, is_trusted = read
            if not is_trusted:
                return found
        return found

    def _read_uncached(self, text: str) -> tuple[str, bool] | None:
        """Return the address in `text` as `key_of` does, and whether it is a trusted proxy."""
        address = _parse(text)
        if address is None:
            return None
        is_trusted = any(address in network for network in self._networks)
        address = _carried(address)
        if address.version == 4:
            return str(address), is_trusted
        network = ipaddress.ip_network((address, self._ipv6_prefix), strict=False)
        return str(address if self._ipv6_prefix == 128 else network), is_trusted


def _parse(text: str) -> _Address | None:
    """Return the address in `text`, which may have a port and a zone id; None if there is none."""
    text = text.strip()
    with_port = _WITH_PORT.fullmatch(text)
    if with_port is not None:
        text = with_port["v6"] or with_port["v4"] or ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _carried(address: _Address) -> _Address:
    """Return the IPv4 address that an address of NAT64, 6to4 or Teredo carries; else itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & _LOW_32_BITS)
    _, client = address.teredo or (None, None)
    return client or address.sixtofour or address


def _entries(name: str, values: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a header field from the right, where proxies have appended."""
    for value in reversed(values):
        if name == "forwarded":
            yield from (_forwarded_for(each) for each in _elements(value) if each.strip())
        else:
            yield from (each for each in reversed(value.split(",")) if each.strip())


def _elements(value: str) -> Iterator[str]:
    """Yield the elements of `Forwarded` from the right: whatever is before an element, a quote that
    is never closed included, changes nothing of it.
    """
    end, is_quoted = len(value), False
    for at in range(end - 1, -1, -1):
        if value[at] == '"' and not (is_quoted and value[at - 1 : at] == "\\"):
            is_quoted = not is_quoted
        elif value[at] == "," and not is_quoted:
            yield value[at + 1 : end]
            end = at
    yield value[:end]


def _forwarded_for(element: str) -> str:
    """Return the value of `for` in one element of `Forwarded`; empty if it has not exactly one."""
    found, at = [], 0
    while at < len(element):
        pair = _FORWARDED_PAIR.match(element, at)
        if pair is None:
            return ""
        if pair["name"].lower() == "for":
            found.append(pair["quoted"] or pair["token"] or "")
        at = pair.end()
    return found[0] if len(found) == 1 else ""


def _read_proxies(given: Iterable[str]) -> tuple[bool, list[_Network]]:
    """Return whether a Unix socket is trusted, and the networks of `trusted_proxies`."""
    shown = f"trusted_proxies={short_repr(given)}"
    example = 'write the addresses and networks of your proxies, such as ["10.0.0.0/8"]'
    if isinstance(given, (str, bytes, int)):
        hops = ": with a number of hops, one proxy more or less would be a hole"
        why = hops if isinstance(given, int) else ""
        raise ConfigurationError(f"{shown} is no list; {example}{why}")
    proxies = [*given]
    networks: list[_Network] = []
    for proxy in proxies:
        if proxy == _UNIX:
            continue
        try:
            if not isinstance(proxy, str):
                raise ValueError("it is not a str")
            network: _Network = ipaddress.ip_network(proxy)
        except ValueError as exc:
            everybody = " would trust everybody" if proxy == "*" else f": {exc}"
            raise ConfigurationError(
                f"{shown}: {short_repr(proxy)}{everybody}; {example}"
            ) from None
        trusts_all = network.prefixlen == 0
        if isinstance(network, ipaddress.IPv6Network):
            trusts_all = any(carrier.subnet_of(network) for carrier in _CARRIERS)
            if network.subnet_of(_MAPPED):
                first = int(network.network_address) & _LOW_32_BITS
                network = ipaddress.IPv4Network((first, network.prefixlen - _MAPPED.prefixlen))
        if trusts_all:
            raise ConfigurationError(
                f"{shown}: {short_repr(proxy)} would trust everybody, so that any client could "
                f"write the address that it is limited by; {example}"
            )
        networks.append(network)
    return _UNIX in proxies, networks
