"""One command's way to its answer: where to send it, and what to do when the answer is a no.

A dialogue again: it yields `Send` and is given what came back, so that the blocking and the
awaiting transport share every decision about retries.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from ...core.errors import StoreError
from ...protocol.commands import Command
from ...protocol.replies import EXPIRED
from .outcome import ErrorReply, error_reply, failure_of_reply, no_reply_failure, timed_out
from .topology import CallSettings, Node, Topology

Reply = TypeVar("Reply")

ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Request:
    """A command on its way to a node. The transport asks for the frame once it is connected, as
    the guard's deadline needs the server's clock.
    """

    __slots__ = ("_by_text", "_command", "_deadline", "asking", "guard", "node")

    def __init__(
        self,
        node: Node,
        command: Command[Any],
        deadline: float,
        *,
        by_text: bool = False,
        asking: bool = False,
        guard: bytes = b"",
    ) -> None:
        self.node = node
        self.asking = asking
        """An ASKING goes before it, and is answered too: its slot is on its way to this node."""
        self.guard = guard
        self._command = command
        self._deadline = deadline
        self._by_text = by_text

    def frame(self) -> bytes:
        """The bytes to send."""
        clock = self.node.clock
        self.guard = clock.guard(clock.until_ms(self._deadline))
        frame = self._command.eval_frame if self._by_text else self._command.frame
        return ASKING + frame(self.guard) if self.asking else frame(self.guard)


class NoReply(NamedTuple):
    """No reply came. `sent`: bytes may have reached the server."""

    why: object
    sent: bool
    late: bool = False


def execute_once(
    command: Command[Reply],
    topology: Topology,
    settings: CallSettings,
    deadline: float,
    under_way: Request | None = None,
) -> Generator[Request, Any, Reply]:
    """Get `command` executed at most once, by `deadline` (monotonic seconds).

    `under_way` is the first `Send` where a transport's hot path has made it already.

    Sent a second time only when the first was surely not executed. Raises `StoreTimeout`,
    `StoreUnavailable` or `ConfigurationError`.
    """
    if settings.client_clock and command.now_ms is None:
        command = command.with_time(settings.clock.now_ms())
    node = topology.node_of(command) if under_way is None else under_way.node
    by_text = asking = retried = False
    while True:
        request = under_way or Request(node, command, deadline, by_text=by_text, asking=asking)
        under_way = None
        raw = yield request
        if type(raw) is list and len(raw) >= 3 and raw[0] == request.guard:
            node.clock.learn(raw[2])
            if raw[1] != EXPIRED:
                return command.reply(raw)
            failure: StoreError = timed_out(node.name, settings.timeout, sent=False)
        elif isinstance(raw, NoReply):
            topology.on_failure()
            if raw.late:
                raise timed_out(node.name, settings.timeout, sent=raw.sent)
            failure = no_reply_failure(node.name, raw.why, sent=raw.sent)
            if raw.sent:
                raise failure
            node = topology.node_of(command)
        elif not isinstance(raw, Exception):
            # Out of step: this connection's later replies would be those of other calls, too.
            node.drop_connections()
            raise no_reply_failure(node.name, "it sent the reply of another call", sent=True)
        else:
            error = error_reply(str(raw), node.name, command.keys[0])
            if error.token == "NOSCRIPT" and not by_text:
                by_text = True
                continue
            failure = failure_of_reply(node.name, error)
            node, asking = _next_node(node, error, topology, command)
        if retried or settings.clock.monotonic() >= deadline:
            raise failure
        retried = True


def _next_node(
    node: Node, error: ErrorReply, topology: Topology, command: Command[Any]
) -> tuple[Node, bool]:
    """Where the second try goes, and whether it has to ask."""
    if (address := error.redirect()) is not None:
        asking = error.token == "ASK"
        return topology.redirected(node, *address, command, for_good=not asking), asking
    if error.token in ("READONLY", "MASTERDOWN", "CLUSTERDOWN"):
        node.drop_connections()
        topology.on_failure()
        return topology.node_of(command), False
    return node, False
