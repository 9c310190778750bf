"""Child processes of the attacks: started with a plan in JSON, ended by their own pid.

A child reports in JSON lines. If it hangs, `faulthandler` prints the stacks of its threads, which
become part of the violation, and it is killed.
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

from tests.attack.harness import ROOT, Violation

if TYPE_CHECKING:
    from typing_extensions import Self

HUNG = 3
"""The exit code of a child that has found out itself that it hangs."""


RUN_INSTALLED = f"""import runpy, sys
sys.path.append({str(ROOT)!r})
runpy.run_module("tests.attack." + sys.argv.pop(1), run_name="__main__", alter_sys=True)"""
"""Runs a child with the distwindow that its Python has installed, not with that of the checkout."""


class Child:
    """`python -m tests.attack.NAME PLAN`, in a process group of its own. If the plan has a
    `python`, it is that of another environment, with the distwindow that is installed there.
    """

    def __init__(self, name: str, plan: dict[str, Any]) -> None:
        self.name = name
        self.plan = plan
        self._stdout = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with the child
        command = [sys.executable, "-m", f"tests.attack.{name}"]
        if "python" in plan:
            # Isolated, as otherwise the folder and PYTHONPATH would come before what is installed.
            command = [plan["python"], "-I", "-c", RUN_INSTALLED, name]
        # Closed with the child, so not in a `with`.
        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(
            [*command, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=self._stdout,
            stderr=self._stderr,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            # Ctrl-C in the terminal interrupts the parent only, which ends its children in order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def reports(self) -> list[dict[str, Any]]:
        """Return the complete JSON lines of its stdout."""
        self._stdout.seek(0)
        lines = self._stdout.read().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line[-1] == "\n"]

    def stderr(self) -> str:
        """Return its stderr."""
        self._stderr.seek(0)
        return self._stderr.read()

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code; raise `Violation`, with the stacks of its
        threads, if it does not end within `seconds`.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            # `dump_stacks_on_sigquit` has registered SIGQUIT, so the stacks of all threads are
            # printed, whatever locks they hold.
            self.signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            stacks = self.stderr()
            self.kill()
            raise Violation(
                f"{self.name} did not end within {seconds:g} s",
                [f"plan {json.dumps(self.plan)}", *self.reports()[-3:], stacks[-6000:]],
            ) from None
        if code == HUNG:
            raise Violation(
                f"{self.name}: a thread hangs",
                [f"plan {json.dumps(self.plan)}", *self.reports()[-3:], self.stderr()[-6000:]],
            )
        return code

    def facts(self, seconds: float) -> dict[str, Any]:
        """Wait for its end and return what it has reported as `done`; raise `Violation` if it did
        not end in order.
        """
        code = self.wait(seconds)
        facts = next((facts for facts in self.reports() if facts.get("done")), None)
        if code != 0 or facts is None:
            raise Violation(
                f"{self.name}: exit {code}", [f"plan {self.plan}", self.stderr()[-8000:]]
            )
        return facts

    def kill(self) -> None:
        """Kill it and all processes that it has started, which are its process group."""
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
        self._stdout.close()
        self._stderr.close()


def dump_stacks_on_sigquit() -> None:
    """In the child: print all stacks on SIGQUIT, and end by it. SIGINT raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)


def restart_watchdog(seconds: float) -> None:
    """In the child: print all stacks and exit, unless this is called again within `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def read_plan() -> dict[str, Any]:
    """In the child: return its plan."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def report(**facts: Any) -> None:
    """In the child: print one JSON line, at once."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def now_ms() -> float:
    """Return CLOCK_MONOTONIC, which all processes of a machine share, in ms."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e6
