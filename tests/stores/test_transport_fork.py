"""Forks: parent and child both keep calling, each over its own connections."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter
from distwindow.stores.redis.connections import close_detached
from tests.event_loops import program_header
from tests.harness import PLENTY, Call, admin, count_outcomes, timed, used
from tests.programs import run_python
from tests.servers import Cluster

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    # Python 3.12 warns of forks in a process with threads, which is what is tested here.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Child:
    """A forked child that runs `work` and sends its result back as JSON."""

    def __init__(self, work: Callable[[Child], Any]) -> None:
        result, self._result = os.pipe()
        going, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._going = going
            try:
                output = json.dumps(work(self))
            except BaseException:  # the child must not return into pytest, whatever is raised
                output = json.dumps({"error": traceback.format_exc()})
            os.write(self._result, output.encode())
            os._exit(0)
        os.close(self._result)
        os.close(going)
        self._result = result

    def ready(self) -> None:
        """Called by the child: report that it is ready, and wait for `go_on` of the parent."""
        os.write(self._result, b"!")
        os.read(self._going, 1)

    def await_ready(self) -> None:
        assert select.select([self._result], [], [], 20)[0], "the child is stuck"
        assert os.read(self._result, 1) == b"!"

    def go_on(self) -> None:
        os.write(self._go, b"!")

    def result(self) -> Any:
        output = b""
        while select.select([self._result], [], [], 20)[0]:
            more = os.read(self._result, 65_536)
            if not more:
                break
            output += more
        else:
            os.kill(self.pid, 9)
            pytest.fail("the child is stuck")
        os.waitpid(self.pid, 0)
        os.close(self._result)
        os.close(self._go)
        value = json.loads(output)
        assert not (isinstance(value, dict) and "error" in value), value["error"]
        return value


def named(server: Any, name: str) -> set[str]:
    return {client["id"] for client in server.client_list() if client["name"] == name}


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.compat
def test_parent_and_child_go_on_over_their_own_connections(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5)
    for _ in range(3):
        limiter.try_acquire("k")

    def work(child: Child) -> int:
        limiter.try_acquire("k")
        child.ready()
        return sum(bool(limiter.try_acquire("k")) for _ in range(50))

    with admin(redis_url) as server:
        before = named(server, prefix)
        child = Child(work)
        child.await_ready()
        both = named(server, prefix)
        assert before < both
        assert len(both) == 2
        child.go_on()
        assert all(limiter.try_acquire("k") for _ in range(50))
        assert child.result() == 50
        assert limiter.try_acquire("k")
        assert used(server, prefix) == 3 + 1 + 50 + 50 + 1
        assert named(server, prefix) == before
    limiter.close()


def test_a_connection_that_was_just_opened_is_its_parents() -> None:
    """A thread of the parent has opened it, and no call has used it yet, when the child discards
    it: a shutdown in the child would end it for both.
    """
    ours, servers = socket.socketpair()
    with ours, servers:
        ours.settimeout(5)
        parent = os.getpid()

        def discard(child: Child) -> bool:
            close_detached(ours, parent)
            return True

        assert Child(discard).result()
        servers.sendall(b"+OK")
        assert not os.get_blocking(ours.fileno()), "the child has changed the mode of the socket"
        assert ours.recv(3) == b"+OK"
        close_detached(ours, parent)
        assert servers.recv(1) == b""


@pytest.mark.slow
@pytest.mark.compat
def test_forks_while_other_threads_call(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5)
    limiter.try_acquire("k")
    stop = threading.Event()
    calls: list[Call] = []

    def busy() -> None:
        while not stop.is_set():
            calls.append(timed("k", lambda: limiter.try_acquire("k")))

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()

    def work(child: Child) -> int:
        return sum(bool(limiter.try_acquire("k")) for _ in range(20))

    try:
        assert [Child(work).result() for _ in range(8)] == [20] * 8
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert set(count_outcomes(calls)) == {"ok"}
    with admin(redis_url) as server:
        assert used(server, prefix) == 1 + len(calls) + 8 * 20
    limiter.close()


def test_a_child_of_multiprocessing(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, timeout=5)
    limiter.try_acquire("k")
    context = multiprocessing.get_context("fork")
    counts = context.Queue()

    def work() -> None:
        counts.put(sum(bool(limiter.try_acquire("k")) for _ in range(20)))

    children = [context.Process(target=work) for _ in range(3)]
    for child in children:
        child.start()
    assert [counts.get(timeout=20) for _ in children] == [20] * 3
    for child in children:
        child.join(20)
    assert limiter.try_acquire("k")
    with admin(redis_url) as server:
        assert used(server, prefix) == 62
    limiter.close()


def test_in_a_cluster(cluster: Cluster, cluster_url: str, prefix: str) -> None:
    limiter = Limiter(cluster_url, PLENTY, prefix=prefix, timeout=5)
    keys = [f"k{i}" for i in range(20)]
    for key in keys:
        limiter.try_acquire(key)

    def work(child: Child) -> int:
        return sum(bool(limiter.try_acquire(key)) for key in keys)

    child = Child(work)
    assert all(limiter.try_acquire(key) for key in keys)
    assert child.result() == 20
    assert all(limiter.try_acquire(key) for key in keys)
    with cluster.client() as server:
        assert used(server, prefix) == 80
    limiter.close()


def test_a_close_in_the_child_does_not_affect_the_parent(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, timeout=5)
    limiter.try_acquire("k")

    def work(child: Child) -> bool:
        limiter.close()
        gc.collect()
        return True

    assert Child(work).result()
    assert limiter.try_acquire("k")
    limiter.close()


# -- tasks ----------------------------------------------------------------------------------------


@pytest.mark.compat
async def test_parent_and_child_of_a_running_loop_go_on(redis_url: str, prefix: str) -> None:
    """The child shares a selector with its parent, and must not change it."""
    async with AsyncLimiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5) as limiter:
        await limiter.try_acquire("k")

        async def some() -> int:
            return sum([bool(await limiter.try_acquire("k")) for _ in range(20)])

        def work(child: Child) -> int:
            async def both() -> int:
                done = await some()
                child.ready()
                return done + await some()

            done = asyncio.run(both())
            gc.collect()
            return done

        with admin(redis_url) as server:
            before = named(server, prefix)
            child = Child(work)
            await asyncio.to_thread(child.await_ready)
            assert await some() == 20
            both = named(server, prefix)
            assert before < both
            assert len(both) == 2
            child.go_on()
            assert await asyncio.to_thread(child.result) == 40
            assert await some() == 20
            assert used(server, prefix) == 1 + 40 + 40
            assert named(server, prefix) == before


@pytest.mark.event_loops
def test_a_child_that_drops_the_parents_loop_does_not_disconnect_the_parent(
    redis_url: str, prefix: str
) -> None:
    """If the child closed an inherited connection, it would remove it from the selector that both
    share.
    """
    limiter = AsyncLimiter(redis_url, PLENTY, prefix=prefix, timeout=10)
    loops = [asyncio.new_event_loop()]

    async def acquire() -> bool:
        return bool(await limiter.try_acquire("k"))

    def work(child: Child) -> bool:
        loops.clear()
        gc.collect()
        return True

    assert loops[0].run_until_complete(acquire())
    for _ in range(3):
        assert Child(work).result()
        assert loops[0].run_until_complete(acquire())
    loops[0].run_until_complete(limiter.aclose())
    loops[0].close()


PROGRAM = """
import asyncio, os, sys
from distwindow import AsyncLimiter, Limiter
from distwindow.stores.redis.connections import close_detached

url, prefix = sys.argv[1:]
blocking = Limiter(url, "1000/hour", prefix=prefix, timeout=5)
assert blocking.try_acquire("k")

async def parent(limiter):
    assert await limiter.try_acquire("k")
    pid = os.fork()
    if pid == 0:
        return 0
    os.waitpid(pid, 0)  # the child has ended as programs end: everything of its is taken apart
    for _ in range(5):
        assert await limiter.try_acquire("k")
        assert blocking.try_acquire("k")
    await limiter.aclose()
    blocking.close()
    print("parent continued")
    return pid

asyncio.run(parent(AsyncLimiter(url, "1000/hour", prefix=prefix, timeout=5)))
"""


@pytest.mark.event_loops
@pytest.mark.slow
def test_a_child_that_exits_normally_does_not_affect_the_parent(
    redis_url: str, prefix: str
) -> None:
    ran = run_python("-W", "ignore", "-c", program_header() + PROGRAM, redis_url, prefix)
    assert ran.stdout == "parent continued\n", ran.stderr
    with admin(redis_url) as server:
        assert used(server, prefix) == 2 + 10
