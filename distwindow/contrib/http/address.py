"""The address of the client of a request, behind proxies that are named."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import ConfigurationError, short_repr

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_UNIX = "unix"
_NO_ADDRESSES = (None, "", "<local>", "localhost")
"""What servers say of the client of a Unix socket: uvicorn, gunicorn and uWSGI, Werkzeug, waitress.
"""
_MAX_KNOWN = 4096
"""Texts of addresses of which the result is kept, the most recently used."""
_WITH_PORT = re.compile(r"\[(?P<v6>[^\]]*)\](?::\d+)?|(?P<v4>[^:]*):\d+")
_FORWARDED_PAIR = re.compile(r'([^=;\s]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))')
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
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

    IPv6 addresses are cut to `ipv6_prefix` bits, because one client has a whole network of them;
    those that carry an IPv4 address (mapped, NAT64, 6to4, Teredo's client) are that one. A peer
    that is no IP address (of a test client) is used as it is.

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
        self._read = functools.lru_cache(_MAX_KNOWN)(self._read_uncached)
        # Kept for peers once more, with what is not an address, so that a request is one look-up.
        self._read_peer = functools.lru_cache(_MAX_KNOWN)(self._read_peer_uncached)

    # Each framework has requests of its own.

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
        return self._walk(peer, self.header_values(request, self._header)) if is_trusted else peer

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
        """Return the client's address, which the trusted `peer` names in the values of the header
        field.
        """
        if self._header == "forwarded":
            entries = [entry for value in values for entry in _forwarded_elements(value)]
        else:
            entries = [entry for value in values for entry in value.split(",") if entry.strip()]
        is_list = self._header in ("x-forwarded-for", "forwarded")
        if not is_list and len(entries) != 1:
            return peer
        found = peer
        for entry in reversed(entries):
            read = self._read(_forwarded_for(entry) if self._header == "forwarded" else entry)
            if read is None:
                return found
            found, is_trusted = read
            if not is_trusted:
                return found
        return found

    def _read_uncached(self, text: str) -> tuple[str, bool] | None:
        """Return the address in `text` as a key has it, and whether it is a trusted proxy; None if
        there is none.
        """
        address = _parse(text)
        if address is None:
            return None
        is_trusted = any(address in network for network in self._networks)
        # Only after that: anybody may have a 6to4 address of 10.0.0.1.
        address = _carried(address) or address
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


def _carried(address: _Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address of the client in an IPv6 address; None if there is none."""
    if address.version == 4:
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or (address.teredo[1] if address.teredo else None)


def _forwarded_elements(value: str) -> list[str]:
    """Return the elements of a `Forwarded` field, at the commas outside of quotes. It is read from
    the right, where trusted proxies have appended: what a client has written before that, such as
    a quote without its end, changes nothing there.
    """
    pieces, elements, quotes = value.split(","), [], 0
    last = len(pieces)
    for first in range(last - 1, -1, -1):
        quotes += pieces[first].count('"') - pieces[first].count('\\"')
        if quotes % 2 == 0 or first == 0:
            elements.append(",".join(pieces[first:last]))
            last, quotes = first, 0
    return [element for element in reversed(elements) if element.strip()]


def _forwarded_for(element: str) -> str:
    """Return the value of `for` in one element of `Forwarded`; empty if there is none."""
    for name, quoted, token in _FORWARDED_PAIR.findall(element):
        if name.lower() == "for":
            return str(quoted or token)
    return ""


def _read_proxies(
    given: Iterable[str],
) -> tuple[bool, list[ipaddress.IPv4Network | ipaddress.IPv6Network]]:
    """Return whether a Unix socket is trusted, and the networks of `trusted_proxies`."""
    shown = f"trusted_proxies={short_repr(given)}"
    example = 'write the addresses and networks of your proxies, such as ["10.0.0.0/8"]'
    if isinstance(given, (str, bytes, int)):
        raise ConfigurationError(
            f"{shown} is no list; {example}"
            + (
                ": with a number of hops, one proxy more or less would be a hole"
                if isinstance(given, int)
                else ""
            )
        )
    trusts_unix, networks = False, []
    for proxy in given:
        if proxy == _UNIX:
            trusts_unix = True
            continue
        try:
            if not isinstance(proxy, str):
                raise ValueError("it is not a str")
            network = ipaddress.ip_network(proxy)
            mapped = network.network_address.ipv4_mapped if network.version == 6 else None
            if mapped is not None and network.prefixlen >= 96:
                network = ipaddress.ip_network((mapped, network.prefixlen - 96))
        except ValueError as exc:
            everybody = " would trust everybody" if proxy == "*" else f": {exc}"
            raise ConfigurationError(
                f"{shown}: {short_repr(proxy)}{everybody}; {example}"
            ) from None
        if network.prefixlen == 0:
            raise ConfigurationError(
                f"{shown}: {short_repr(proxy)} would trust everybody, so that any client could "
                f"write the address that it is limited by; {example}"
            )
        networks.append(network)
    return trusts_unix, networks
