"""How one command gets executed at most once: where it is sent, and what each raw reply leads to.

`execute_once` is a generator that yields a `Request` and is sent the raw reply, so that the
blocking and the asyncio store share every decision about retries.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...core.errors import StoreError
from ...protocol.frames import Command
from ...protocol.replies import PAST_DEADLINE
from .outcome import ErrorReply, error_reply, failure_of_reply, no_reply_failure, timed_out
from .topology import CallSettings, Node, Topology

Reply = TypeVar("Reply")

ASKING = b"*1\r\n$6\r\nASKING\r\n"


class NoReply(NamedTuple):
    """No reply came."""

    why: object
    sent: bool
    """True if bytes may have reached the server."""
    late: bool = False
    """True if the deadline passed first."""


RawReply: TypeAlias = "list[Any] | int | bytes | str | Exception | NoReply | None"
"""What comes back for a request: the reply as hiredis parses it, where an error reply is an
exception object, or `NoReply`.
"""


class Request:
    """A command on its way to a node. Its frame is made when the connection is open, because the
    guard's deadline needs the server's clock.
    """

    __slots__ = ("_command", "_deadline", "_send_script", "asking", "generation", "guard", "node")

    def __init__(
        self,
        node: Node,
        command: Command[Any],
        deadline: float,
        *,
        send_script: bool = False,
        asking: bool = False,
        guard: bytes = b"",
        generation: int | None = None,
    ) -> None:
        self.node = node
        self.generation = node.generation if generation is None else generation
        """That of the connection over which it is sent."""
        self.asking = asking
        """Send ASKING before it, which has a reply of its own: the slot is migrating to `node`."""
        self.guard = guard
        self._command = command
        self._deadline = deadline
        self._send_script = send_script

    def frame(self) -> bytes:
        """The bytes to send, with a new guard."""
        clock = self.node.clock
        self.guard = clock.new_guard(clock.to_server_ms(self._deadline))
        frame = self._command.eval_frame if self._send_script else self._command.frame
        return ASKING + frame(self.guard) if self.asking else frame(self.guard)


def execute_once(
    command: Command[Reply],
    topology: Topology,
    settings: CallSettings,
    deadline: float,
    sent: Request | None = None,
) -> Generator[Request, RawReply, Reply]:
    """Get `command` executed at most once, by `deadline` (monotonic seconds).

    `sent` is the first request, if a store has sent it already. The command is sent again, at most
    once besides a script that the server did not have, only if it was surely not executed. Raises
    `StoreTimeout`, `StoreUnavailable` or `ConfigurationError`.
    """
    if settings.client_clock and command.now_ms is None:
        command = command.with_time(settings.clock.now_ms())
    node = topology.node_of(command) if sent is None else sent.node
    send_script = asking = retried = False
    while True:
        request = sent or Request(node, command, deadline, send_script=send_script, asking=asking)
        sent = None
        raw = yield request
        if type(raw) is list and len(raw) >= 3 and raw[0] == request.guard:
            node.clock.update(raw[2])
            if raw[1] != PAST_DEADLINE:
                return command.reply(raw)
            failure: StoreError = timed_out(node.name, settings.timeout, sent=False)
        elif isinstance(raw, NoReply):
            topology.request_refresh()
            if raw.late:
                raise timed_out(node.name, settings.timeout, sent=raw.sent)
            failure = no_reply_failure(node.name, raw.why, sent=raw.sent)
            if raw.sent:
                raise failure
            node = topology.node_of(command)
        elif not isinstance(raw, Exception):
            # Replies and requests no longer match on this connection, so its later replies would
            # belong to other calls, too.
            node.invalidate_connections(request.generation)
            raise no_reply_failure(node.name, "it sent the reply of another call", sent=True)
        else:
            error = error_reply(str(raw), node.name, command.keys[0])
            if error.code == "NOSCRIPT" and not send_script:
                send_script = True
                continue
            failure = failure_of_reply(node.name, error)
            node, asking = _next_node(request, error, topology, command)
        if retried or settings.clock.monotonic() >= deadline:
            raise failure
        retried = True


def _next_node(
    refused: Request, error: ErrorReply, topology: Topology, command: Command[Any]
) -> tuple[Node, bool]:
    """Return where the second request goes, and whether ASKING goes before it."""
    node = refused.node
    if (address := error.redirect()) is not None:
        asking = error.code == "ASK"
        return topology.follow_redirect(node, *address, command, permanent=not asking), asking
    if error.code in ("READONLY", "MASTERDOWN", "CLUSTERDOWN"):
        node.on_refused(refused.generation)
        topology.request_refresh()
        return topology.node_of(command), False
    return node, False
