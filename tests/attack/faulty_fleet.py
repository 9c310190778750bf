"""Processes that share a server over a link with random faults, and are frozen, killed and forked.

Several scenarios use it: each has clients of its own (a module of this package that reads its plan,
takes the orders `fork` and `end` from stdin, and writes a log), and checks of its own.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.attack.children import Child, monotonic_ms
from tests.attack.harness import Violation
from tests.servers import (
    Blackhole,
    Delay,
    DropReply,
    Fault,
    Pass,
    Proxy,
    Refuse,
    ResetAfterSend,
    ResetBeforeSend,
    Standalone,
    Trickle,
)

if TYPE_CHECKING:
    from typing_extensions import Self

ALL_FAULTS: Mapping[str, float] = {
    "link": 0.62, "stall": 0.08, "scripts": 0.06, "freeze": 0.08, "kill": 0.04, "fork": 0.08,
    "reset": 0.04,
}  # fmt: skip
"""The kinds of faults, and how often each is drawn."""

PROCESS_FAULTS: Mapping[str, float] = {"none": 0.5, "freeze": 0.2, "kill": 0.1, "fork": 0.2}
"""Faults of the clients alone: the link and the server are sound."""

MAX_KILLED = 3


class FaultyFleet:
    """One fleet. `child`: the module of its clients. `plan`: what they get beside their name, their
    kind ("sync" or "async") and the folder of their logs. `faults`: as `ALL_FAULTS`.
    """

    def __init__(
        self,
        rng: random.Random,
        server: Standalone,
        child: str,
        plan: dict[str, Any],
        faults: Mapping[str, float] = ALL_FAULTS,
    ) -> None:
        self.rng = rng
        self.server = server
        self.proxy = Proxy(server.port)
        self.folder = Path(tempfile.mkdtemp(prefix="distwindow-attack-"))
        self.notes: list[str] = []
        """The faults, each with its time."""
        self.clients: dict[str, Child] = {}
        self.killed: list[str] = []
        self.froze: set[str] = set()
        """Clients that have been frozen at some time."""
        self._child, self._plan = child, plan
        self._frozen: dict[str, float] = {}
        self._names = itertools.count()
        self._causes: dict[str, Callable[[], None]] = {
            "link": self._disturb_link, "stall": self._stall, "scripts": self._flush_scripts,
            "freeze": self._freeze, "kill": self._kill, "fork": self._fork, "reset": self._reset,
            "none": lambda: time.sleep(0.1),
        }  # fmt: skip
        self._kinds = list(faults)
        self._weights = list(faults.values())

    def __enter__(self) -> Self:
        self.proxy.start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.__exit__()
        self.proxy.stop()
        shutil.rmtree(self.folder)

    def run_for(
        self,
        seconds: float,
        kinds: Sequence[str],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a client of each kind, cause one fault after the other, and have all clients flush
        their counts and end. `between` is called after each fault.
        """
        for kind in kinds:
            self._start(kind)
        stop = time.monotonic() + seconds
        time.sleep(0.4)  # the clients start to call
        while time.monotonic() < stop:
            self._resume(False)
            self._causes[self.rng.choices(self._kinds, self._weights)[0]]()
            between()
            time.sleep(self.rng.uniform(0.0, 0.25))  # a moment without a fault
        self._end()

    @property
    def alive(self) -> list[str]:
        """The clients that were not killed."""
        return [name for name in self.clients if name not in self.killed]

    def note(self, what: str) -> None:
        """Note what is done now, for the history of a violation."""
        self.notes.append(f"{monotonic_ms()} {what}")

    def _start(self, kind: str) -> None:
        name = f"p{next(self._names)}"
        identity = {
            "url": self.proxy.url, "folder": str(self.folder), "name": name, "kind": kind,
            "threads": self.rng.randint(2, 3), "seed": self.rng.randrange(10**9),
        }  # fmt: skip
        self.clients[name] = Child(self._child, self._plan | identity)

    # -- faults --

    def _disturb_link(self) -> None:
        self.proxy.fault = fault = self._link_fault()
        self.note(repr(fault))
        time.sleep(self.rng.uniform(0.02, 0.4))
        self.proxy.fault = Pass()

    def _link_fault(self) -> Fault:
        rng = self.rng
        options: dict[str, Any] = {"only": rng.choice([None, b"EVALSHA"])}
        options["times"] = rng.choice([None, 1, 3])
        return rng.choice(
            [
                Delay(requests=rng.uniform(0, 0.05), replies=rng.uniform(0, 0.05)),
                Delay(requests=0.0, replies=rng.uniform(0.2, 0.9), **options),
                DropReply(close=rng.random() < 0.5, **options),
                ResetBeforeSend(**options),
                ResetAfterSend(**options),
                Blackhole(**options),
                Refuse(),
                Trickle(),
            ]
        )

    def _stall(self) -> None:
        stalled = self.rng.choice([0.1, 0.4, 1.2])
        self.note(f"server frozen for {stalled} s")
        self.server.pause()
        time.sleep(stalled)
        self.server.resume()

    def _flush_scripts(self) -> None:
        self.note("SCRIPT FLUSH")
        with self.server.client() as client:
            client.script_flush()

    def _freeze(self) -> None:
        name, seconds = self.rng.choice(self.alive), self.rng.choice([0.15, 0.5, 2.0])
        self.note(f"{name} frozen for {seconds} s")
        self.froze.add(name)
        self.clients[name].signal(signal.SIGSTOP)
        self._frozen[name] = time.monotonic() + seconds

    def _resume(self, all_clients: bool) -> None:
        for name, until in list(self._frozen.items()):
            if all_clients or time.monotonic() >= until:
                self.clients[name].signal(signal.SIGCONT)
                del self._frozen[name]

    def _kill(self) -> None:
        if len(self.killed) == MAX_KILLED:
            return
        name = self.rng.choice(self.alive)
        self.note(f"{name} killed")
        self.clients[name].signal(signal.SIGKILL)
        self.killed.append(name)
        self._start(self.clients[name].plan["kind"])

    def _fork(self) -> None:
        name = self.rng.choice(self.alive)
        if self.clients[name].plan["kind"] == "sync":
            self.note(f"{name} forks")
            self._send_order(name, b"fork\n")

    def _reset(self) -> None:
        self.note("all connections reset")
        self.proxy.cut()

    # -- the end --

    def _send_order(self, name: str, order: bytes) -> None:
        pipe = self.clients[name].process.stdin
        assert pipe is not None
        pipe.write(order)
        pipe.flush()

    def _end(self) -> None:
        self.proxy.fault = Pass()
        self.server.resume()
        self._resume(True)
        time.sleep(1.0)  # forked children end by themselves
        for name in self.alive:
            self._send_order(name, b"end\n")
        for name in self.alive:
            code = self.clients[name].wait(25)
            if code != 0:
                stderr = self.clients[name].stderr()[-4000:]
                raise Violation(
                    f"{self._child}: {name} ended with {code}", [*self.notes[-15:], stderr]
                )
