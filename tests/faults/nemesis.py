"""Faults at random over processes with random modes and policies, and the checks of their history.

A turn is a seed and a list of faults, each with a seed of its own. If the history of a turn
violates something, the turn is played again without halves of its faults, then quarters, as long as
it is violated: the shortest list is printed, with the command that plays it.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from distwindow import Limit
from tests.attack.children import monotonic_ms
from tests.attack.faulty_fleet import FaultyFleet
from tests.attack.fleet import SHORT
from tests.attack.harness import FOREVER, Run, Violation, derive_seed
from tests.attack.server_counts import read_all_counts
from tests.faults.history import (
    AWAY,
    Admitted,
    History,
    Span,
    check_aligned_windows,
    check_any_window,
    check_counts,
    check_deadlines,
    check_echoes,
    check_refusals,
    check_resources,
    heal_ms,
    read_history,
)
from tests.servers import DropReply, NoServer, SentinelSet, Standalone, SteppedClock

MODES = ["direct", "leased", "eventual"]
POLICIES = ["raise", "allow", "deny", "local"]
FULL = Limit("200/day 1 buckets")
"""Full after some calls: then it counts refusals."""
TIMEOUT_S = 0.5
SLACK_MS = 1500
"""50 ms are promised; a machine that is busy may stand still for longer. The figure is printed."""
HEAL_S = 2.0
"""How long the processes call after the last fault: at the end the store answers all of them."""
FAULTS = 12
"""Of one turn."""

STANDALONE = {
    "link": 0.26, "lossy": 0.2, "stall": 0.08, "scripts": 0.06, "freeze": 0.08, "kill": 0.04,
    "fork": 0.06, "reset": 0.04, "restart": 0.04, "full": 0.07, "clock": 0.07,
}  # fmt: skip
SENTINEL = {"failover": 0.4, "scripts": 0.1, "freeze": 0.25, "kill": 0.1, "fork": 0.15}
"""The faults of each topology, and how often each is drawn."""


class Step(NamedTuple):
    """One fault, and the seed of what it draws."""

    kind: str
    seed: int


class Primary(Standalone):
    """The primary of a set, as one server."""

    def __init__(self, nodes: SentinelSet) -> None:
        super().__init__()
        self.nodes = nodes
        self.port = nodes.primary.port

    def client(self, **options: Any) -> Any:
        return self.nodes.primary.client(**options)

    def resume(self) -> None:
        for server in self.nodes.servers:
            server.resume()


class Nemesis(FaultyFleet):
    """The processes of one turn, and its faults."""

    def __init__(
        self,
        rng: random.Random,
        server: Standalone,
        limit: Limit,
        clock: SteppedClock | None,
        nodes: SentinelSet | None,
    ) -> None:
        super().__init__(rng, server, "tests.faults.caller", {})
        self.limit, self.clock, self.nodes = limit, clock, nodes
        self.losses: list[Span] = []
        """When the server may have lost its counts, or its clock was stepped."""
        self.has_lost_data = False
        self.healthy_at = 0
        self.causes |= {
            "lossy": self._lose_replies, "restart": self._restart, "full": self._fill,
            "clock": self._step, "failover": self._fail_over,
        }  # fmt: skip

    def __enter__(self) -> Nemesis:
        super().__enter__()
        if self.nodes is not None:
            self.url = self.nodes.url
        return self

    def start(self, kind: str, **more: Any) -> None:
        mode, policy = self.rng.choice(MODES), self.rng.choice(POLICIES)
        self.note(f"a process ({kind}): {mode}, {policy}")
        # Only leases may be stranded, so each mode has long windows of its own.
        long = f"long {mode}"
        calls = [
            {"window": "short", "weight": 5, "keys": ["a", "b"], "costs": [1, 1, 1, 2]},
            {"window": long, "weight": 3, "keys": ["c", "d", "{name}"], "costs": [1, 1, 3]},
            {"window": "full", "weight": 2, "keys": ["e"], "costs": [1]},
        ]
        limits = {"short": str(self.limit), long: FOREVER, "full": str(FULL)}
        windows = {
            name: {
                "limits": text, "prefix": _prefix(name), "consistency": mode,
                "timeout": TIMEOUT_S, "on_store_error": policy,
                "share": 0.5 if policy == "local" else None,
            }
            for name, text in limits.items()
        }  # fmt: skip
        super().start(kind, windows=windows, calls=calls, **more)

    def play(self, kinds: Sequence[str], steps: Sequence[Step]) -> None:
        for kind in kinds:
            self.start(kind)
        time.sleep(1.0)  # the processes start to call
        for step in steps:
            self.rng = random.Random(step.seed)
            self.resume_clients()
            self.causes[step.kind]()
            time.sleep(self.rng.uniform(0.0, 0.4))  # a moment without a fault
        self.healthy_at = self.end_faults()
        time.sleep(HEAL_S)
        self.end()

    def _lose_replies(self) -> None:
        fault = DropReply(close=True, only=b"EVALSHA", every=self.rng.choice([5, 20]))
        self.note(repr(fault))
        with self.proxy.inject(fault):
            time.sleep(self.rng.uniform(0.3, 1.0))

    def _lose(self, began: int) -> None:
        """Note that counts were lost since `began`. A lease of before lives for a bucket more."""
        after = self.limit.interval_ms + 1000
        self.losses.append((began - 200, monotonic_ms() + after))

    def _restart(self) -> None:
        began, seconds = monotonic_ms(), self.rng.choice([0.0, 0.3, 1.0])
        self.note(f"server killed for {seconds} s, without its data")
        self.server.kill()
        time.sleep(seconds)
        self.server.restart()
        self.has_lost_data = True
        self._lose(began)

    def _fill(self) -> None:
        self.note("server full (OOM)")
        with self.server.client() as client:
            client.config_set("maxmemory", 1)
            time.sleep(self.rng.uniform(0.05, 0.5))
            client.config_set("maxmemory", 0)

    def _step(self) -> None:
        if self.clock is None:
            return
        began, seconds = monotonic_ms(), self.rng.choice([0.2, -0.2, 1, -1, 3, -3])
        self.note(f"the server's clock stepped by {seconds} s")
        self.clock.step(seconds)
        self._lose(began)

    def _fail_over(self) -> None:
        assert self.nodes is not None
        began, lost, kills = monotonic_ms(), self.nodes.primary, self.rng.random() < 0.6
        self.note(f"primary {'killed' if kills else 'frozen'} until another one serves")
        (lost.kill if kills else lost.pause)()
        new = self.nodes.await_failover(lost, 30)
        if kills:
            lost.config["replicaof"] = f"{new.host} {new.port}"
            lost.restart()
        lost.resume()
        time.sleep(2.5)  # it is a replica again, which the next failover needs
        self.has_lost_data = True
        self._lose(began)


def kinds_of(rng: random.Random) -> list[str]:
    return ["sync", "async", "sync"][: rng.randint(2, 3)]


def draw(seed: int) -> tuple[bool, list[Step]]:
    """Return whether a turn has a primary under sentinels, and its faults."""
    rng = random.Random(derive_seed(seed, "faults"))
    under_sentinel = rng.random() < 0.25
    kinds = SENTINEL if under_sentinel else STANDALONE
    names = rng.choices(
        list(kinds), list(kinds.values()), k=FAULTS // 2 if under_sentinel else FAULTS
    )
    return under_sentinel, [Step(name, rng.randrange(10**9)) for name in names]


def play(run: Run, seed: int, steps: Sequence[Step]) -> None:
    """Play one turn; raise `Violation` for what does not hold."""
    rng = random.Random(seed)
    under_sentinel, _ = draw(seed)
    limit, kinds = Limit(rng.choice(SHORT)), kinds_of(rng)
    with ExitStack() as stack:
        clock = nodes = None
        if under_sentinel:
            nodes = stack.enter_context(SentinelSet())
            server: Standalone = Primary(nodes)
        else:
            try:
                clock = stack.enter_context(SteppedClock())
            except NoServer:
                run.count("turns without steps of a clock")
            server = stack.enter_context(Standalone(env={} if clock is None else clock.env))
        nemesis = stack.enter_context(Nemesis(rng, server, limit, clock, nodes))
        try:
            nemesis.play(kinds, steps)
            history = read_history(nemesis.folder, int(TIMEOUT_S * 1000))
            check(run, nemesis, history, server)
        except Violation as violation:
            raise Violation(
                f"{limit}: {violation.what}", [*nemesis.notes, *violation.history[-15:]]
            ) from None
    for step in steps:
        run.count(f"faults, {step.kind}")


def check(run: Run, nemesis: Nemesis, history: History, server: Standalone) -> None:
    """Raise `Violation` for what does not hold; the figures are counted."""
    limit, losses = nemesis.limit, nemesis.losses
    run.count("calls", len(history.calls))
    # C1, C2. Counts that others send later may exceed a limit, but no decision of the store does.
    for window, bound in (("short", limit), ("full", FULL)):
        admitted = history.admitted(window, "direct", "leased")
        check_aligned_windows(admitted, bound.amount, bound.bucket_ms, bound.span, losses)
        if bound.bound == "strict":
            check_any_window(admitted, bound.amount, bound.interval_ms, losses)
        run.count("admissions checked", len(admitted))
        for own in _by_process(history.admitted(window, "eventual")).values():
            # The first two calls of a process on a key are admitted in addition.
            learned = [*losses, *_clock_changes(own)]
            check_aligned_windows(own, bound.amount + 4, bound.bucket_ms, bound.span, learned)
    # C3, C8.
    under_way = len(history.dead) * 3
    with server.client(decode_responses=False) as client:
        for mode in MODES:
            window = f"long {mode}"
            names = {call["key"] for call in history.of(window)}
            counts = read_all_counts(client, _prefix(window), names, Limit(FOREVER))
            lost_leases = (len(nemesis.notes) + len(history.dead)) * len(history.started) * 3
            over, missing = check_counts(
                f"C3, {mode}",
                {key: count.passed for key, count in counts.items()},
                history,
                window,
                under_way=under_way * 3,
                stranded=lost_leases * history.lease() if mode == "leased" else 0,
                lost=nemesis.has_lost_data,
            )
            run.count(f"permits stranded, {mode}", over)
            run.count("permits that killed processes had not sent", missing)
        refused = read_all_counts(client, _prefix("full"), ["e"], FULL)["e"].blocked
    check_refusals(
        "C8", {"e": refused}, history, "full", under_way=under_way, lost=nemesis.has_lost_data
    )
    run.count("refusals checked", refused)
    # C4 to C7.
    run.maximum("C4: ms after the deadline", check_deadlines(history.timed(), SLACK_MS))
    late = [call for call in history.calls if call["at"] > nemesis.healthy_at]
    for name, ms in heal_ms(late, nemesis.healthy_at).items():
        process, _, window = name.partition(" ")
        last = [call for call in late if (call["process"], call["window"]) == (process, window)][-1]
        run.maximum("C5: ms until the store has answered", ms)
        if last["by"] in AWAY:
            raise Violation(f"C5: {name} has not healed", [last])
    if not (nemesis.clock and nemesis.clock.offset_s) and not losses:
        run.count("C6: echoes checked", check_echoes(history.calls))
    check_resources(history)
    run.count("unknown", history.unknown)


def _prefix(window: str) -> str:
    return f"nemesis-{window.replace(' ', '-')}"


def _by_process(calls: Sequence[Admitted]) -> dict[str, list[Admitted]]:
    return {name: [c for c in calls if c.process == name] for name in {c.process for c in calls}}


def _clock_changes(calls: Sequence[Admitted]) -> list[Span]:
    """Return when a process has learned of steps of the server's clock: with a reply, which may
    come long after the step where the server is frozen, and replies are lost.
    """
    ordered = sorted(calls, key=lambda call: call.at)
    return [
        (before.at, after.at)
        for before, after in itertools.pairwise(ordered)
        if abs((after.now_ms - after.at) - (before.now_ms - before.at)) > 100
    ]


def shrink(steps: list[Step], is_violated: Callable[[list[Step]], bool], tries: int) -> list[Step]:
    """Return a shorter list of faults that still violates something: without halves of it, then
    quarters, and so on, with at most so many `tries`.
    """
    part = max(1, len(steps) // 2)
    while tries and steps:
        for start in range(0, len(steps), part):
            shorter = steps[:start] + steps[start + part :]
            if not tries:
                break
            tries -= 1
            if is_violated(shorter):
                steps = shorter
                break
        else:
            if part == 1:
                break
            part //= 2
    return steps


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/nemesis", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long in all (5)")
    parser.add_argument("--seed", type=int, help="seed of all random choices; drawn if missing")
    parser.add_argument("--turn", type=int, help="one turn, with exactly this seed")
    parser.add_argument("--faults", metavar="KIND:SEED,...", help="these faults of that turn only")
    parser.add_argument("--tries", type=int, default=12, help="to shrink a list of faults (12)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    sums, stop, number = Run(seed, 0), time.monotonic() + options.minutes * 60, 0
    violated = False
    try:
        while not violated and (number == 0 or (time.monotonic() < stop and options.turn is None)):
            turn = derive_seed(seed, number) % 10**9 if options.turn is None else options.turn
            number += 1
            _, steps = draw(turn)
            if options.faults is not None:
                parts = [text.split(":") for text in options.faults.split(",") if text]
                steps = [Step(kind, int(step_seed)) for kind, step_seed in parts]
            violated = not _turn(sums, turn, steps, options.tries)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    for figure, count in sorted(sums.figures.items()):
        print(f"{figure:<45} {count:>12,}")
    print(f"\n{'violated' if violated else 'no violation'}", flush=True)
    return 1 if violated else 0


def _turn(sums: Run, turn: int, steps: list[Step], tries: int) -> bool:
    """Play one turn, and shrink it if it is violated; return False then."""
    run, began = Run(turn, 0), time.monotonic()
    found = _violation(run, turn, steps)
    sums.gather(dict(run.figures))
    sums.count("turns")
    calls, took = run.figures["calls"], time.monotonic() - began
    shown = "ok" if found is None else "VIOLATION"
    print(
        f"turn {turn:<10} {len(steps):>3} faults {calls:>8,} calls {took:6.1f} s  {shown}",
        flush=True,
    )
    if found is None:
        return True
    print(f"\n{found}\n", flush=True)
    last = [found]

    def is_violated(shorter: list[Step]) -> bool:
        again = _violation(Run(turn, 0), turn, shorter)
        print(
            f"  without {len(steps) - len(shorter)} of {len(steps)} faults: {again is not None}",
            flush=True,
        )
        if again is not None:
            last[0] = again
        return again is not None

    least = shrink(steps, is_violated, tries)
    command = ["scripts/nemesis", "--turn", str(turn)]
    command += ["--faults", ",".join(f"{step.kind}:{step.seed}" for step in least)]
    print(
        f"\nturn {turn}, {len(least)} faults: {last[0]}\n\nagain: {shlex.join(command)}\n",
        flush=True,
    )
    return False


def _violation(run: Run, turn: int, steps: Sequence[Step]) -> Violation | None:
    try:
        play(run, turn, steps)
    except Violation as violation:
        return violation
    except Exception as exc:
        # A server did not start, or a process ended that should not have.
        return Violation(f"the turn failed: {exc!r}", [traceback.format_exc()])
    return None


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    sys.exit(main(sys.argv[1:]))
