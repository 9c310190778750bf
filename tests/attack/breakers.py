"""Scenario `breakers`: processes that share a circuit breaker, and a service that breaks and works
again; with kills, freezes, forks, interruptions and cancellations.

`bound`: over a sound link: soon after it has opened, no process lets a call through but the probes
of the fleet. `faulty`: the same over a faulty link, without that bound. `counts`: a breaker that
never opens has counted each end once, over a faulty link. `probes`: inside another breaker of its
kind and window, and entered again inside itself, with probes that take longer than their timeout
and are left by forked children, too: while a probe runs, nothing else does.
In all of them no more probes run at once than the rule says, each process hears of each change
once and in order, and calls are let through again when the service works.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, NamedTuple

from distwindow import AsyncCircuitBreaker, BreakerChange, BreakerOpen, CircuitBreaker, ErrorCount
from distwindow.breaker.commands import breaker_name
from tests.attack.children import now_ms
from tests.attack.client import Client, ClientLog, Op, ServiceError, Work
from tests.attack.cold_child import COUNTED
from tests.attack.fleet import ALL_FAULTS, PROCESS_FAULTS, attacked, play_fleets
from tests.attack.harness import Run, Violation
from tests.attack.history import History, check_tallies, read_breaker
from tests.servers import Standalone

VARIANTS = ["bound", "faulty", "counts", "probes"]
START_S, SOUND_S = 1.5, 1.5
"""The service works for so long at the beginning and at the end."""
PREFIX, KEY = "breakers", "service"
SYNC_S = FLUSH_S = 0.1
RULE = ErrorCount(20, window=2.0, open_for=0.6, probe_timeout=2.0)
PROBED = ErrorCount(20, window=2.0, open_for=0.4, probe_timeout=1.2)
AROUND = ErrorCount(30, window=2.0, open_for=0.4, probe_timeout=1.2)
"""The rule of a breaker of the same kind and window around the one with the rule `PROBED`."""
SLOW_S = 1.5 * PROBED.probe_timeout
WINDOW_MS = RULE.window_ms - 2 * RULE.bucket_ms
"""Calls that ended within this time are surely in one window of the store."""
SLACK_MS = 500
"""What a busy machine may add to a bound, beyond the pauses that a process has noticed."""
ENOUGH = 3
"""So many calls are let through only if the first, a probe, has closed the breaker."""
HEALED_S = RULE.open_for + RULE.probe_timeout + 4.0


def breakers(run: Run) -> None:
    """The seed draws the variant, the times at which the service is broken, and the faults."""
    play_fleets(run, "breakers", VARIANTS, _play, least_s=5.0, most_s=9.0)


def _play(run: Run, rng: random.Random, server: Standalone, variant: str, seconds: float) -> None:
    plan = {"variant": variant, "broken": _broken_times(rng, seconds)}
    faults = PROCESS_FAULTS if variant in ("bound", "probes") else ALL_FAULTS
    with attacked(run, rng, server, "breakers", plan, seconds, faults) as (fleet, history):
        if variant == "counts":
            _check_counts(run, server, history)
        elif variant == "probes":
            _check_probed(run, history)
        else:
            _check_states(run, history, fleet.froze, is_bound=variant == "bound")


def _broken_times(rng: random.Random, seconds: float) -> list[list[float]]:
    """Return when the service is broken, in ms on the clock that all processes share."""
    began, ended = now_ms() + START_S * 1000, now_ms() + (seconds - SOUND_S) * 1000
    times = []
    while began < ended:
        broken_ms = rng.choice([600, 1500, 3000])
        times.append([began, min(ended, began + broken_ms)])
        began += broken_ms + rng.choice([300, 1200])
    return times


def _check_states(run: Run, history: History, froze: set[str], *, is_bound: bool) -> None:
    calls, changes = read_passed(history), read_changes(history)
    run.count("calls", len(calls))
    opened = {change.at_ms for change in changes if change.state == "open"}
    run.count("times that it opened", len(opened))
    run.count("probes", sum(call.probe is not None for call in calls))
    if is_bound and not opened:
        raise Violation("the service was broken, and the breaker has not opened", calls[-5:])
    check_probes(calls, RULE.probes, RULE.probe_timeout * 1000, changes)
    run.count("changes heard", check_heard(changes, history))
    if is_bound:
        bound_ms = SYNC_S * 1000 + SLACK_MS
        # What frozen and killed processes have counted may come late, or never.
        sound = [call for call in calls if call.process in history.ended - froze]
        paused_ms = max(history.paused_ms(name, 0, float("inf")) for name in history.ended - froze)
        late_ms = FLUSH_S * 1000 + bound_ms + paused_ms
        check_opens(sound, changes, RULE.count, WINDOW_MS, late_ms)
        run.count("refusing times checked", check_bound(calls, changes, bound_ms, history))


def _check_probed(run: Run, history: History) -> None:
    calls, changes = read_passed(history), read_changes(history)
    run.count("calls", len(calls))
    probes = [call for call in calls if call.probe is not None]
    run.count("probes", len(probes))
    run.count("slow probes", sum(call.ended - call.began > PROBED.probe_ms for call in probes))
    opened = {change.at_ms for change in changes if change.state == "open"}
    # A killed process may have had the probe in between, and has not logged it.
    if len(opened) > 2 and not probes:
        raise Violation(f"it opened {len(opened)} times, and there was no probe", calls[-5:])
    # The probe of a process that did not run for a part of its timeout may be another's by now.
    silent_ms = PROBED.probe_ms / 2
    steady = [
        call
        for call in probes
        if history.paused_ms(call.process, call.asked, call.ended) < silent_ms
    ]
    check_probes(steady, PROBED.probes, math.inf, changes)
    check_alone(steady, calls, SYNC_S * 1000 + SLACK_MS, history)
    check_heard(changes, history)


def _check_counts(run: Run, server: Standalone, history: History) -> None:
    with server.client(decode_responses=False) as client:
        calls, failures = read_breaker(client, breaker_name(PREFIX, KEY, COUNTED))
    stored = {"calls": calls, "failures": failures}
    check_tallies("ends", stored, history, sent_later=True, under_way=len(history.dead) * 4 * 2)
    run.count("calls", stored["calls"])


# -- the checks --


class Passed(NamedTuple):
    """A call that was let through; ms on the clock that all processes share."""

    process: str
    asked: float
    """Just before it asked the breaker."""
    began: float
    ended: float
    """When its block ended; when it began, if that is not known."""
    probe: str | None
    failed: bool | None
    """None if it was interrupted or cancelled."""


class Change(NamedTuple):
    """A change of state that a listener has heard."""

    process: str
    heard: float
    at_ms: int
    """When it happened, on the store's clock."""
    previous: str
    state: str


def read_passed(history: History) -> list[Passed]:
    """Return the calls that were let through, in order."""
    found = [
        Passed(
            process, line["asked"], line["began"], line["ended"], line["probe"], line["failed"]
        )
        for process, line in history.having("asked")
    ]  # fmt: skip
    return sorted(found, key=lambda call: call.asked)


def read_changes(history: History) -> list[Change]:
    """Return what was heard: of each process in the order in which it heard it."""
    return [
        Change(process, line["heard"], line["at_ms"], line["previous"], line["state"])
        for process, line in history.having("heard")
    ]


def check_heard(changes: Sequence[Change], history: History) -> int:
    """Raise `Violation` if a process has heard a change twice, out of order, or from another state
    than the one before. Where a listener was interrupted, there may be a gap. Return how many were
    heard.
    """
    interrupted = {process for process, _ in history.having("interrupted_listener")}
    for process in history.lines:
        own = [change for change in changes if change.process == process]
        for before, after in itertools.pairwise(own):
            skips = after.previous != before.state and process not in interrupted
            if after.at_ms <= before.at_ms or skips:
                raise Violation(
                    f"{process} has heard {after.previous} -> {after.state} of {after.at_ms} after "
                    f"{before.previous} -> {before.state} of {before.at_ms}",
                    [change._asdict() for change in own],
                )
    return len(changes)


def check_probes(
    calls: Iterable[Passed], probes: int, timeout_ms: float, changes: Iterable[Change] = ()
) -> None:
    """Raise `Violation` if more probes of the fleet ran at once, none of them for longer than
    `timeout_ms`.
    """
    running: list[Passed] = []
    for call in sorted(calls, key=lambda call: call.began):
        if call.probe is None:
            continue
        running = [
            one
            for one in running
            if min(one.ended, one.asked + timeout_ms) > call.began and one.probe != call.probe
        ]
        running.append(call)
        if len(running) > probes:
            raise Violation(
                f"{len(running)} probes of the fleet run at once, of {probes}",
                [*(c._asdict() for c in changes), *(c._asdict() for c in running)],
            )


def check_alone(
    probes: Iterable[Passed], calls: Sequence[Passed], bound_ms: float, history: History
) -> None:
    """Raise `Violation` if a call that was no probe was let through while one of these probes ran,
    later than `bound_ms` after its beginning: only its end may close the breaker.
    """
    for probe in probes:
        for call in calls:
            late = call.asked - probe.began - bound_ms
            if call.probe is not None or late <= 0 or call.asked >= probe.ended:
                continue
            if late > history.paused_ms(call.process, probe.began, call.asked):
                raise Violation(
                    f"{call.process} let a call through beside a probe of the fleet",
                    [probe._asdict(), call._asdict()],
                )


def check_bound(
    calls: Sequence[Passed], changes: Sequence[Change], bound_ms: float, history: History
) -> int:
    """Raise `Violation` if a call that was no probe was let through later than `bound_ms` after the
    first process had heard that the breaker opened, and before any heard that it closed. Return how
    many times it was not closed.
    """
    ordered = sorted(changes, key=lambda change: change.heard)
    opened: float | None = None
    times: list[tuple[float, float]] = []
    for change in ordered:
        if change.state == "open" and opened is None:
            opened = change.heard
        elif change.state == "closed" and opened is not None:
            times.append((opened, change.heard))
            opened = None
    if opened is not None:
        times.append((opened, float("inf")))
    for opened, closed in times:
        for call in calls:
            late = call.asked - opened - bound_ms
            if call.probe is not None or late <= 0 or call.asked >= closed - bound_ms:
                continue
            if late > history.paused_ms(call.process, opened, call.asked):
                raise Violation(
                    f"{call.process} let a call through {call.asked - opened:.0f} ms after the "
                    f"breaker had opened",
                    [*(c._asdict() for c in ordered if c.heard <= call.asked), call._asdict()],
                )
    return len(times)


def check_opens(
    calls: Iterable[Passed],
    changes: Sequence[Change],
    count: int,
    window_ms: float,
    bound_ms: float,
) -> bool:
    """Raise `Violation` unless the breaker has opened for the first time within `bound_ms` of the
    moment at which `count` of these calls had failed within `window_ms`. Return whether so many
    did.
    """
    opened = min((change.heard for change in changes if change.state == "open"), default=None)
    failed = sorted(call.ended for call in calls if call.failed)
    for first, last in zip(failed, failed[count - 1 :], strict=False):
        if last - first <= window_ms:
            if opened is None or opened - last > bound_ms:
                raise Violation(
                    f"{count} calls had failed at {last:.0f} ms, and the first process heard that "
                    f"the breaker opened at {opened} ms",
                    [change._asdict() for change in changes],
                )
            return True
    return False


# -- the client --


class BreakerCall(Op):
    """One call of the service."""

    name = "call"
    expected = (BreakerOpen,)

    def __init__(self, work: Breakers, rng: random.Random) -> None:
        self.work, self.breaker = work, work.breaker
        self.seconds = rng.random() * 0.01
        self.asked = self.began = self.ended = 0.0
        self.admission: Any = None
        self.fails = False

    def run(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError), self.breaker.call(KEY) as call:
            self._begin(call)
            time.sleep(self.seconds)
            self._end()

    async def run_async(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError):
            async with self.breaker.call(KEY) as call:
                self._begin(call)
                await asyncio.sleep(self.seconds)
                self._end()

    def _begin(self, call: Any) -> None:
        self.began = self.ended = now_ms()
        self.admission = call._admission
        self.fails = any(began <= self.began < ended for began, ended in self.work.plan["broken"])

    def _end(self) -> None:
        self.ended = now_ms()
        if self.fails:
            raise ServiceError

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        if self.work.plan["variant"] == "counts":
            if interrupted:
                log.count(unsure=["calls", "failures"])
            elif self.began:
                log.count(["calls", "failures"] if self.fails else ["calls"])
        elif self.began:
            log.write(
                asked=self.asked, began=self.began, ended=self.ended,
                probe=self.admission and self.admission.probe and self.admission.probe.probe_id,
                failed=None if interrupted else self.fails,
            )  # fmt: skip


class ProbedCall(BreakerCall):
    """One call of the service inside two breakers, the inner one of which is entered again. A probe
    may take longer than its timeout, and its process may fork inside it.
    """

    def __init__(self, work: Breakers, rng: random.Random) -> None:
        super().__init__(work, rng)
        self.probe_s = rng.choice([self.seconds, SLOW_S, SLOW_S])
        self.child_raised = False

    def run(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError), ExitStack() as stack:
            calls = [stack.enter_context(one) for one in self.work.blocks()]
            self._begin(calls[1])
            if self.admission.probe is not None:
                # Not in the main thread, where a signal handler may raise in the child.
                if threading.current_thread() is not threading.main_thread():
                    self._leave_in_child(stack)
                time.sleep(self.probe_s)
            self._end()

    async def run_async(self) -> None:
        self.asked = now_ms()
        with suppress(ServiceError):
            async with AsyncExitStack() as stack:
                calls = [await stack.enter_async_context(one) for one in self.work.blocks()]
                self._begin(calls[1])
                if self.admission.probe is not None:
                    await asyncio.sleep(self.probe_s)
                self._end()

    def _leave_in_child(self, stack: ExitStack) -> None:
        child = os.fork()
        if child:
            self.child_raised = os.waitpid(child, 0)[1] != 0
            return
        try:
            self.work.hears = False  # its log is the parent's
            stack.close()
            os._exit(0)
        finally:
            os._exit(1)

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        if self.child_raised:
            log.write(wrong="a child that has left the block of a probe has raised")
        super().note(log, raised, interrupted)


class Breakers(Work):
    """The breaker of one client, and in variant `probes` one around it."""

    breaker: Any
    around: Any = None
    hears = True

    def open(self) -> None:
        variant = self.plan["variant"]
        rule = COUNTED if variant == "counts" else PROBED if variant == "probes" else RULE
        self.breaker = self._breaker(rule)
        if variant == "probes":
            self.around = self._breaker(AROUND)
        self.breaker.on_change(self._hear)

    def _breaker(self, rule: ErrorCount) -> Any:
        return self.make(
            CircuitBreaker, AsyncCircuitBreaker, rule=rule, prefix=PREFIX, timeout=0.4,
            sync_interval=SYNC_S, flush_interval=FLUSH_S, on_store_error="deny",
        )  # fmt: skip

    def _hear(self, change: BreakerChange) -> None:
        if self.hears:
            self.log.write(
                heard=now_ms(), at_ms=change.at_ms, previous=change.previous, state=change.state
            )

    def blocks(self) -> list[Any]:
        """Return what the service is called inside of, from the outside."""
        if self.around is None:
            return [self.breaker.call(KEY)]
        return [self.around.call(KEY), self.breaker.call(KEY), self.breaker.call(KEY)]

    def op(self, rng: random.Random) -> Op:
        return BreakerCall(self, rng) if self.around is None else ProbedCall(self, rng)

    async def close(self) -> None:
        """Flush, after calls have been let through: the service works, and the link is sound."""
        passed = 0

        async def is_closed() -> bool:
            nonlocal passed
            with suppress(BreakerOpen):
                async with AsyncExitStack() as stack:
                    for block in self.blocks():
                        await stack.enter_async_context(self.entered(block))
                    if self.plan["variant"] == "counts":
                        self.log.count(["calls"])
                passed += 1
            return passed == ENOUGH

        if not self.is_forked:
            await self.poll(is_closed, HEALED_S, "the service works, and calls stay refused")
        await self.flush(self.breaker)
        await self.end(self.breaker)
        if self.around is not None:
            await self.end(self.around)


if __name__ == "__main__":
    Client(Breakers).run()
