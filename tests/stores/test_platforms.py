"""Platforms without the system calls of the fastest exchange: Windows has neither `select.poll` nor
`MSG_DONTWAIT`, and eventlet removes `select.poll`. Each test runs a process of its own.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow.ring.clock import SYSTEM
from distwindow.stores.redis.connections import SelectTransport, detach_socket, make_transport
from distwindow.stores.redis.outcome import NoReply
from tests.harness import admin, used
from tests.programs import printed, run_python
from tests.servers import Delay, Proxy, Standalone

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

WHERE = [("redis", "direct"), ("redis", "leased"), ("redis", "eventual"), ("tls", "direct")]

WITHOUT = """
import select, socket, sys

for name in ("poll", "epoll", "devpoll", "kqueue"):
    if hasattr(select, name):
        delattr(select, name)
for name in [name for name in vars(socket) if name.startswith("MSG_")]:
    delattr(socket, name)
"""

CALLS = """
import threading
from distwindow import Limiter

url, prefix, mode = sys.argv[1:]
limiter = Limiter(url, "100000/hour", prefix=prefix, consistency=mode, timeout=10)

def some():
    for _ in range(20):
        assert limiter.try_acquire("k")

threads = [threading.Thread(target=some) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with limiter.entry("k"):
    pass
limiter.flush()
assert limiter.stats("k").success == 1
limiter.close()
print("done")
"""

EVENTLET = """
import sys
import time
import eventlet
eventlet.monkey_patch()
import select
assert not hasattr(select, "poll")
from distwindow import Limiter

url, prefix, mode = sys.argv[1:]
turns = 0

def others():
    global turns
    while True:
        turns += 1
        eventlet.sleep(0)

eventlet.spawn(others)
limiter = Limiter(url, "100000/hour", prefix=prefix, consistency=mode, timeout=10)
pool = eventlet.GreenPool(8)
assert all(pool.imap(lambda _: limiter.try_acquire("k"), range(80)))
before = turns
ends = time.monotonic() + 20
while turns == before and time.monotonic() < ends:  # a reply that is there at once is no wait
    limiter.stats("k")
assert turns > before, "a call stops all green threads"
with limiter.entry("k"):
    pass
limiter.flush()
assert limiter.stats("k").success == 1
limiter.close()
print("done")
"""


def run(program: str, *args: str) -> None:
    assert printed("-W", "ignore", "-c", program, *args) == "done\n"


@pytest.mark.parametrize(("server", "mode"), WHERE)
def test_calls_work_without_poll(
    request: pytest.FixtureRequest, server: str, prefix: str, mode: str
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    run(WITHOUT + CALLS, url, prefix, mode)
    with admin(url) as client:
        assert used(client, prefix, "k") == 81


@pytest.mark.parametrize("missing", [(select, "poll"), (socket, "MSG_DONTWAIT")])
def test_frames_that_a_socket_does_not_take_at_once(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[Any, str]
) -> None:
    """The rest is written as the other side reads. If that is too slow, the call ends by its
    deadline.
    """
    monkeypatch.delattr(*missing)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = b"x" * 4_000_000

        def answer() -> None:
            left = len(frame)
            while left:
                left -= len(theirs.recv(65_536))
            theirs.sendall(b"+OK\r\n")

        connection = SimpleNamespace(_sock=ours, _parser=SimpleNamespace())  # of redis-py
        transport = make_transport(detach_socket(connection), SYSTEM)
        assert type(transport) is SelectTransport
        thread = threading.Thread(target=answer)
        thread.start()
        assert transport.round_trip(frame, SYSTEM.monotonic() + 20) == b"OK"
        thread.join()
        assert not transport.is_unusable()
        no_reply = transport.round_trip(frame, SYSTEM.monotonic() + 0.05)
        assert isinstance(no_reply, NoReply)
        assert (no_reply.sent, no_reply.late) == (True, True)
        theirs.close()
        assert transport.is_unusable()


def test_a_reply_that_does_not_come_ends_the_call(standalone: Standalone, prefix: str) -> None:
    program = """
from distwindow import Limiter, StoreTimeout
url, prefix = sys.argv[1:]
limiter = Limiter(url, "100000/hour", prefix=prefix, timeout=0.1)
charged = False
while charged is False:  # as long as it has not been sent
    try:
        limiter.try_acquire("k")
    except StoreTimeout as exc:
        charged = exc.charged
assert charged is None, charged
print("done")
"""
    with Proxy(standalone.port) as proxy:
        proxy.fault = Delay(only=b"EVALSHA", replies=1.0)
        run(WITHOUT + program, proxy.url, prefix)


def test_without_poll_high_descriptors_are_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(select, "poll")
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=os.dup2(ours.fileno(), 1030))
    with ours, theirs, high:
        with pytest.raises(OSError, match="and select takes no descriptor as high as 1030"):
            SelectTransport(high, SYSTEM).is_unusable()


def test_eventlet_that_patches_too_late() -> None:
    """Waiting is then done by a queue in C, which blocks the whole process."""
    run(
        """
import distwindow, eventlet
eventlet.monkey_patch()
try:
    distwindow.Limiter("redis://localhost", "1/s")
except distwindow.ConfigurationError as exc:
    assert "call it before the first import of distwindow" in str(exc), exc
    print("done")
"""
    )


@pytest.mark.parametrize(("server", "mode"), WHERE)
def test_calls_work_under_eventlet(
    request: pytest.FixtureRequest, server: str, prefix: str, mode: str
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    run(EVENTLET, url, prefix, mode)
    with admin(url) as client:
        assert used(client, prefix, "k") == 81


def test_without_hiredis_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['hiredis'] = None; import distwindow"
    done = run_python("-c", program)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "with hiredis, which is not installed: pip install 'redis[hiredis]'"
    )
