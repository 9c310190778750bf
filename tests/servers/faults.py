"""The faults that the proxy causes, as networks and servers have them.

A fault does what a real network can do: a byte stream may stall or end anywhere, but it never
continues with a gap in it. So after a reply was dropped, its connection delivers no more, even
after the fault has ended; new connections have the present fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the link.

    `only`: bytes that a request must contain to be affected (`b"EVALSHA"`, upper case; the
    handshake then passes). `times`: how many requests are affected, before all others pass.
    `every`: of the requests that would be affected, only each so-many-th is.
    """

    only: bytes | None = None
    times: int | None = None
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Pass(Fault):
    """No fault."""


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """Requests or replies arrive late by so many seconds, in order and complete."""

    requests: float = 0.0
    replies: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Blackhole(Fault):
    """Requests are dropped, and the connection stays open. The server receives nothing. Without
    `connects`, connecting never ends either, as where a firewall drops the packets.
    """

    connects: bool = True


@dataclass(frozen=True, kw_only=True)
class Silent(Fault):
    """New connections are accepted, and nothing is ever read from them or sent."""


@dataclass(frozen=True, kw_only=True)
class Refuse(Fault):
    """Connections are refused, and the open ones are reset."""


@dataclass(frozen=True, kw_only=True)
class ResetBeforeSend(Fault):
    """The connection is reset when a request comes, which the server does not receive."""


@dataclass(frozen=True, kw_only=True)
class ResetAfterSend(Fault):
    """The server receives the request, and the client gets a reset in place of the reply."""


@dataclass(frozen=True, kw_only=True)
class DropReply(Fault):
    """The request is executed and its reply dropped. `close`: then the connection ends."""

    close: bool = False


@dataclass(frozen=True, kw_only=True)
class Trickle(Fault):
    """One byte at a time, in both directions, with `pause` seconds between."""

    pause: float = 0.001
