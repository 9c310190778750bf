"""Processes that share a server over a link with random faults, and are frozen, killed and forked.

Several scenarios use it: each has clients of its own (a module of this package that reads its plan,
takes the orders `fork` and `end` from stdin, and writes a log), and checks of its own.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.attack.children import monotonic_ms
from tests.faults.callers import Callers
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


class FaultyFleet(Callers):
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
        self.server = server
        self.proxy = Proxy(server.port)
        super().__init__(rng, "", plan, child)
        self.froze: set[str] = set()
        """Clients that have been frozen at some time."""
        self._frozen: dict[str, float] = {}
        self.causes: dict[str, Callable[[], None]] = {
            "link": self._disturb_link, "stall": self._stall, "scripts": self._flush_scripts,
            "freeze": self._freeze, "kill": self._kill, "fork": self._fork, "reset": self._reset,
            "none": lambda: time.sleep(0.1),
        }  # fmt: skip
        self._kinds = list(faults)
        self._weights = list(faults.values())

    def __enter__(self) -> Self:
        self.proxy.start()
        self.url = self.proxy.url
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.proxy.stop()

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
            self.start(kind)
        stop = time.monotonic() + seconds
        time.sleep(0.4)  # the clients start to call
        while time.monotonic() < stop:
            self.resume_clients()
            self.causes[self.rng.choices(self._kinds, self._weights)[0]]()
            between()
            time.sleep(self.rng.uniform(0.0, 0.25))  # a moment without a fault
        self.end()

    def end_faults(self) -> int:
        """End all faults that last. Return when, ms of CLOCK_MONOTONIC."""
        self.proxy.fault = Pass()
        self.server.resume()
        self.resume_clients(every=True)
        return monotonic_ms()

    def end(self) -> None:
        self.end_faults()
        time.sleep(1.0)  # forked children end by themselves
        super().end()

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

    def resume_clients(self, *, every: bool = False) -> None:
        """Continue the clients that were frozen for long enough."""
        for name, until in list(self._frozen.items()):
            if every or time.monotonic() >= until:
                self.clients[name].signal(signal.SIGCONT)
                del self._frozen[name]

    def _kill(self) -> None:
        if len(self.killed) == MAX_KILLED:
            return
        name = self.rng.choice(self.alive)
        self.note(f"{name} killed")
        self.clients[name].signal(signal.SIGKILL)
        self.killed.append(name)
        self.start(self.clients[name].plan["kind"])

    def _fork(self) -> None:
        name = self.rng.choice(self.alive)
        if self.clients[name].plan["kind"] == "sync":
            self.note(f"{name} forks")
            self.send_order(name, b"fork\n")

    def _reset(self) -> None:
        self.note("all connections reset")
        self.proxy.cut()
