"""A blocking store's connections, one for each thread and node: opened by redis-py, used by us."""

from __future__ import annotations

# Python imports these when it first looks a host up, and redis-py when it makes its first client,
# in the thread that connects. A child that is forked during such an import could never connect: it
# would wait for the import's lock, or find half of a module.
import email.parser  # noqa: F401 - imported before a fork, see above
import encodings.idna  # noqa: F401 - imported before a fork, see above
import os
import queue
import select
import socket
import ssl
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import hiredis
from redis.connection import SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import ConfigurationError, closed_failure
from ...ring.clock import Clock
from ...support.fork import FORK_WAIT
from ...support.locks import PATCH_STATE, OneShotEvent, is_interruption, start_thread
from .handshake import (
    HandshakeResult,
    address_of,
    configuration_failure,
    handshake,
    may_be_wrong_server,
    mistake_of,
    was_reset,
)
from .outcome import NoReply, RawReply, Request, restore_code
from .topology import ASK_SENTINELS_EVERY_S, Node
from .urls import hide_secrets
from .wrong_server import check_seconds, endpoints_of, wait_seconds

T = TypeVar("T")

_MAX_IDLE = 16
"""The most connections of ended threads that are kept for new threads."""
_FEW_THREADS = 12
"""The most threads that make their calls side by side. Sharing calls halves the throughput of 8
threads, and doubles that of 100 (docs/decisions/0009-threads-share-calls.md). The main thread and
the worker's thread may be two of them.
"""


class ThreadConnections:
    """The connections of all threads.

    a thread's first call to a node   takes over an idle connection, or makes a new one
    its later calls                   use that connection
    a call by a signal handler        uses connections of its own, which it closes at its end
    the thread ends                   its connections become idle, and new threads take them over
    the limiter is closed             all are closed, and no thread gets one any more
    the process forks                 the child has none of them; those of the parent stay open
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_closed = False
        """True after `close`."""
        self._reset()

    def _reset(self) -> None:
        # Re-entrant, because a signal handler may call the limiter that it has interrupted.
        self._lock = threading.RLock()
        self.this_thread = _new_thread_state()
        self._by_thread: dict[weakref.ref[_ThreadLifetime], dict[Node, BlockingConnection]] = {}
        self._ended_threads: queue.SimpleQueue[weakref.ref[_ThreadLifetime]] = queue.SimpleQueue()
        """The tokens of threads that have ended."""
        self._idle: list[BlockingConnection] = []
        """Connections of ended threads."""
        self.has_many_threads = False
        """True while more than `_FEW_THREADS` threads have connections: then they share calls."""
        self._finalizer = weakref.finalize(self, _close_all, self._by_thread, self._idle)
        self._finalizer.atexit = False

    def after_fork(self) -> None:
        """Start without connections, and with a lock that no thread holds."""
        self._finalizer()  # closes the descriptors of this process only
        self._reset()

    def check_open(self) -> None:
        """Raise `ConfigurationError` after `close`."""
        if self.is_closed:
            raise closed_failure()

    def connection_to(self, node: Node) -> BlockingConnection:
        """The current thread's connection to `node`; not opened yet if it is new."""
        this_thread = self.this_thread
        connection = this_thread.connections.get(node)
        if connection is None:
            PATCH_STATE.check()
            with self._lock:
                self.check_open()
                if this_thread.lifetime is None:
                    token = _ThreadLifetime()
                    self._by_thread[weakref.ref(token, self._ended_threads.put)] = (
                        this_thread.thread_connections
                    )
                    this_thread.lifetime = token
                connection = this_thread.connections[node] = self._idle_connection_to(
                    node
                ) or BlockingConnection(node, self._clock)
                for other in [each for each in this_thread.connections if each.is_replaced]:
                    this_thread.connections.pop(other).close()
                self.has_many_threads = len(self._by_thread) > _FEW_THREADS
        return connection

    def restore(self, connections: dict[Node, BlockingConnection]) -> None:
        """Give an interrupted call its connections back, and close those of the handler's call."""
        this_thread = self.this_thread
        opened = this_thread.connections
        this_thread.connections = connections
        for connection in opened.values():
            connection.close()

    def close(self) -> None:
        """Close every connection; `check_open` and `connection_to` raise from now on."""
        with self._lock:
            self.is_closed = True
            # Each thread has to ask for its connection again, and is refused.
            self.this_thread = _new_thread_state()
        _close_all(self._by_thread, self._idle)
        self._finalizer.detach()

    def _idle_connection_to(self, node: Node) -> BlockingConnection | None:
        """Take an idle connection to `node`, if there is one. Under the lock."""
        while not self._ended_threads.empty():
            # In this order no connection is lost if a signal handler raises: at worst it stays in
            # `_by_thread`, and is closed with the limiter.
            token = self._ended_threads.get()
            self._idle += self._by_thread.get(token, {}).values()
            self._by_thread.pop(token, None)
            while len(self._idle) > _MAX_IDLE:
                self._idle[0].close()
                self._idle.pop(0)
        for connection in self._idle:
            if connection.node is node:
                self._idle.remove(connection)
                return connection
        return None


class ThreadState:
    """State of the store for the current thread: see `_new_thread_state`."""

    def __init__(self) -> None:
        self.call_in_progress = False
        """True while a call is being made."""
        self.connections: dict[Node, BlockingConnection] = {}
        """The connections of the call that is being made."""
        self.thread_connections = self.connections
        """The connections of the thread; in a call by a signal handler another dict."""
        self.lifetime: _ThreadLifetime | None = None


def _new_thread_state() -> ThreadState:
    """Return an object that has the attributes of `ThreadState` for each thread. Its class is made
    here, because gevent may have patched `threading.local` since this module was imported: then it
    has them for each greenlet.
    """
    kind = type("LocalThreadState", (ThreadState, threading.local), {})
    state: ThreadState = kind()
    return state


class _ThreadLifetime:
    """Referred to by one thread alone, so that it is destroyed when the thread ends.

    The store notices that by the callback of a weak reference, which is a C function here. A
    destructor would be Python code, and Python drops what a signal handler raises in a destructor.
    """

    __slots__ = ("__weakref__",)


def _close_all(
    by_thread: Mapping[weakref.ref[_ThreadLifetime], dict[Node, BlockingConnection]],
    idle: list[BlockingConnection],
) -> None:
    """Close every connection, because the limiter is closed or has been garbage-collected."""
    for connections in list(by_thread.values()):
        for connection in list(connections.values()):
            connection.close()
    for connection in idle:
        connection.close()


_FRESH_S = 0.005
"""Seconds after the start of a call in which a connection is taken to be open, because a check
costs a system call. The time is this short because servers close idle connections.
"""


class BlockingConnection:
    """A connection to one node, used by one thread at a time. It reopens after it was closed.

    redis-py opens it (TLS, AUTH, RESP, Sentinel), and we use its socket.

      closed     no transport; `_open` starts a background job that connects
      opening    `_opening` is that job; a call whose time is over leaves it to the next call
      open       `_transport` is set; it is replaced if the node has a new generation, or if the
                 server has closed it
      failed     after an exchange without a reply, or interrupted by a signal handler: closed by
                 another thread, and then as `closed`

    A signal handler may raise anywhere in the main thread, so each step leaves one of these states.
    """

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._transport: Transport | None = None
        self._opening: BackgroundJob[_Opened] | None = None
        """Connects in the background. If it is not done in time, the next call waits for it."""
        self._transport_to_close: Transport | None = None
        """A transport that has failed and that another thread is to close."""
        self._generation = 0
        self._round_trip_s = 0.0
        """Seconds that a round trip took while connecting; 0 once a call was made."""
        self._last_used_at = 0.0
        """When the last call began, monotonic seconds."""

    def execute_request(self, request: Request, deadline: float) -> RawReply:
        """Send a request and return the raw reply to it."""
        if (no_reply := self._open(deadline)) is not None:
            return no_reply
        # A request that cannot be answered in time would only cost the connection.
        if self._clock.monotonic() + self._round_trip_s >= deadline:
            self._round_trip_s = 0.0
            return NoReply("deadline", sent=False, late=True)
        self._round_trip_s = 0.0
        return self.round_trip(request.frame(), deadline, replies=2 if request.asking else 1)

    def is_open(self, now: float) -> bool:
        """True if there is a connection that seems to be open, for a call that begins `now`. One
        that does not is closed. It is not checked if a call began on it in the last few ms.
        """
        if now >= self.node.ask_sentinels_at:
            self.node.ask_sentinels_at = now + ASK_SENTINELS_EVERY_S
            self.node.ask_sentinels()
        if self._transport is None:
            return False
        idle, self._last_used_at = now - self._last_used_at, now
        if self._generation != self.node.generation or (
            idle > _FRESH_S and self._transport.is_unusable()
        ):
            self.close()
            return False
        return True

    def round_trip(self, frame: bytes | None, deadline: float, replies: int = 1) -> RawReply:
        """Send `frame`, and return the last of its replies; without one, the next reply."""
        transport = self._transport
        if transport is None:  # another thread has just closed the limiter
            return NoReply("the connection was closed", sent=frame is None)
        try:
            raw = (
                transport.round_trip(frame, deadline)
                if frame is not None
                else transport.receive(deadline)
            )
            if replies > 1 and type(raw) is not NoReply:
                raw = transport.receive(deadline)
        except BaseException as exc:
            # First, and without a call in which a signal handler could raise again: later calls
            # must not use this transport. See `_discard_transport`.
            self._transport_to_close, self._transport = transport, None
            self._close_in_background()
            failed = isinstance(exc, (OSError, hiredis.HiredisError))
            if not failed or is_interruption(exc):
                raise
            raw = NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))
        if type(raw) is NoReply:
            self._discard_transport()
        return raw

    def pipeline(self, requests: Sequence[Request], deadline: float) -> list[RawReply]:
        """Send all requests in one write, and return the raw replies in order. From the first one
        on that did not come, there is a `NoReply` for each request.
        """
        if (no_reply := self._open(deadline)) is not None:
            return [no_reply] * len(requests)
        frames = b"".join([request.frame() for request in requests])
        try:
            raws = [self.round_trip(frames, deadline)]
            while len(raws) < len(requests) and type(raws[-1]) is not NoReply:
                raws.append(self.round_trip(None, deadline))
        except BaseException:  # a signal handler may also raise between two replies
            self._discard_transport()
            raise
        return raws + [raws[-1]] * (len(requests) - len(raws))

    def close(self) -> None:
        """Close the connection; the next exchange opens another. The references are deleted last,
        so that a caller that was interrupted by a signal handler can close it again.
        """
        transport, opening = self._transport, self._opening
        self._close_in_background()
        if transport is not None:
            transport.close()
        if opening is not None:
            opening.abandon()
        if self._transport is transport:
            self._transport = None
        if self._opening is opening:
            self._opening = None

    def _discard_transport(self) -> None:
        """Close a transport that has failed, or in whose exchange a signal handler has raised
        (Celery's soft time limit): replies that are still to come must not be taken for those of
        other calls. Another thread closes it, because a signal handler may raise here again.
        """
        if self._transport is not None:
            self._transport_to_close, self._transport = self._transport, None
            self._close_in_background()

    def _close_in_background(self) -> None:
        if self._transport_to_close is not None:
            if not start_thread(self._transport_to_close.close):
                self._transport_to_close.close()
            self._transport_to_close = None

    def _open(self, deadline: float) -> NoReply | None:
        """Connect by `deadline`, if it is not open, including name look-up, TLS and AUTH: redis-py
        has a timeout for each step, and none for all of them. If that takes longer, it goes on for
        the next call; otherwise a link of many round trips could never be opened. Return why there
        is no connection, or None. Raises `ConfigurationError`.
        """
        if self.is_open(self._clock.monotonic()):
            return None
        node = self.node
        self._close_in_background()  # an interruption may have left it undone
        opening = self._opening
        exc = None if opening is None else opening.failure
        # If it has failed since the call that began it, this call tries again, as an outage of that
        # time may be over; but not after a mistake, which callers have to know.
        if exc is not None and configuration_failure(exc, node.name) is None:
            opening = self._opening = None
        why = node.unavailable_reason()
        if why is not None and (opening is None or not opening.has_ended):
            return NoReply(why, sent=False)
        if opening is None:
            opening = self._opening = BackgroundJob(
                partial(_connect, node, self._clock), _close_opened
            )
        opening.start()
        seconds = deadline - self._clock.monotonic()
        if (
            not node.has_connected
            and node.wrong_server.is_due
            and not opening.wait(wait_seconds(seconds))
        ):
            opening.explain(partial(_find_wrong_server, node, seconds))
        if not opening.wait(deadline - self._clock.monotonic()):
            return NoReply("connecting", sent=False, late=True)
        exc = opening.failure
        if exc is not None:
            self._opening = None
            if isinstance(exc, JobAbandoned):
                return NoReply(exc, sent=False)
            if isinstance(exc, ConfigurationError):
                raise exc
            if (error := configuration_failure(exc, node.name)) is not None:
                raise error from exc
            return NoReply(exc, sent=False)
        opened = opening.result
        opened.handshake.apply(node)
        try:
            transport = make_transport(opened.socket, self._clock)
        except (OSError, ValueError) as failure:  # another thread has just closed the limiter
            if is_interruption(failure):
                raise
            self._opening = None
            return NoReply(failure, sent=False)
        generation, trip_s = opened.generation, opened.handshake.round_trip_s
        # In one step: a caller that is interrupted before it leaves the job to the next call.
        self._generation, self._round_trip_s, self._transport = generation, trip_s, transport
        self._opening = None
        return None


class _Opened(NamedTuple):
    """A new connection."""

    socket: Any
    """See `detach_socket`."""
    opened_by: int
    """The process that has opened it. A child that is forked meanwhile has this object, too."""
    generation: int
    handshake: HandshakeResult


def _close_opened(opened: _Opened) -> None:
    close_detached(opened.socket, opened.opened_by)


def _find_wrong_server(node: Node, timeout: float) -> ConfigurationError | None:
    """Return the mistake, if another server answers in the place of `node`."""
    error = node.wrong_server.find(endpoints_of(node.new_connection()), timeout)
    if error is not None:
        node.on_refused_client(error)
    return error


def _connect(node: Node, clock: Clock, timeout: float | None = None) -> _Opened:
    """Open a new connection to `node`. `timeout`: seconds for each step; None: as for all."""
    generation = node.generation
    began_at = clock.monotonic()
    connection = node.new_connection()
    if timeout is not None:
        connection.socket_timeout = connection.socket_connect_timeout = timeout
    seconds = connection.socket_timeout
    try:
        if (error := node.wrong_server.again(seconds)) is not None:
            raise error
        connection.connect()
        node.connected_to = address_of(connection)
        result = _run_handshake(connection, node, clock)
        return _Opened(detach_socket(connection), os.getpid(), generation, result)
    except BaseException as failure:  # whatever it is: nobody else could close this connection
        connection.disconnect()
        exc = tls_alert(connection, failure, seconds) or failure
        hide_secrets(exc, node.secrets)
        error = configuration_failure(exc, node.name)
        if node.wrong_server.is_due and may_be_wrong_server(exc, error):
            error = node.wrong_server.find(endpoints_of(connection), seconds) or error
        if error is not None:
            node.on_refused_client(error)  # the next call raises it
            if error is failure:
                raise
            raise error from exc
        if isinstance(exc, Exception):
            slow = isinstance(exc, (TimeoutError, RedisTimeoutError))
            node.on_connect_failed(exc, began_at, slow=slow)
        if exc is failure:
            raise
        raise exc from failure


def tls_alert(connection: Any, failure: BaseException, timeout: float) -> ssl.SSLError | None:
    """Return why TLS ended a new connection: redis-py writes first, and may not have read it."""
    if not was_reset(failure) or not isinstance(connection, SSLConnection):
        return None
    try:
        with connection._connect() as sock:  # type: ignore[no-untyped-call]  # not annotated
            sock.settimeout(check_seconds(timeout))
            sock.recv(1)
    except ssl.SSLError as alert:
        return alert
    except OSError:
        pass
    return None


def try_to_connect(node: Node, clock: Clock, timeout: float) -> None:
    """Connect to a node that is away, and close the connection again. Raises why that failed."""
    with FORK_WAIT.connecting():
        opened = _connect(node, clock, node.probe_timeout_s(timeout))
    opened.handshake.apply(node)
    _close_opened(opened)


def ask_once(connection: Any, words: tuple[str, ...]) -> RawReply:
    """Return the reply to a command on a redis-py connection of its own, or why there is none: a
    mistake as a `ConfigurationError`.
    """
    reply: RawReply
    try:
        connection.connect()
        reply = _ask(connection, words)
    except Exception as failure:  # whatever redis-py raises
        reply = tls_alert(connection, failure, connection.socket_timeout) or failure
    finally:
        connection.disconnect()
    return mistake_of(connection, reply)


def _run_handshake(connection: Any, node: Node, clock: Clock) -> HandshakeResult:
    steps = handshake(node, clock)
    try:
        words = next(steps)
        while True:
            words = steps.send(_ask(connection, words))
    except StopIteration as end:
        result: HandshakeResult = end.value
        return result


def _ask(connection: Any, words: tuple[str, ...]) -> RawReply:
    connection.send_command(*words, check_health=False)
    try:
        reply: RawReply = connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return exc
    return reply


def run_within(
    seconds: float,
    work: Callable[[], T],
    discard: Callable[[T], Any],
    find_mistake: Callable[[], Exception | None] | None = None,
) -> T:
    """Return what `work` returns, or raise what it raises; raise `JobTimeout` after `seconds`.
    Where it takes long, `find_mistake` looks meanwhile why; what it returns is raised.
    """
    job = BackgroundJob(work, discard)
    taken = False
    waited = 0.0
    try:
        job.start()
        if find_mistake is not None:
            waited = wait_seconds(seconds)
            if not job.wait(waited):
                job.explain(find_mistake)
        if not job.wait(seconds - waited):
            raise JobTimeout
        if job.failure is not None:
            raise job.failure
        taken = True
        return job.result
    finally:
        if not taken:  # too late, failed, or interrupted by a signal handler
            job.abandon()


class BackgroundJob(Generic[T]):
    """Work in a thread of its own, which may be waited for more than once: work that has no
    timeout, such as name look-ups, TLS, the whole start of a client.

    How it ended is a value (`failure`, `result`) and is not raised by `wait`. So an exception that
    `wait` raises came from a signal handler, and belongs to the application.

    The caller stops waiting for it when the time is over. A result that comes later is passed to
    `discard`.

      wanted, running     `wait` waits
      wanted, done        `result` or `failure` is set
      abandoned, running  `failure` is `JobAbandoned`; the result will be discarded
      abandoned, done     the result has been discarded
    """

    def __init__(self, work: Callable[[], T], discard: Callable[[T], Any]) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self.failure: Exception | None = None
        """The error that the work has raised, or that explains it, or `JobAbandoned`."""
        self._wanted = True
        self._started = False
        self._run_lock = threading.Lock()
        self._done = OneShotEvent()

    def start(self) -> None:
        """Start the work. Idempotent. The job has to be stored somewhere before: otherwise the
        result would be lost with a caller that is interrupted here.
        """
        if self._started:
            return
        if not start_thread(self._run):
            self._run()
        self._started = True

    def _run(self) -> None:
        # `start` starts a second thread if a signal handler raised before `_started` was set.
        if not self._run_lock.acquire(False):
            return
        failure: Exception | None = None
        try:
            with FORK_WAIT.connecting():
                self._results.append(self._work())
        except Exception as exc:
            failure = exc
            _forget_locals(exc)
        with self._lock:
            wanted = self._wanted
            if wanted:
                self.failure = failure
                self._done.set()
        if not wanted:
            self._discard_results()

    def explain(self, find_mistake: Callable[[], Exception | None]) -> None:
        """Call `find_mistake` in a thread. If it returns an error before the work has ended, the
        work ends as if it had raised that, and its result is discarded when it comes.
        """
        start_thread(self._explain, find_mistake)

    def _explain(self, find_mistake: Callable[[], Exception | None]) -> None:
        why = find_mistake()
        with self._lock:
            if why is not None and not self._done.is_set:
                self._wanted, self.failure = False, why
                self._done.set()

    def abandon(self) -> None:
        """Discard the result, now or when it comes, and end all waits."""
        with self._lock:
            self._wanted = False
            done = self._done.is_set
            if not done:
                self.failure = JobAbandoned("the limiter was closed")
                self._done.set()
        if done:
            self._discard_results()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True if the job has ended."""
        return self._done.wait(seconds)

    @property
    def has_ended(self) -> bool:
        """True if there is a result, or a failure."""
        return self._done.is_set

    @property
    def result(self) -> T:
        """The result of the work. Only after the job has ended without `failure`."""
        return self._results[0]

    def _discard_results(self) -> None:
        for result in self._results:
            self._discard(result)


class JobAbandoned(Exception):
    """The failure of a job that was abandoned while a caller waited for it."""


class JobTimeout(Exception):
    """The time is over. The work goes on, and its result will be discarded."""


def _forget_locals(exc: BaseException) -> None:
    """Destroy the local variables of the failed work here. In the waiting thread, a signal handler
    might raise inside a destructor, and Python drops what is raised there.
    """
    link: BaseException | None = exc
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


_RECV_BYTES = 65536


def make_transport(opened: Any, clock: Clock) -> Transport:
    """Return the transport over what `detach_socket` has returned. To be called in the thread that
    will use it, because gevent's polls belong to the thread in which they were made.

    A call of redis-py is mostly pool checkout, retries and wrappers; here one send, poll and recv.
    """
    if not isinstance(opened, socket.socket):
        return ClientTransport(opened)
    if isinstance(opened, ssl.SSLSocket):
        return TlsTransport(opened, clock)
    # Checked for each connection, because eventlet removes `select.poll` when it patches.
    if hasattr(select, "poll") and hasattr(socket, "MSG_DONTWAIT"):
        return PollTransport(opened, clock)
    return SelectTransport(opened, clock)


def detach_socket(connection: Any) -> Any:
    """Take the socket out of an open redis-py connection; return the connection if it has none.

    The destructors of redis-py are Python code, and Python drops what a signal handler raises in a
    destructor. The destructor of a socket is C code.
    """
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        return connection
    connection._sock = None
    # Both are in reference cycles through bound methods: without this, the garbage collector would
    # run their destructors later, in any thread.
    vars(connection._parser).clear()
    vars(connection).clear()
    return sock


def close_detached(opened: Any, opened_by: int) -> None:
    """Close what `detach_socket` has returned in process `opened_by`. No transport is made of it:
    that would change the mode of a socket which a forked child shares with its parent.
    """
    if isinstance(opened, socket.socket):
        _close(opened, opened_by)
    else:
        ClientTransport(opened).close()


class PollTransport:
    """A blocking socket (TCP or unix), a poll for the time left (a socket timeout costs a system
    call more), and a reader for the replies. It makes one exchange at a time, and none after a
    `NoReply`.
    """

    _flags = getattr(socket, "MSG_DONTWAIT", 0)
    _socket_timeout_s: float | None = None
    """The timeout of the socket, except while the rest of a frame is written."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._socket = sock
        self._process = os.getpid()
        self._monotonic = clock.monotonic
        self._reader = hiredis.Reader()
        self._poll = _readable_within(sock)
        sock.settimeout(self._socket_timeout_s)

    def is_unusable(self) -> bool:
        """True if the server has closed the connection, or has sent something without a request.
        Checked before a call, because a call that is sent into a closed connection has an unknown
        outcome, although it was surely not executed.
        """
        return bool(self._poll(0))

    def close(self) -> None:
        _close(self._socket, self._process)

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        """Send `frame`, and return the first reply to it."""
        sent = False  # it stays False if the first write fails, which then has sent nothing
        try:
            try:
                count = self._socket.send(frame, self._flags)
            except BlockingIOError:
                count = 0
            sent = True
            if count < len(frame):
                self._send_all(frame[count:], deadline)
            return self._receive_reply(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=sent, late=isinstance(exc, TimeoutError))

    def receive(self, deadline: float) -> RawReply:
        """Return the next reply."""
        raw: RawReply | Literal[False] = self._reader.gets()
        return self._receive_reply(deadline) if raw is False else raw

    def _receive_reply(self, deadline: float) -> RawReply:
        reader = self._reader
        while True:
            left = deadline - self._monotonic()
            if not self._poll(left * 1000 if left > 0 else 0):
                return NoReply("timeout", sent=True, late=True)
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            raw: RawReply | Literal[False] = reader.gets()
            if raw is not False:
                return raw

    def _send_all(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - self._monotonic()))
        self._socket.sendall(data)
        self._socket.settimeout(self._socket_timeout_s)


class SelectTransport(PollTransport):
    """A non-blocking socket, for platforms without a flag that makes a single call non-blocking."""

    _flags = 0
    _socket_timeout_s = 0.0

    def _receive_reply(self, deadline: float) -> RawReply:
        while True:
            try:
                return super()._receive_reply(deadline)
            except BlockingIOError:  # `select` may report a socket that has nothing to read
                continue


class TlsTransport(PollTransport):
    """TLS. One reply may need several reads, or none, so the socket itself has a timeout."""

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        try:  # a failing write may have sent a part of its record
            self._socket.settimeout(max(0.001, deadline - self._monotonic()))
            self._socket.sendall(frame)
            return self._receive_reply(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))

    def _receive_reply(self, deadline: float) -> RawReply:
        raw: RawReply | Literal[False] = False
        while raw is False:
            self._socket.settimeout(max(0.001, deadline - self._monotonic()))
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
            raw = self._reader.gets()
        return raw


class ClientTransport:
    """A connection over which redis-py itself sends and parses, for connection classes without a
    socket (fakeredis).
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def is_unusable(self) -> bool:
        return False

    def close(self) -> None:
        self._connection.disconnect()

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        try:
            self._connection.send_packed_command([frame], check_health=False)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)
        return self.receive(deadline)

    def receive(self, deadline: float) -> RawReply:
        try:
            reply: RawReply = self._connection.read_response(disable_decoding=True)
            return reply
        except ResponseError as exc:
            return restore_code(exc)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)


Transport: TypeAlias = "PollTransport | ClientTransport"


def _readable_within(sock: socket.socket) -> Callable[[float], object]:
    """A function that waits up to so many milliseconds for `sock` to be readable, and returns a
    true value if it is. `poll` costs less than `select`, and takes descriptors of any number.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll

    def readable(ms: float) -> bool:
        try:
            return bool(select.select((sock,), (), (), ms / 1000)[0])
        except ValueError as exc:  # "filedescriptor out of range"
            raise OSError(
                f"this platform has no select.poll, and select takes no descriptor as high as "
                f"{sock.fileno()}: close some files or connections of this process"
            ) from exc

    return readable


def _close(sock: socket.socket, opened_by: int) -> None:
    """Close `sock`, which process `opened_by` has opened."""
    if os.getpid() == opened_by:  # a forked child must not end the connection of its parent
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as exc:  # the other side may have closed it already
            if is_interruption(exc):
                raise
    sock.close()


def _no_reply(exc: Exception) -> NoReply:
    """The `NoReply` for an error of redis-py. redis-py replaces every OSError by an error of its
    own, also one that a signal handler has raised; that one is raised again here.
    """
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, OSError) and is_interruption(cause):
        raise cause
    return NoReply(exc, sent=True)
