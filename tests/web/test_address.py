"""The address of a client: the peer of the socket, unless the peer is a proxy that is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ("2001:4860::8888", "2001:4860::/64"),  # beside the networks that carry IPv4
        ("64:ff9b:1::9.9.9.9", "64:ff9b:1::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_client_has_a_whole_network_of_version_6(peer: str, address: str) -> None:
    assert Address()((peer, {})) == address


def test_a_longer_prefix_tells_hosts_apart() -> None:
    assert Address(ipv6_prefix=128)(("2001:db8::1", {})) == "2001:db8::1"


CARRIERS: dict[str, Callable[[int], int]] = {
    "mapped": lambda ipv4: 0xFFFF << 32 | ipv4,
    "NAT64": lambda ipv4: 0x64FF9B << 96 | ipv4,
    "6to4": lambda ipv4: 0x2002 << 112 | ipv4 << 80 | 0x1_0000_0000_0000_0007,
    "Teredo": lambda ipv4: 0x2001 << 112 | 0x4136E378_8000_63BF << 32 | ipv4 ^ 0xFFFFFFFF,
}
"""An address of IPv6 that carries one of IPv4, as the RFCs 4291, 6052, 3056 and 4380 have it."""


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
def test_a_proxy_that_was_forgotten_is_logged_once(
    header: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"header": header} if header == "x-real-ip" else {}
    for trusted, logged in (([], 1), (["192.0.2.1"], 1), (["10.0.0.0/8"], 0)):
        caplog.clear()
        address = Address(trusted, **options)
        for number in range(5):
            address(forwarded("10.0.0.7", f"1.2.3.{number}", header=header))
        warned = [each for each in caplog.messages if "trusted_proxies=['10.0.0.7']" in each]
        assert len(warned) == logged


@pytest.mark.parametrize("peer", ["10.0.0.7", "2001:db8:7::1"])
def test_a_proxy_in_front_of_one_that_the_server_knows_is_logged_once(
    peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn, told of nginx alone, takes the network in front of nginx for the client."""
    address = Address()
    for number in range(5):
        address(forwarded(peer, f"1.2.3.{number}, {peer}"))
    (line,) = caplog.messages
    assert "have different addresses before its own in x-forwarded-for" in line
    assert f"trusted_proxies=[{address((peer, {}))!r}]" in line


def test_a_client_that_writes_the_field_itself_is_no_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = Address()
    for number in range(50):
        address(forwarded(f"8.8.8.{number}", f"1.2.3.4, 8.8.8.{number}"))
    assert not caplog.messages


def test_no_proxy_is_logged_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    address = Address()
    for _ in range(200):
        address(forwarded("1.2.3.4"))
        address(forwarded("1.2.3.4", "1.2.3.4"))  # a server has read the field already
        address(forwarded("2001:db8::5", "2001:db8::5"))
    address(forwarded("10.0.0.7", "1.2.3.4"))  # only the first requests are looked at
    assert not caplog.messages


def carrying(carrier: str, ipv4: str) -> str:
    return str(IPv6Address(CARRIERS[carrier](int(IPv4Address(ipv4)))))


@pytest.mark.parametrize("ipv6_prefix", [32, 64, 128])
@pytest.mark.parametrize("ipv4", ["9.9.9.9", "192.0.2.33", "10.1.2.3", "0.0.0.0"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_address_that_carries_one_of_version_4_is_that_one(
    carrier: str, ipv4: str, ipv6_prefix: int
) -> None:
    of, client = Address(ipv6_prefix=ipv6_prefix), carrying(carrier, ipv4)
    assert of((client, {})) == of((ipv4, {})) == ipv4
    behind = Address(["8.8.8.8"], header="forwarded", ipv6_prefix=ipv6_prefix)
    assert behind(forwarded("8.8.8.8", f'for="[{client}]:47"', header="forwarded")) == ipv4
    assert of.key_of(f"[{client}]:4711") == ipv4


@pytest.mark.parametrize("peer", ["10.0.0.1", *(carrying(each, "10.0.0.1") for each in CARRIERS)])
@pytest.mark.parametrize("proxies", ["10.0.0.0/8", "::ffff:10.0.0.0/104", "::ffff:10.0.0.1"])
def test_a_proxy_is_trusted_by_what_no_relay_can_write(proxies: str, peer: str) -> None:
    trusted = peer == "10.0.0.1" or peer.startswith("::ffff:")
    request = forwarded(peer, "9.9.9.9")
    assert Address([proxies])(request) == ("9.9.9.9" if trusted else "10.0.0.1")
    assert Address([peer])(request) == "9.9.9.9"  # where its address is named as it is


@pytest.mark.parametrize(
    ("values", "address"),
    [
        (["for=1.1.1.1, for=9.9.9.9;proto=https"], "9.9.9.9"),
        (['for="9.9.9.9:47";host="a, b"', 'for=10.0.0.7;host="x;for=1.1.1.1"'], "9.9.9.9"),
        (['by="x;for=1.1.1.1";for=9.9.9.9;'], "9.9.9.9"),
        (["for=9.9.9.9;for=1.1.1.1"], "10.0.0.1"),  # malformed, as are the following
        (['for=1.1.1.1"x'], "10.0.0.1"),
        (["for=1.1.1.1 x"], "10.0.0.1"),
        (['by=10.0.0.1;For="[2001:db8::1]:4711"'], "2001:db8::/64"),
        (["for=9.9.9.9, for=10.0.0.7"], "9.9.9.9"),
        (["for=9.9.9.9, for=_hidden"], "10.0.0.1"),
        (["for=9.9.9.9, proto=https"], "10.0.0.1"),
    ],
)
def test_forwarded(values: list[str], address: str) -> None:
    of = Address(["10.0.0.0/8"], header="Forwarded")
    assert of(forwarded("10.0.0.1", *values, header="forwarded")) == address


@given(before=st.text('for=1.", ;\\'), host=st.text('h:1.",;=\\ '), is_first=st.booleans())
def test_what_a_client_writes_changes_nothing_of_what_its_proxy_appends(
    before: str, host: str, is_first: bool
) -> None:
    escaped = re.sub(r'(["\\])', r"\\\1", host)
    pairs = ["for=9.9.9.9", f'host="{escaped}"'][:: 1 if is_first else -1]
    value = f"{before}, {';'.join(pairs)}, for=10.0.0.7"
    of = Address(["10.0.0.0/8"], header="forwarded")
    assert of(forwarded("10.0.0.1", value, header="forwarded")) == "9.9.9.9"


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
        ["*"], ["0.0.0.0/0"], ["::/0"], 1, "10.0.0.0/8", ["10.0.0.1/8"], [1], ["proxy"],
        ["::ffff:0:0/96"], ["64:ff9b::/96"], ["2002::/16"], ["2001::/32"], ["2000::/3"],
    ],
)  # fmt: skip
def test_what_would_trust_everybody_is_a_mistake(proxies: object) -> None:
    with pytest.raises(ConfigurationError, match="trusted_proxies="):
        Address(proxies)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("options", [{"header": "a b"}, {"header": ""}, {"ipv6_prefix": 0}])
def test_other_mistakes(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Address(**options)  # type: ignore[arg-type]  # that is the test
