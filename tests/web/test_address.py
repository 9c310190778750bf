"""The address of a client: the peer of the socket, unless the peer is a proxy that is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distwindow import ConfigurationError
from distwindow.contrib import http

Request = tuple[str | None, dict[str, list[str]]]


class Address(http.ClientAddress):
    def peer(self, request: Request) -> str | None:
        return request[0]

    def header_values(self, request: Request, name: str) -> Sequence[str]:
        return request[1].get(name, [])


def forwarded(peer: str | None, *values: str, header: str = "x-forwarded-for") -> Request:
    return peer, {header: list(values)}


def test_without_trusted_proxies_no_header_is_read() -> None:
    assert Address()(forwarded("10.0.0.1", "9.9.9.9")) == "10.0.0.1"


@pytest.mark.parametrize(
    ("peer", "values", "address"),
    [
        ("8.8.8.8", ["9.9.9.9"], "8.8.8.8"),  # the peer is no proxy of ours
        ("10.0.0.1", ["9.9.9.9"], "9.9.9.9"),
        ("10.0.0.1", ["1.1.1.1, 9.9.9.9"], "9.9.9.9"),  # the client wrote 1.1.1.1
        ("10.0.0.1", ["1.1.1.1", "9.9.9.9"], "9.9.9.9"),  # two lines are one list
        ("10.0.0.1", ["9.9.9.9, 10.2.0.1,10.3.0.1"], "9.9.9.9"),
        ("10.0.0.1", ["10.5.0.1, 10.2.0.1"], "10.5.0.1"),  # all are trusted: the leftmost
        ("10.0.0.1", ["9.9.9.9, evil, 10.2.0.1"], "10.2.0.1"),  # a malformed one ends the walk
        ("10.0.0.1", ["evil"], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["9.9.9.9:4711"], "9.9.9.9"),
        ("10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::/64"),
        ("::ffff:10.0.0.1", ["9.9.9.9"], "9.9.9.9"),
        ("testclient", ["9.9.9.9"], "testclient"),
    ],
)
def test_the_list_is_walked_from_the_right(peer: str, values: list[str], address: str) -> None:
    assert Address(["10.0.0.0/8"])(forwarded(peer, *values)) == address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:bbbb::2", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:9.9.9.9", "9.9.9.9"),
        ("testclient", "testclient"),
        ("64:ff9b::9.9.9.9", "9.9.9.9"),  # NAT64, behind which all clients of version 4 are
        ("64:ff9b::808:808", "8.8.8.8"),
        ("64:ff9b:1::9.9.9.9", "64:ff9b:1::/64"),
        ("2002:909:909::1", "9.9.9.9"),  # 6to4
        ("2001:0:102:304:0:ffff:f6f6:f6f6", "9.9.9.9"),  # Teredo
    ],
)
def test_a_client_has_a_whole_network_of_version_6(peer: str, address: str) -> None:
    assert Address()((peer, {})) == address


@pytest.mark.parametrize("network", ["10.0.0.0/8", "::ffff:10.0.0.0/104"])
@pytest.mark.parametrize(
    ("peer", "is_trusted"),
    [
        ("10.0.0.1", True),
        ("::ffff:10.0.0.1", True),
        ("11.0.0.1", False),
        ("2002:a00:1::1", False),  # anybody may have this one
        ("64:ff9b::10.0.0.1", False),
    ],
)
def test_a_network_of_mapped_addresses_is_that_of_version_4(
    network: str, peer: str, is_trusted: bool
) -> None:
    found = Address([network])(forwarded(peer, "9.9.9.9"))
    assert (found == "9.9.9.9") is is_trusted


def test_a_longer_prefix_tells_hosts_apart() -> None:
    assert Address(ipv6_prefix=128)(("2001:db8::1", {})) == "2001:db8::1"


@pytest.mark.parametrize(
    ("values", "address"),
    [
        (["for=1.1.1.1, for=9.9.9.9;proto=https"], "9.9.9.9"),
        (['by=10.0.0.1;For="[2001:db8::1]:4711"'], "2001:db8::/64"),
        (["for=9.9.9.9, for=10.0.0.7"], "9.9.9.9"),
        (["for=9.9.9.9, for=_hidden"], "10.0.0.1"),
        (["for=9.9.9.9, proto=https"], "10.0.0.1"),
        (['for=9.9.9.9;by="a, b"'], "9.9.9.9"),
        (['for=9.9.9.9;by="a, for=1.1.1.1"'], "9.9.9.9"),
        (['by="a;for=1.1.1.1, b\\"";for="9.9.9.9"'], "9.9.9.9"),
        (['for=1.1.1.1, for="9.9.9.9";by="x, y", for=10.0.0.7'], "9.9.9.9"),
        (['for="1.1.1.1, for="9.9.9.9"'], "9.9.9.9"),  # the client wrote a quote without its end
        (['for=1.1.1.1;by="', "for=9.9.9.9"], "9.9.9.9"),
        (['"' * 7 + "," * 7 + " for=9.9.9.9"], "9.9.9.9"),
    ],
)
def test_forwarded(values: list[str], address: str) -> None:
    of = Address(["10.0.0.0/8"], header="Forwarded")
    assert of(forwarded("10.0.0.1", *values, header="forwarded")) == address


def test_a_field_of_one_address_is_believed_from_a_proxy_only_and_if_it_is_one() -> None:
    of = Address(["10.0.0.0/8"], header="X-Real-IP")
    assert of(forwarded("10.0.0.1", "9.9.9.9", header="x-real-ip")) == "9.9.9.9"
    assert of(forwarded("8.8.8.8", "9.9.9.9", header="x-real-ip")) == "8.8.8.8"
    assert of(forwarded("10.0.0.1", "1.1.1.1", "9.9.9.9", header="x-real-ip")) == "10.0.0.1"
    assert of(forwarded("10.0.0.1", "1.1.1.1, 9.9.9.9", header="x-real-ip")) == "10.0.0.1"


@pytest.mark.parametrize("peer", [None, ""])
def test_a_unix_socket_has_no_address(peer: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r'trusted_proxies=\["unix"\]'):
        Address()(forwarded(peer, "9.9.9.9"))
    assert Address(["unix"])(forwarded(peer, "1.1.1.1, 9.9.9.9")) == "9.9.9.9"
    assert Address(["unix"])(forwarded(peer)) == "unix"


@pytest.mark.parametrize(
    "proxies",
    [
        ["*"],
        ["0.0.0.0/0"],
        ["::/0"],
        ["::ffff:0:0/96"],
        1,
        "10.0.0.0/8",
        ["10.0.0.1/8"],
        [1],
        ["proxy"],
    ],
)
def test_what_would_trust_everybody_is_a_mistake(proxies: object) -> None:
    with pytest.raises(ConfigurationError, match="trusted_proxies="):
        Address(proxies)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("options", [{"header": "a b"}, {"header": ""}, {"ipv6_prefix": 0}])
def test_other_mistakes(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Address(**options)  # type: ignore[arg-type]  # that is the test
