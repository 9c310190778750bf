"""Scenario `fleet`: processes, threads and tasks that call shared keys, over a faulty link.

Afterwards the logs of all processes and the rings of the server are checked: no window is above its
limit (direct, leased), each admitted call is counted once and none is lost except with a killed
process, and no call ends after its deadline.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from distwindow import Limit
from tests.attack.children import Child, monotonic_ms
from tests.attack.fleet_logs import Logs, check_counts, read_logs
from tests.attack.harness import FOREVER, Run, Violation, derive_seed
from tests.attack.server_counts import read_all_counts
from tests.attack.window_checks import check_aligned_windows, check_any_window, check_deadlines
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

MODES = ["direct", "leased", "eventual"]
SHORT = [
    "40/second", "100/second 5 buckets", "30/second strict 10 buckets", "300/2s strict 20 buckets",
    "7/500ms",
]  # fmt: skip
RUN_S = 8.0
TIMEOUT_S = 0.8
SLACK_MS = 600


def fleet(run: Run) -> None:
    """Run fleets of some seconds each. The seed draws the consistency, the limit and the faults."""
    stop = time.monotonic() + run.seconds
    for turn in itertools.count():
        left = stop - time.monotonic()
        if turn and left < 3:
            return
        Fleet(run, derive_seed(run.seed, "fleet", turn)).run_for(min(RUN_S, max(1.0, left - 1)))
        run.count("fleets")


class Fleet:
    """One fleet: the server, the link, the clients, and the faults that they got."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.rng = random.Random(seed)
        self.seed = seed
        self.mode = run.only or self.rng.choice(MODES)
        self.limit = Limit(self.rng.choice(SHORT))
        self.faults: list[str] = []
        self.clients: dict[str, Child] = {}
        self.frozen: dict[str, float] = {}
        self.killed: list[str] = []
        self._names = itertools.count()

    def run_for(self, seconds: float) -> None:
        folder = Path(tempfile.mkdtemp(prefix="distwindow-attack-"))
        try:
            with Standalone() as server, Proxy(server.port) as proxy:
                try:
                    for kind in ["sync", "sync", "async"][: self.rng.randint(2, 3)]:
                        self._start_client(proxy, folder, kind)
                    self._cause_faults(server, proxy, folder, seconds)
                    self._end(server, proxy)
                    logs = read_logs(folder, int(TIMEOUT_S * 1000))
                    self._check(server, logs)
                finally:
                    for client in self.clients.values():
                        client.__exit__()
        finally:
            shutil.rmtree(folder)

    def _start_client(self, proxy: Proxy, folder: Path, kind: str) -> None:
        name = f"p{next(self._names)}"
        self.clients[name] = Child(
            "fleet_child",
            {
                "url": proxy.url, "folder": str(folder), "name": name, "kind": kind,
                "prefix": "fleet", "mode": self.mode, "short": str(self.limit), "long": FOREVER,
                "short_keys": ["a", "b"], "long_keys": ["c", "d"], "timeout": TIMEOUT_S,
                "threads": self.rng.randint(2, 3), "seed": self.seed,
            },
        )  # fmt: skip

    def _cause_faults(self, server: Standalone, proxy: Proxy, folder: Path, seconds: float) -> None:
        """Cause one fault after the other, with moments without a fault between them."""
        rng, stop = self.rng, time.monotonic() + seconds
        time.sleep(0.4)  # the clients start to call
        while time.monotonic() < stop:
            self._resume(False)
            draw = rng.random()
            if draw < 0.62:
                proxy.fault = fault = self._fault()
                self._note(repr(fault))
                time.sleep(rng.uniform(0.02, 0.4))
                proxy.fault = Pass()
            elif draw < 0.70:
                freeze = rng.choice([0.1, 0.4, 1.2])
                self._note(f"server frozen for {freeze} s")
                server.pause()
                time.sleep(freeze)
                server.resume()
            elif draw < 0.76:
                self._note("SCRIPT FLUSH")
                with server.client() as client:
                    client.script_flush()
            elif draw < 0.84:
                self._freeze()
            elif draw < 0.88 and len(self.killed) < 3:
                self._kill(proxy, folder)
            elif draw < 0.96:
                self._fork()
            else:
                self._note("all connections reset")
                proxy.cut()
            time.sleep(rng.uniform(0.0, 0.25))

    def _fault(self) -> Fault:
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

    def _freeze(self) -> None:
        name = self.rng.choice([name for name in self.clients if name not in self.killed])
        seconds = self.rng.choice([0.15, 0.5, 2.0])
        self._note(f"{name} frozen for {seconds} s")
        self.clients[name].signal(signal.SIGSTOP)
        self.frozen[name] = time.monotonic() + seconds

    def _resume(self, all_clients: bool) -> None:
        for name, until in list(self.frozen.items()):
            if all_clients or time.monotonic() >= until:
                self.clients[name].signal(signal.SIGCONT)
                del self.frozen[name]

    def _kill(self, proxy: Proxy, folder: Path) -> None:
        name = self.rng.choice([name for name in self.clients if name not in self.killed])
        self._note(f"{name} killed")
        self.clients[name].signal(signal.SIGKILL)
        self.killed.append(name)
        self._start_client(proxy, folder, self.clients[name].plan["kind"])

    def _fork(self) -> None:
        name = self.rng.choice([name for name in self.clients if name not in self.killed])
        if self.clients[name].plan["kind"] == "sync":
            self._note(f"{name} forks")
            self._send_order(name, b"fork\n")

    def _send_order(self, name: str, order: bytes) -> None:
        pipe = self.clients[name].process.stdin
        assert pipe is not None
        pipe.write(order)
        pipe.flush()

    def _note(self, what: str) -> None:
        self.faults.append(f"{monotonic_ms()} {what}")

    def _end(self, server: Standalone, proxy: Proxy) -> None:
        """End all faults, and have all clients flush their counts and end."""
        proxy.fault = Pass()
        server.resume()
        self._resume(True)
        time.sleep(1.0)  # forked children end by themselves
        alive = [name for name in self.clients if name not in self.killed]
        for name in alive:
            self._send_order(name, b"end\n")
        for name in alive:
            code = self.clients[name].wait(25)
            if code != 0:
                stderr = self.clients[name].stderr()[-4000:]
                raise Violation(f"fleet: {name} ended with {code}", [*self.faults[-15:], stderr])

    def _check(self, server: Standalone, logs: Logs) -> None:
        self.run.count("calls", len(logs.calls))
        self.run.count("faults", len(self.faults))
        what = f"fleet {self.mode} {self.limit}"
        try:
            if self.mode != "eventual":
                limit, admitted = self.limit, logs.admitted("short")
                check_aligned_windows(admitted, limit.amount, limit.bucket_ms, limit.span)
                if limit.bound == "strict":
                    check_any_window(admitted, limit.amount, limit.interval_ms)
                self.run.count("admissions checked", len(admitted))
            names = {call["key"] for call in logs.calls if call["window"] == "long"}
            with server.client(decode_responses=False) as client:
                found = read_all_counts(client, "fleet-long", names, Limit(FOREVER))
            dead = logs.started - logs.ended
            over, missing = check_counts(
                what,
                {key: count.passed for key, count in found.items()},
                logs,
                by_process=self.mode == "eventual",
                under_way=len(dead) * 3 * 3,
                stranded=self._stranded(logs, dead),
            )
            self.run.count(f"permits stranded, {self.mode}", over)
            self.run.count("permits that killed processes had not sent", missing)
            latest = check_deadlines(logs.timed(), SLACK_MS)
            self.run.maximum("ms after the deadline", latest)
        except Violation as violation:
            raise Violation(
                f"{what}: {violation.what}", [*self.faults[-25:], *violation.history[-15:]]
            ) from None

    def _stranded(self, logs: Logs, dead: set[str]) -> int:
        """Return the permits of leases whose reply was lost, and of those that killed processes
        held: at most one lease of each key at a time.
        """
        if self.mode != "leased":
            return 0
        lost = (len(self.faults) + len(dead)) * len(logs.started) * 5
        return lost * logs.lease()
