"""Websockets against a limit of handshakes, and one of messages."""

from __future__ import annotations

from typing import NamedTuple

from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect


class Tried(NamedTuple):
    """What six handshakes and six messages have got."""

    statuses: list[int]
    retry_after: str | None
    body: bytes
    """Of the last handshake that was refused."""
    answers: list[str]


def attempt(url: str, handshakes: int = 6, messages: int = 6, source: str = "127.0.0.1") -> Tried:
    """Open connections one after the other, and send messages over the first. Requests come from
    `source`, an address of this machine.
    """
    statuses, answers = [], []
    retry_after, body = None, b""
    for number in range(handshakes):
        try:
            with connect(url, open_timeout=60, close_timeout=5, source_address=(source, 0)) as link:
                statuses.append(101)
                if number == 0:
                    for text in range(messages):
                        link.send(str(text))
                        answers.append(str(link.recv(timeout=60)))
        except InvalidStatus as refused:
            statuses.append(refused.response.status_code)
            retry_after = refused.response.headers.get("Retry-After")
            body = bytes(refused.response.body or b"")
    return Tried(statuses, retry_after, body, answers)
