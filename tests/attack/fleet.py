"""Processes that share a server, over a link with random faults, and are frozen, killed and forked.

A scenario gives the clients: a module of this package, which runs a `Client` (`client.py`) when it
is started as a program. `attacked` plays one fleet, `play_fleets` one after the other.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.attack.children import Child, now_ms
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.history import History, read_history
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
    until,
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


class Fleet:
    """Processes that are started, disturbed, noted, and ended in order.

    `client`: the module of its clients. `plan`: what they get beside their name, their kind ("sync"
    or "async"), their seed, the URL and the folder of their logs. `store`: a URL, or a server,
    which they then reach over a link with faults.
    """

    def __init__(
        self, rng: random.Random, store: str | Standalone, client: str, plan: dict[str, Any]
    ) -> None:
        self.rng = rng
        self.folder = Path(tempfile.mkdtemp(prefix="distwindow-attack-"))
        self.notes: list[str] = []
        """The faults, each with its time."""
        self.clients: dict[str, Child] = {}
        self.killed: list[str] = []
        self.froze: set[str] = set()
        """Clients that have been frozen at some time."""
        self._client, self.plan = client, plan
        self._names = itertools.count()
        self._frozen: dict[str, float] = {}
        self.url = store if isinstance(store, str) else ""
        self._store = store
        self.causes: dict[str, Callable[[], None]] = {
            "link": self._disturb_link, "stall": self._stall, "scripts": self._flush_scripts,
            "freeze": self._freeze, "kill": self._replace, "fork": self._fork, "reset": self._reset,
            "none": lambda: time.sleep(0.1),
        }  # fmt: skip

    @property
    def server(self) -> Standalone:
        assert isinstance(self._store, Standalone)
        return self._store

    def __enter__(self) -> Self:
        if isinstance(self._store, Standalone):
            self.proxy = Proxy(self._store.port).start()
            self.url = self.proxy.url
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.__exit__()
        shutil.rmtree(self.folder)
        if isinstance(self._store, Standalone):
            self.proxy.stop()

    @property
    def alive(self) -> list[str]:
        """The processes that were not killed."""
        return [name for name in self.clients if name not in self.killed]

    def note(self, what: str) -> None:
        """Note what is done now, for the history of a violation."""
        self.notes.append(f"{now_ms():.0f} {what}")

    def start(self, kind: str, **more: Any) -> None:
        """Start a process; `more` is added to its plan, and may have another name for it."""
        name = more.get("name", f"p{next(self._names)}")
        identity = {
            "url": self.url, "folder": str(self.folder), "name": name, "kind": kind,
            "threads": self.rng.randint(2, 3), "seed": self.rng.randrange(10**9),
        }  # fmt: skip
        self.clients[name] = Child(self._client, self.plan | identity | more)

    def await_calls(self) -> None:
        """Wait until each process has called."""
        logs = [self.folder / name for name in self.alive]
        until(lambda: all(b'"window"' in log.read_bytes() for log in logs), 60, what="calls of all")

    def run_for(
        self,
        seconds: float,
        kinds: Sequence[str],
        faults: Mapping[str, float],
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
            self.causes[self.rng.choices(list(faults), list(faults.values()))[0]]()
            between()
            time.sleep(self.rng.uniform(0.0, 0.25))  # a moment without a fault
        self.end_faults()
        time.sleep(1.0)  # forked children end by themselves
        self.end()

    def end_faults(self) -> float:
        """End all faults that last. Return when, ms of CLOCK_MONOTONIC."""
        self.proxy.fault = Pass()
        self.server.resume()
        self.resume_clients(every=True)
        return now_ms()

    def end(self) -> None:
        """Have all processes flush their counts and end."""
        for name in self.alive:
            self._order(name, b"end\n")
        for name in self.alive:
            code = self.clients[name].wait(25)
            if code != 0:
                stderr = self.clients[name].stderr()[-4000:]
                raise Violation(
                    f"{self._client}: {name} ended with {code}", [*self.notes[-15:], stderr]
                )

    def _order(self, name: str, order: bytes) -> None:
        pipe = self.clients[name].process.stdin
        assert pipe is not None
        pipe.write(order)
        pipe.flush()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Add to a violation `what` was played, and the last faults before it."""
        try:
            yield
        except Violation as violation:
            raise Violation(
                f"{what}: {violation.what}", [*self.notes[-20:], *violation.history[-20:]]
            ) from None

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
        for name, ends_at in list(self._frozen.items()):
            if every or time.monotonic() >= ends_at:
                self.clients[name].signal(signal.SIGCONT)
                del self._frozen[name]

    def kill(self, name: str) -> None:
        self.note(f"{name} killed")
        self.clients[name].signal(signal.SIGKILL)
        self.killed.append(name)

    def _replace(self) -> None:
        if len(self.killed) < MAX_KILLED:
            self.kill(name := self.rng.choice(self.alive))
            self.start(self.clients[name].plan["kind"])

    def _fork(self) -> None:
        name = self.rng.choice(self.alive)
        if self.clients[name].plan["kind"] == "sync":
            self.note(f"{name} forks")
            self._order(name, b"fork\n")

    def _reset(self) -> None:
        self.note("all connections reset")
        self.proxy.cut()


@contextmanager
def attacked(
    run: Run,
    rng: random.Random,
    server: Standalone,
    client: str,
    plan: dict[str, Any],
    seconds: float,
    faults: Mapping[str, float] = ALL_FAULTS,
    between: Callable[[Fleet], None] = lambda fleet: None,
    kinds: Sequence[str] = (),
) -> Iterator[tuple[Fleet, History]]:
    """Play one fleet of two or three clients, or of these `kinds`, and yield it with its history,
    which is then checked.
    """
    with Fleet(rng, server, client, plan) as fleet:
        kinds = kinds or kinds_of(rng)
        fleet.run_for(seconds, kinds, faults, lambda: between(fleet))
        with fleet.explained(f"{client}, plan {plan}"):
            yield fleet, read_history(fleet.folder, run)


def kinds_of(rng: random.Random) -> list[str]:
    return ["sync", "async", "sync"][: rng.randint(2, 3)]


def play_fleets(
    run: Run,
    name: str,
    variants: Sequence[str],
    play: Callable[[Run, random.Random, Standalone, str, float], None],
    *,
    least_s: float = 2.0,
    most_s: float = 8.0,
    end_s: float = 2.0,
) -> None:
    """Play one fleet after the other, each on a server of its own: of the variant `run.only`, or of
    one drawn by the seed. Each runs for `least_s` to `most_s`, and takes some `end_s` to end.
    """
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < least_s + end_s:
            return
        rng = random.Random(derive_seed(run.seed, name, turn))
        variant = run.only or rng.choice(variants)
        with Standalone() as server:
            play(run, rng, server, variant, min(most_s, max(least_s, left - end_s)))
        run.count("fleets")


def called(
    url: str,
    windows: Mapping[str, dict[str, Any]],
    calls: Mapping[str, Any],
    seconds: float,
    kinds: Sequence[str],
    *,
    threads: int,
    pause_s: float = 0.001,
    kill: int = 0,
) -> History:
    """Return what clients of limiters have called in so many seconds, with nothing that disturbs
    them but that the first `kill` of them are killed. `windows`: the arguments of the limiters, by
    name; `calls`: what is common to the calls of all of them, as in `caller.py`.
    """
    plan = {
        "windows": {
            name: {"timeout": 30, "consistency": "direct", **window}
            for name, window in windows.items()
        },
        "calls": [
            {"window": name, "weight": 1, "keys": ["k"], "costs": [1], **calls} for name in windows
        ],
        "pause_s": pause_s,
    }
    with Fleet(random.Random(1), url, "caller", plan) as fleet:
        for kind in kinds:
            fleet.start(kind, threads=threads)
        fleet.await_calls()
        time.sleep(seconds / 2)
        for name in fleet.alive[:kill]:
            fleet.kill(name)
        time.sleep(seconds / 2)
        fleet.end()
        return read_history(fleet.folder)
