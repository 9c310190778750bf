"""Several processes that call one store: started, noted, and ended in order."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.attack.children import Child, monotonic_ms
from tests.attack.harness import Violation

if TYPE_CHECKING:
    from typing_extensions import Self


class Callers:
    """`with Callers(rng, url, plan) as callers: callers.start("sync"); ...; callers.end()`.

    `plan` is what each process gets beside its name, its kind ("sync" or "async"), its seed and the
    folder of the logs: for the default `child` see `caller.py`.
    """

    def __init__(
        self,
        rng: random.Random,
        url: str,
        plan: dict[str, Any],
        child: str = "tests.faults.caller",
    ) -> None:
        self.rng = rng
        self.url = url
        self.folder = Path(tempfile.mkdtemp(prefix="distwindow-attack-"))
        self.notes: list[str] = []
        """The faults, each with its time."""
        self.clients: dict[str, Child] = {}
        self.killed: list[str] = []
        self._child, self._plan = child, plan
        self._names = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.__exit__()
        shutil.rmtree(self.folder)

    @property
    def alive(self) -> list[str]:
        """The processes that were not killed."""
        return [name for name in self.clients if name not in self.killed]

    def note(self, what: str) -> None:
        """Note what is done now, for the history of a violation."""
        self.notes.append(f"{monotonic_ms()} {what}")

    def start(self, kind: str, **more: Any) -> None:
        """Start a process; `more` is added to its plan."""
        name = f"p{next(self._names)}"
        identity = {
            "url": self.url, "folder": str(self.folder), "name": name, "kind": kind,
            "threads": self.rng.randint(2, 3), "seed": self.rng.randrange(10**9),
        }  # fmt: skip
        self.clients[name] = Child(self._child, self._plan | identity | more)

    def send_order(self, name: str, order: bytes) -> None:
        pipe = self.clients[name].process.stdin
        assert pipe is not None
        pipe.write(order)
        pipe.flush()

    def end(self) -> None:
        """Have all processes flush their counts and end."""
        for name in self.alive:
            self.send_order(name, b"end\n")
        for name in self.alive:
            code = self.clients[name].wait(25)
            if code != 0:
                stderr = self.clients[name].stderr()[-4000:]
                raise Violation(
                    f"{self._child}: {name} ended with {code}", [*self.notes[-15:], stderr]
                )
