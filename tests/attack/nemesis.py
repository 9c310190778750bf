"""Scenario `nemesis`: faults at random over processes that call limiters, with random modes and
policies, and the checks C1 to C8 of their history.

The faults are of the link, and stalls, restarts without data, a full server, steps of its clock,
failovers; clients are frozen, killed and forked. A turn is a seed and a list of faults, each with a
seed of its own. If it violates something, it is played again without parts of its faults: the
shortest list is that of the violation, as the variant `KIND:SEED,...` that plays it. The variants
`direct`, `leased` and `eventual` have all processes in one mode, and disturb the link and the
processes only.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from distwindow import Limit
from tests.attack.children import now_ms
from tests.attack.fleet import ALL_FAULTS, Fleet, kinds_of
from tests.attack.harness import FOREVER, MODES, Run, Violation, derive_seed, shrink
from tests.attack.history import (
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
    read_all_counts,
    read_history,
)
from tests.servers import DropReply, NoServer, SentinelSet, Standalone, SteppedClock

POLICIES = ["raise", "allow", "deny", "local"]
SHORT = [
    "40/second", "100/second 5 buckets", "30/second strict 10 buckets", "300/2s strict 20 buckets",
    "7/500ms",
]  # fmt: skip
FULL = Limit("200/day 1 buckets")
"""Full after some calls: then it counts refusals."""
TIMEOUT_S = 0.5
SLACK_MS = 600
"""50 ms are promised; a machine that is busy may stand still for longer. The figure is printed."""
HEAL_S = 2.5
"""How long the processes call after the last fault: at the end the store answers all of them."""
SHRINK_S = 120.0

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


class Nemesis(Fleet):
    """The processes of one turn, and its faults."""

    def __init__(
        self,
        rng: random.Random,
        server: Standalone,
        limit: Limit,
        clock: SteppedClock | None,
        nodes: SentinelSet | None,
        modes: Sequence[str],
    ) -> None:
        super().__init__(rng, server, "caller", {})
        self.limit, self.clock, self.nodes, self.modes = limit, clock, nodes, modes
        self.losses: list[Span] = []
        """When the server may have lost its counts, or its clock was stepped."""
        self.has_lost_data = False
        self.healthy_at = 0.0
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
        mode, policy = self.rng.choice(self.modes), self.rng.choice(POLICIES)
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

    def _lose(self, began: float) -> None:
        """Note that counts were lost since `began`. A lease of before lives for a bucket more."""
        after = self.limit.interval_ms + 1000
        self.losses.append((began - 200, now_ms() + after))

    def _restart(self) -> None:
        began, seconds = now_ms(), self.rng.choice([0.0, 0.3, 1.0])
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
        began, seconds = now_ms(), self.rng.choice([0.2, -0.2, 1, -1, 3, -3])
        self.note(f"the server's clock stepped by {seconds} s")
        self.clock.step(seconds)
        self._lose(began)

    def _fail_over(self) -> None:
        assert self.nodes is not None
        began, lost, kills = now_ms(), self.nodes.primary, self.rng.random() < 0.6
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


def nemesis(run: Run) -> None:
    """Play one turn: a fault for each second of the run, or those of the variant."""
    rng = random.Random(derive_seed(run.seed, "faults"))
    under_sentinel = run.only not in MODES and rng.random() < 0.25
    if run.only is None or run.only in MODES:
        kinds = ALL_FAULTS if run.only else SENTINEL if under_sentinel else STANDALONE
        count = max(1, int(run.seconds) // (2 if under_sentinel else 1))
        names = rng.choices(list(kinds), list(kinds.values()), k=count)
        steps = [Step(name, rng.randrange(10**9)) for name in names]
    else:
        parts = [text.split(":") for text in run.only.split(",")]
        steps = [Step(kind, int(seed)) for kind, seed in parts]
    try:
        play(run, under_sentinel, steps)
    except Violation as violation:
        last = violation
    else:
        return

    def is_violated(fewer: Sequence[Step]) -> bool:
        nonlocal last
        try:
            play(Run(run.seed, run.seconds, run.only), under_sentinel, fewer)
        except Violation as violation:
            last = violation
            return True
        return False

    if run.only not in MODES:
        few = shrink(steps, is_violated, SHRINK_S)
        run.only = ",".join(f"{step.kind}:{step.seed}" for step in few) or "none:0"
    raise last


def play(run: Run, under_sentinel: bool, steps: Sequence[Step]) -> None:
    """Play one turn; raise `Violation` for what does not hold."""
    rng = random.Random(run.seed)
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
        modes = [mode for mode in MODES if mode == run.only] or MODES
        fleet = stack.enter_context(Nemesis(rng, server, limit, clock, nodes, modes))
        with fleet.explained(str(limit)):
            fleet.play(kinds, steps)
            check(run, fleet, read_history(fleet.folder), server)
    run.count("faults", len(steps))


def check(run: Run, fleet: Nemesis, history: History, server: Standalone) -> None:
    """Raise `Violation` for what does not hold; the figures are counted."""
    limit, losses = fleet.limit, fleet.losses
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
            lost_leases = (len(fleet.notes) + len(history.dead)) * len(history.started) * 3
            over, missing = check_counts(
                f"C3, {mode}",
                {key: count.passed for key, count in counts.items()},
                history,
                window,
                more=under_way * 3 + (lost_leases * history.lease() if mode == "leased" else 0),
                lost=fleet.has_lost_data,
            )
            run.count(f"permits stranded, {mode}", over)
            run.count("permits that killed processes had not sent", missing)
        refused = read_all_counts(client, _prefix("full"), ["e"], FULL)["e"].blocked
    check_refusals(
        "C8", {"e": refused}, history, "full", under_way=under_way, lost=fleet.has_lost_data
    )
    run.count("refusals checked", refused)
    # C4 to C7.
    run.maximum("C4: ms after the deadline", check_deadlines(history.timed(), SLACK_MS))
    late = [call for call in history.calls if call["at"] > fleet.healthy_at]
    for name, ms in heal_ms(late, fleet.healthy_at).items():
        process, _, window = name.partition(" ")
        last = [call for call in late if (call["process"], call["window"]) == (process, window)][-1]
        run.maximum("C5: ms until the store has answered", round(ms))
        if last["by"] in AWAY:
            raise Violation(f"C5: {name} has not healed", [last])
    if not (fleet.clock and fleet.clock.offset_s) and not losses:
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
