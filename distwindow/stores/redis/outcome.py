"""Execution of a command, at most once: where it is sent, its time, and what a reply leads to.

The outcomes of a call. Retries, errors and statistics distinguish them:

  surely not executed   an error reply, or no byte was sent        sent once more if time is left,
                                                                   or until its slot has migrated
  executed              a reply that begins with the right stamp
  unknown               bytes were sent, and no such reply came    never sent again

Beside them there are configuration errors, for which no retry helps.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from redis.connection import DefaultParser
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from ...errors import (
    ConfigurationError,
    DistwindowError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from ...ring.command import Command, is_later
from ...ring.replies import PAST_DEADLINE
from ...support.backoff import Backoff
from .topology import CallSettings, Node, Reachability, Topology

Reply = TypeVar("Reply")
MIGRATION_PAUSES = Backoff(0.005, 0.05)
"""The delays before a call is sent again whose slot migrates."""
_MIN_LEFT_S = 0.02
"""With less time left after the pause, or less than some round trips, it is not sent again: a reply
that comes too late would make its outcome unknown.
"""
MAX_PIPELINE = 256
"""Commands of an exchange that are sent at once: all of them have to be answered in time."""
_MAX_REDIRECTS = 4
"""How often a call follows MOVED and ASK, which nodes may answer in turns while they disagree."""
ASKING = b"*1\r\n$6\r\nASKING\r\n"
RawReply: TypeAlias = "list[Any] | int | bytes | str | Exception | NoReply | None"
"""The answer to a request: hiredis's reply (errors as objects), or `NoReply`."""


def execute_once(
    command: Command[Reply],
    topology: Topology,
    settings: CallSettings,
    deadline: float,
    sent: Request | None = None,
) -> Generator[Request, RawReply, Reply]:
    """Get `command` executed at most once, by `deadline` (monotonic seconds).

    `sent` is the first request, if a store has sent it already. The command is sent again, at most
    once besides redirects and a script that the server did not have, only if it was surely not
    executed; while its slot migrates, as often as that. Raises `StoreTimeout`, `StoreUnavailable`
    or `ConfigurationError`.
    """
    if settings.client_clock and command.now_ms is None:
        command = command.with_time(settings.clock.now_ms())
    node = topology.node_of(command) if sent is None else sent.node
    send_script = had_no_script = asking = retried = False
    redirects = migrations = 0
    pause_s = 0.0
    while True:
        request = sent or Request(
            node, command, deadline, send_script=send_script, asking=asking, pause_s=pause_s
        )
        sent, pause_s = None, 0.0
        raw = yield request
        code = text = ""
        if type(raw) is list and len(raw) >= 3 and raw[0] == request.stamp:
            now = settings.clock.monotonic()
            if raw[1] != PAST_DEADLINE:
                node.clock.on_reply(command, raw[2], now)
                return command.reply(raw)
            node.clock.on_reply(None, raw[2], now)
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
            text = str(raw)
            if (found := not_executed_code(text)) is None:
                key = command.keys[0].decode("utf-8", "backslashreplace")
                refused = refusal(node.name, text, f" (key {key!r})")
                refused.is_of_key = _OF_KEY.search(text) is not None
                if refused.is_of_key:
                    node.outages.last_error = str(refused)
                else:
                    node.on_refused_call(refused)
                raise refused
            code = found
            if code == "NOSCRIPT" and not send_script:
                # A restarted server refuses hundreds of calls at once, and a script has some kB: it
                # need not be sent if another call has sent it after this one.
                sent_since = request.node.script_stamps.get(command.script)
                is_sent = sent_since is not None and is_later(sent_since, request.stamp)
                send_script, had_no_script = had_no_script or not is_sent, True
                continue
            if code in _SLOT_MIGRATES:
                migrations += 1
                pause_s = MIGRATION_PAUSES.delay_s(migrations)
                left_s = deadline - settings.clock.monotonic() - pause_s
                if left_s < max(_MIN_LEFT_S, 4 * (node.round_trip_s or 0)):
                    raise StoreUnavailable(
                        f"{node.name} cannot serve now: {text}; the slot of the key migrates to "
                        "another node, and the call has waited until its deadline"
                    )
                node, asking = topology.node_of(command), False
                retried, redirects = False, 0
                continue
            failure = StoreUnavailable(f"{node.name} cannot serve now: {text}")
            node, asking = _next_node(request, code, text, topology, command)
            # A slot that has moved may be migrating again: then MOVED is followed by ASK.
            if code in ("MOVED", "ASK") and redirects < _MAX_REDIRECTS:
                redirects += 1
                if settings.clock.monotonic() < deadline:
                    continue
        if retried or settings.clock.monotonic() >= deadline:
            if code in _REFUSES_CALLS:
                request.node.on_refused_call(text)
            raise failure
        retried = True


def _next_node(
    refused: Request, code: str, text: str, topology: Topology, command: Command[Any]
) -> tuple[Node, bool]:
    """Return where the second request goes after this error reply, and whether ASKING goes before
    it.
    """
    node = refused.node
    if (to := re.search(r"\b(?:MOVED|ASK) \d+ (\S*):(\d+)", text)) is not None:
        asking = code == "ASK"
        # An empty host is that of the node that replied.
        address = to[1], int(to[2])
        return topology.follow_redirect(node, *address, command, permanent=not asking), asking
    if code in ("READONLY", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN"):
        node.on_refused(refused.generation)
        topology.request_refresh()
        return topology.node_of(command), False
    return node, False


class Request:
    """A command on its way to a node. Its frame needs the server's clock, so it is made late."""

    __slots__ = (
        "_command", "_deadline", "_send_script", "asking", "generation", "node", "pause_s", "stamp",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        command: Command[Any],
        deadline: float,
        *,
        send_script: bool = False,
        asking: bool = False,
        stamp: bytes = b"",
        generation: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.node = node
        self.generation = node.generation if generation is None else generation
        """That of the connection over which it is sent."""
        self.asking = asking
        """Send ASKING before it, which has a reply of its own: the slot is migrating to `node`."""
        self.pause_s = pause_s
        """Seconds to wait before it is sent."""
        self.stamp = stamp
        """That of its frame; empty as long as nothing was sent."""
        self._command = command
        self._deadline = deadline
        self._send_script = send_script

    def frame(self) -> bytes:
        """The bytes to send, with a new stamp."""
        self.stamp = self.node.clock.new_stamp(self._deadline)
        if self._send_script:
            self.node.script_stamps[self._command.script] = self.stamp
        frame = self._command.eval_frame if self._send_script else self._command.frame
        return ASKING + frame(self.stamp) if self.asking else frame(self.stamp)


class NoReply(NamedTuple):
    """No reply came."""

    why: object
    sent: bool
    """True if bytes may have reached the server."""
    late: bool = False
    """True if the deadline passed first."""


_NOT_EXECUTED = re.compile(
    r"\b(NOSCRIPT|MOVED|ASK|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|LOADING|BUSY|READONLY|NOREPLICAS|"
    r"OOM|MISCONF|max number of clients|non local key)\b"
)
"""A "non local key" is none of the cluster, but one that a script did not find on a node from which
its slot migrates. The server finds all keys of a call before the script begins, the time stands
still while it runs, and no script touches a key that it has deleted. So that is a key that expired
just before the script began; and as each script reads all its keys before it writes any, it has
written nothing.
"""
_SLOT_MIGRATES = frozenset(("TRYAGAIN", "non local key"))
"""Of these, those that end when the slot, or one more of the call's keys, has migrated."""
_REFUSES_CALLS = frozenset(
    ("CLUSTERDOWN", "MASTERDOWN", "LOADING", "BUSY", "READONLY", "NOREPLICAS", "OOM", "MISCONF")
)
"""Of these, those that say that the server executes no call now, whatever its key."""
RIGHTS = (
    "+time +info +evalsha +eval +hget +hset +hmget +hincrby +hdel +hgetall +hlen +hrandfield +del "
    "+pexpire"
)
"""The least rights of a user with which limiters work, in the words of an ACL rule."""
RIGHTS_OF_SLOTS = "+zadd +zcount +zrange +zrangebyscore +zrem +zremrangebyscore +zscore"
"""Rights that concurrency limits need besides."""
GRANT = (
    f"grant the user these rights: {RIGHTS} (for concurrency limits also {RIGHTS_OF_SLOTS}), on "
    "the keys that begin with the prefix"
)
GIVE_TIME = 'let it execute TIME, also in scripts, or give clock="client"'
_NO_SENTINEL = "it is no sentinel; write redis:// in place of redis+sentinel://, or another port"
_NO_CLUSTER = "it is no cluster; write redis:// in place of redis+cluster://"
_FIXES = (
    ("WRONGTYPE", "the key holds another type; choose a prefix that nothing else uses"),
    ("to run the 'time' command", f'{GRANT}, or give clock="client"'),
    ("NOPERM", GRANT),
    ("user executing the script can't", GRANT),
    ("NOAUTH", "the server requires a password; put it into the URL"),
    ("WRONGPASS", "wrong user name or password"),
    ("non deterministic", "the server is too old; distwindow needs Redis 6.2 or Valkey"),
    ("not allowed from script", GIVE_TIME),
    ("unknown command 'TIME'", GIVE_TIME),
    ("unknown command `TIME`", GIVE_TIME),  # of Redis 6.2
    ("unknown command 'SENTINEL'", _NO_SENTINEL),
    ("unknown command `SENTINEL`", _NO_SENTINEL),
    ("Bad TLS header", "it wants TLS; write rediss:// in the URL"),  # Dragonfly
    ("unknown command", "the server lacks a command that distwindow needs (Redis 6.2 or Valkey)"),
    ("DB index is out of range", "the URL names a database that the server does not have"),
    ("luster mode is not enabled", _NO_CLUSTER),
    ("luster support disabled", _NO_CLUSTER),
    ("perform arithmetic", "the hash of this key is no ring; choose another prefix"),
    ("not an integer", "the hash of this key is no ring; choose a prefix that nothing else uses"),
    ("distwindow:", "a script was called with other arguments than it takes"),
)
_OF_KEY = re.compile("WRONGTYPE|perform arithmetic|not an integer|access (a|.*one of the) key")
"""A sign of what is wrong with the key of a call, and not with all calls."""
_NOT_ANSWERED = (
    "the call was surely not executed; where no call is ever answered, see whether the port is one "
    "of Redis, and of TLS (rediss://) or not"
)
_CODES = {
    kind: token for token, kind in DefaultParser.EXCEPTION_CLASSES.items() if isinstance(kind, type)
}
"""The first word of an error reply, by the exception class that redis-py has for it."""


def restore_code(error: ResponseError) -> ResponseError:
    """The error reply as the server sent it: redis-py removes a first word that has a class."""
    token = _CODES.get(type(error))
    return error if token is None else ResponseError(f"{token} {error}")


def not_executed_code(text: str) -> str | None:
    """Return the word in an error reply that says that the server may execute the same later; None
    for a reply after which no retry helps.

    Old servers and Dragonfly wrap errors of scripts, so the word may be anywhere in the text.
    """
    found = _NOT_EXECUTED.search(text)
    # The error of an unknown command quotes the arguments, and so a key, which may be such a code.
    return None if found is None or "unknown command" in text else found[1]


def refusal(node: str, text: str, where: str = "") -> ConfigurationError:
    """Return the error of what the server refuses, with what to do about it."""
    fix = next((f"; {fix}" for sign, fix in _FIXES if sign in text), "")
    return ConfigurationError(f"{node} refuses: {text}{where}{fix}")


def is_unknown(exc: BaseException) -> bool:
    """True if nobody knows whether a call that ended so, interrupted ones too, was charged."""
    if isinstance(exc, StoreError):
        return exc.charged is None
    return not isinstance(exc, DistwindowError)


def timed_out(node: str, timeout: float, *, sent: bool) -> StoreTimeout:
    """The error of a call whose deadline passed; `sent`: bytes may have reached the server."""
    outcome = "the outcome of the call is unknown" if sent else _NOT_ANSWERED
    return StoreTimeout(
        f"{node} did not answer within {timeout:g} s; {outcome}", charged=None if sent else False
    )


def no_reply_failure(node: str, why: object, *, sent: bool) -> StoreError:
    """The error of a call whose connection failed; `sent`: bytes may have reached the server."""
    outcome = "; the outcome of the call is unknown" if sent else ""
    # A server that accepts a connection and stays silent may be busy for a moment.
    kind = StoreTimeout if isinstance(why, (TimeoutError, RedisTimeout)) else StoreUnavailable
    return kind(f"{node} is not reachable: {why}{outcome}", charged=None if sent else False)


def check_not_away(server: Reachability) -> None:
    """Raise `StoreError` if connecting to `server` is not to be tried now."""
    if (why := server.unavailable_reason()) is not None:
        raise no_reply_failure(server.name, why, sent=False)
