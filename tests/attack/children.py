"""Child processes of the attacks: started with a plan in JSON, ended by their own pid.

A child prints JSON lines. One that hangs is given to `faulthandler`, whose stacks go into the
violation, and killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tests.attack.frame import ROOT, Violation

if TYPE_CHECKING:
    from typing_extensions import Self

HUNG = 3
"""The exit code of a child whose own watch found that it hangs."""


class Child:
    """`python -m tests.attack.NAME PLAN`, a process group of its own."""

    def __init__(self, name: str, plan: dict[str, Any]) -> None:
        self.name = name
        self.plan = plan
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with the child
        self._complaints = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.attack.{name}", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._complaints,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            # Ctrl-C in the terminal is for the attacker, which ends its children in order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> list[dict[str, Any]]:
        """The JSON lines that are complete."""
        self._said.seek(0)
        lines = self._said.read().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line[-1] == "\n"]

    def complaints(self) -> str:
        """What it said on stderr."""
        self._complaints.seek(0)
        return self._complaints.read()

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def ended(self, seconds: float) -> int:
        """Its exit code; a violation with its stacks when it does not end within `seconds`."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            # `watched` has registered SIGQUIT: all threads are printed, whatever holds which lock.
            self.signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            stacks = self.complaints()
            self.kill()
            raise Violation(
                f"{self.name} did not end within {seconds:g} s",
                [f"plan {json.dumps(self.plan)}", *self.said()[-3:], stacks[-6000:]],
            ) from None
        if code == HUNG:
            raise Violation(
                f"{self.name}: a thread hangs",
                [f"plan {json.dumps(self.plan)}", *self.said()[-3:], self.complaints()[-6000:]],
            )
        return code

    def kill(self) -> None:
        """End it and whatever it has started, which is its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self._said.close()
        self._complaints.close()


def watched() -> None:
    """In the child: print all stacks at SIGQUIT, then die of it. SIGINT is as a shell has it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)


def alive_for(seconds: float) -> None:
    """In the child: unless this is called again within `seconds`, print all stacks and die."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def plan() -> dict[str, Any]:
    """In the child: what it is to do."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def say(**facts: Any) -> None:
    """In the child: one JSON line, at once."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def monotonic_ms() -> int:
    """CLOCK_MONOTONIC, which all processes of a machine share."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000_000
