"""What is decided without asking the store each time: leases, remembered refusals, periodic sync.

The calls of one thread and of eight, the commands that Redis still sees, bytes per key, a flood of
keys, and a fleet of processes over one server: how fast, and how far from the limit.
"""

from __future__ import annotations

import multiprocessing
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from benchmarks import finals, inprocess, peers, threads
from benchmarks.measure import Stat, percentile, rounds, said, say
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, running
from distwindow import Limit, Limiter

KEY = "user:42"
FLOOR = inprocess.FLOOR
HIT = Target(3)
OVER_REDIS = Target(20, at_least=True)
"""What "tens of times faster" means here."""
SCALING = Target(1, at_least=True)
FEW_COMMANDS = Target(100, at_least=True)
"""Admissions per command: less than ten commands for 1,000 of them."""
FLAT = Target(1.1)
UNHURT = Target(1.5)
EXACT = Target(1)
USED = Target(0.99, at_least=True)

LEASED, DENIED, EVENTUAL = "leased hit", "remembered refusal", "eventual hit"
MODES = ("direct", "leased", "eventual")
HIGH = Limit("100000/second")
NEVER = Limit("1/hour")
_MAX_WARM = 200_000


def _limiter(server: Server, mode: str, limit: object, **more: object) -> Limiter:
    options: dict[str, object] = {"consistency": mode, "timeout": peers.PATIENCE, **more}
    return Limiter(server.url, limit, **options)  # type: ignore[arg-type]


def _commands(server: Server) -> int:
    """Script calls that clients have sent so far; what scripts call does not count."""
    with Socket(server.port) as connection:
        stats = connection.info("commandstats")
    return sum(
        int(stats[f"cmdstat_{name}"].split(",")[0].removeprefix("calls="))
        for name in ("eval", "evalsha")
        if f"cmdstat_{name}" in stats
    )


# -- one call -------------------------------------------------------------------------------------


@contextmanager
def _hits(
    server: Server, mode: str, quota: peers.Quota, source: str
) -> Iterator[Callable[[], peers.Acquire]]:
    """Makes ready a call that is answered from `source`, which it has to say."""
    with _limiter(server, mode, quota.limit(), prefix=source) as limiter:
        acquire = limiter.try_acquire

        def ready() -> peers.Acquire:
            for _ in range(_MAX_WARM):
                if all([acquire(KEY).source == source for _ in range(100)]):
                    return acquire
            raise RuntimeError(f"no decision came from {source!r}")

        yield ready


@contextmanager
def _plain(opened: object) -> Iterator[Callable[[], peers.Acquire]]:
    with opened as acquire:  # type: ignore[attr-defined]
        peers.check(acquire(KEY) for _ in range(200))
        yield lambda: acquire


def _ns(ready: Callable[[], peers.Acquire], calls: int) -> float:
    """ns per call, what the worker does meanwhile included."""
    acquire, numbers = ready(), range(calls)
    start = time.perf_counter_ns()
    for _ in numbers:
        acquire(KEY)
    return (time.perf_counter_ns() - start) / calls


def _fastest(server: Server, section: Section) -> list[peers.Peer]:
    """The best settings of each peer over Redis, in one thread."""
    everybody = peers.sync_peers(pools=(peers.SHARED,))

    def rate(peer: peers.Peer) -> float:
        with _plain(peer.open(server.url, peers.AMPLE)) as ready:
            return 1e9 / _ns(ready, 500)

    heats = rounds("near, heat", {p.name: partial(rate, p) for p in everybody}, 1)
    section.failed(heats.errors, "heat: ")
    return finals.chosen(everybody, heats)


def _calls(section: Section, quick: bool) -> None:
    calls, few, count = (3_000, 200, 11) if quick else (10_000, 500, 25)
    errors: dict[str, str] = {}
    with running() as server, ExitStack() as stack:
        chosen = _fastest(server, section)
        remote = [f"{peer.name}, over Redis" for peer in chosen]
        openers = {
            FLOOR: _plain(inprocess._floor()),
            LEASED: _hits(server, "leased", peers.AMPLE, "lease"),
            DENIED: _hits(server, "direct", peers.SCARCE, "deny_cache"),
            EVENTUAL: _hits(server, "eventual", peers.AMPLE, "local"),
            **{p.name: _plain(p.open("memory://", peers.AMPLE)) for p in peers.memory_peers()},
            **{
                name: _plain(peer.open(server.url, peers.AMPLE))
                for name, peer in zip(remote, chosen, strict=True)
            },
        }
        trials: dict[str, Callable[[], float]] = {}
        for name, opener in openers.items():
            try:
                ready = stack.enter_context(opener)
                ready()
                trials[name] = partial(_ns, ready, few if name in remote else calls)
            except Exception as error:
                errors[name] = said(error)
                say(f"near: {name} failed: {errors[name]}")
        results = rounds("near, one thread", trials, count)
    for name in sorted(results.values, key=results.median):
        section.add(
            f"one thread: {name}",
            1.0 if name == FLOOR else results.ratio(name, FLOOR),
            target=HIT if name in (LEASED, DENIED) else None,
            detail=f"{results.median(name):,.0f} ns per call",
        )
    ran = [name for name in remote if name in results.values]
    if ran:
        best = min(ran, key=results.median)
        for name in (LEASED, DENIED, EVENTUAL):
            section.add(
                f"one thread: calls in the time of the fastest peer's over Redis: {name}",
                results.ratio(best, name),
                target=OVER_REDIS if name != EVENTUAL else None,
                detail=f"{results.median(best) / 1000:,.1f} µs {best}",
            )
    section.failed({**errors, **results.errors}, "one thread: ")


# -- eight threads --------------------------------------------------------------------------------


def _threads(section: Section, quick: bool) -> None:
    seconds, count = (0.25, 5) if quick else (0.5, 11)
    one, many = "1 thread", f"{threads.THREADS} threads"
    for name, mode, quota, source, admitted in (
        (LEASED, "leased", peers.AMPLE, "lease", True),
        (DENIED, "direct", peers.SCARCE, "deny_cache", False),
        (EVENTUAL, "eventual", peers.AMPLE, "local", True),
    ):
        with running() as server, _hits(server, mode, quota, source) as ready:

            def trial(
                number: int,
                ready: Callable[[], peers.Acquire] = ready,
                admitted: bool = admitted,
            ) -> float:
                return threads._race([ready()] * number, admitted, seconds)

            results = rounds(
                f"near, {many}, {name}",
                {one: partial(trial, 1), many: partial(trial, threads.THREADS)},
                count,
            )
        if not results.errors:
            section.add(
                f"{many} on one key, over {one}: {name}",
                results.ratio(many, one),
                target=SCALING if name == LEASED else None,
                detail=f"{results.median(many):,.0f}/s, {one} {results.median(one):,.0f}/s",
            )
        section.failed(results.errors, f"{name}: ")


# -- commands and latencies -----------------------------------------------------------------------


def _demand(acquire: peers.Acquire, rate: float | None, until: float) -> Iterator[object]:
    """What calls answer that come at `rate` per second, or without a pause; late ones at once."""
    clock = time.time
    if rate is None:
        while clock() < until:
            for _ in range(32):
                yield acquire(KEY)
        return
    start, made = clock(), 0
    while (now := clock()) < until:
        due = int((now - start) * rate)
        if made == due:
            time.sleep(0.0005)
        for _ in range(min(due - made, 1_000)):
            yield acquire(KEY)
            made += 1


def _timed(acquire: peers.Acquire, times: list[int]) -> peers.Acquire:
    clock = time.perf_counter_ns

    def timed(key: str) -> object:
        start = clock()
        decision = acquire(key)
        times.append(clock() - start)
        return decision

    return timed


def _hot_key(section: Section, quick: bool) -> None:
    """One process that calls at half the limit, or as fast as it can."""
    seconds, count = (0.5, 3) if quick else (1.0, 9)
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    pooled: dict[str, list[int]] = {mode: [] for mode in MODES}
    with running() as server, ExitStack() as stack:
        opened = {
            mode: stack.enter_context(_limiter(server, mode, HIGH, prefix=mode)) for mode in MODES
        }

        def trial(mode: str) -> float:
            times: list[int] = []
            before = _commands(server)
            acquire = _timed(opened[mode].try_acquire, times)
            start = time.time()
            verdicts = map(bool, _demand(acquire, HIGH.amount / 2, start + seconds))
            admitted = sum(verdicts)
            took = time.time() - start
            opened[mode].flush()
            spent[mode].append(admitted / (_commands(server) - before))
            rates[mode].append(admitted / took)
            pooled[mode].extend(times)
            return percentile(sorted(times), 0.5)

        results = rounds("near, a hot key", {mode: partial(trial, mode) for mode in MODES}, count)
    for mode in results.values:
        each = Stat.of(spent[mode])
        section.add(
            f"admissions per command on a hot key, {HIGH}: {mode}",
            each,
            target=FEW_COMMANDS if mode == "leased" else None,
            detail=f"{1000 / each.median:,.1f} commands per 1,000 admissions "
            f"at {Stat.of(rates[mode]).median:,.0f}/s",
        )
    for mode in results.values:
        ordered = sorted(pooled[mode])
        p50, p99, p999 = (percentile(ordered, share) / 1000 for share in (0.5, 0.99, 0.999))
        section.add(
            f"direct's p50 on a hot key, over the p50 of: {mode}",
            1.0 if mode == "direct" else results.ratio("direct", mode),
            detail=f"p50 {p50:.1f}  p99 {p99:.1f}  p99.9 {p999:.1f} µs",
        )
    section.failed(results.errors, "a hot key: ")


# -- many keys ------------------------------------------------------------------------------------


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Bytes that Python has allocated since it began."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _touch(limiter: Limiter, mode: str, keys: Iterable[str]) -> None:
    """Have the limiter keep something of each key: a refusal, a lease's demand, counts."""
    acquire = limiter.try_acquire
    for key in keys:
        acquire(key)
        if mode == "direct":
            acquire(key)


def _memory(section: Section, quick: bool) -> None:
    """Keys are the caller's, so they do not count."""
    count = 2_000 if quick else 20_000
    for mode in MODES:
        say(f"near, memory: {mode}")
        keys = [f"user:{number}" for number in range(count)]
        with running() as server, _limiter(server, mode, NEVER) as limiter:
            limiter.try_acquire(KEY)
            with _traced() as allocated:
                _touch(limiter, mode, keys)
                limiter.flush()
                size = allocated() / count
            section.add(
                f"bytes per key kept in the process: {mode}",
                size,
                detail=f"{count:,} keys, one limit, nothing left to tell; the remembered command "
                "of the key included",
                unit="B",
            )


def _flood(section: Section, quick: bool) -> None:
    """A hot key among keys that come once, in turns."""
    for mode in ("leased",) if quick else MODES:
        # The book of commands is full at 32,768 keys.
        most, flood = (10_000, 100_000) if mode == "leased" and not quick else (2_000, 50_000)
        limit = NEVER if mode == "direct" else peers.AMPLE.limit()
        with running() as server, _limiter(server, mode, limit, max_local_keys=most) as limiter:
            say(f"near, flood: {mode}, memory")
            sizes = []
            with _traced() as allocated:
                for part in range(10):
                    keys = range(part * flood // 10, (part + 1) * flood // 10)
                    _touch(limiter, mode, (f"once:{number}" for number in keys))
                    limiter.flush()
                    sizes.append(allocated())
            section.add(
                f"a flood of keys: memory at its end, over the most in its first 70 %: {mode}",
                sizes[-1] / max(sizes[:7]),
                target=FLAT,
                detail=f"{sizes[-1] / 1e6:.1f} MB; {flood:,} keys, max_local_keys={most:,}",
            )
            say(f"near, flood: {mode}, latency")
            calm, flooded = _in_turns(limiter, mode, flood // 5)
        (p50, p99), (calm50, calm99) = (
            [percentile(sorted(times), share) / 1000 for share in (0.5, 0.99)]
            for times in (flooded, calm)
        )
        section.add(
            f"a flood of keys: p99 of a hot key's calls, over that without it: {mode}",
            p99 / calm99,
            target=UNHURT,
            detail=f"p50 {p50:.1f}  p99 {p99:.1f} µs; without p50 {calm50:.1f}  p99 {calm99:.1f}",
        )


def _in_turns(limiter: Limiter, mode: str, count: int) -> tuple[list[int], list[int]]:
    """ns of a hot call that follows one on a known key, and one that follows a key never seen.

    Both of these ask the store, if the mode does. In stretches by turns, so that whatever else the
    machine does falls on both.
    """
    clock, acquire = time.perf_counter_ns, limiter.try_acquire
    known: Callable[[str], object] = acquire if mode == "eventual" else limiter.stats
    found: tuple[list[int], list[int]] = ([], [])
    for stretch in range(20):
        times = found[stretch % 2]
        for number in range(count // 10):
            if stretch % 2:
                _touch(limiter, mode, [f"new:{stretch}:{number}"])
            else:
                known(f"known:{number % 10}")
            start = clock()
            acquire(KEY)
            times.append(clock() - start)
    return found


# -- a fleet --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What one process saw: admissions by store bucket, and all its decisions."""

    admitted: Counter[int] = field(default_factory=Counter)
    decisions: int = 0


@dataclass(frozen=True)
class Plan:
    """What one process does: calls as fast as it can, or at `rate` per second."""

    url: str
    mode: str
    limit: Limit
    share: float | None
    prefix: str
    rate: float | None
    begin: float
    seconds: float


def _member(plan: Plan) -> Tally:
    """In a process of its own: call, and log each admission in the bucket of its moment."""
    width, tally = plan.limit.bucket_ms, Tally()
    with Limiter(
        plan.url,
        plan.limit,
        consistency=plan.mode,  # type: ignore[arg-type]
        share=plan.share,
        prefix=plan.prefix,
        timeout=peers.PATIENCE,
    ) as limiter:
        limiter.stats(f"not {KEY}")  # connected: one command
        pause = plan.begin - time.time()
        if pause < 0:
            raise RuntimeError("this process came too late")
        time.sleep(pause)
        admitted, decisions = tally.admitted, 0
        until = plan.begin + plan.seconds
        for decision in _demand(limiter.try_acquire, plan.rate, until):
            decisions += 1
            if decision:
                admitted[decision.now_ms // width] += 1  # type: ignore[attr-defined]
        tally.decisions = decisions
    return tally


def _idle(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class Outcome:
    """What a fleet came to. Windows are those aligned to the buckets; parts of the limit."""

    rate: float
    """Decisions per second."""
    fullest: float
    mean: float
    """Of the windows after the first."""
    commands: float
    """Per 1,000 admissions."""

    def __str__(self) -> str:
        return (
            f"fullest window {100 * self.fullest:,.1f} %, mean {100 * self.mean:,.1f} % of the "
            f"limit, {self.commands:,.1f} commands per 1,000"
        )


def _fleet_run(server: Server, pool: ProcessPoolExecutor, number: int, plan: Plan) -> Outcome:
    server.flush()
    before = _commands(server)
    tallies = [task.result() for task in [pool.submit(_member, plan) for _ in range(number)]]
    commands = _commands(server) - before - number
    admitted: Counter[int] = sum((tally.admitted for tally in tallies), Counter())
    decisions = sum(tally.decisions for tally in tallies)
    limit = plan.limit
    # A bucket that is cut by the end, and the one in which everybody began, are in no window that
    # counts for the mean.
    first = int(plan.begin * 1000) // limit.bucket_ms + 1
    last = int((plan.begin + plan.seconds) * 1000) // limit.bucket_ms - 1

    def window(start: int) -> int:
        return sum(admitted[start + i] for i in range(limit.buckets))

    fullest = max(window(start) for start in range(first - limit.buckets, last + 2))
    later = [window(start) for start in range(first + limit.buckets, last - limit.buckets + 2)] or [
        0
    ]
    return Outcome(
        decisions / plan.seconds,
        fullest / limit.amount,
        sum(later) / len(later) / limit.amount,
        commands * 1000 / max(1, sum(admitted.values())),
    )


def _fleet(section: Section, quick: bool) -> None:
    seconds = 2.5 if quick else 5.0
    limits = [Limit(text) for text in ("100/second", "10000/second", "100000/second")]
    context = multiprocessing.get_context("spawn")
    most = 4
    exact: dict[str, list[Outcome]] = {"direct": [], "leased": []}
    used: list[Outcome] = []
    with running() as server, ProcessPoolExecutor(most, mp_context=context) as pool:
        for task in [pool.submit(_idle, 1.0) for _ in range(most)]:
            task.result()
        for processes in (1, most):
            for limit in limits[::2] if quick else limits:
                base: float | None = None
                for mode, share in _shapes(processes):
                    name = mode if share is None else f"{mode}, share 1/{processes}"
                    what = f"{processes} processes" if processes > 1 else "1 process"
                    label = f"{what}, {limit}: {name}"
                    say(f"near, fleet: {label}")
                    try:
                        runs = []
                        for rate in (None, 2 * limit.amount / processes):
                            plan = Plan(
                                server.url, mode, limit, share, "fleet", rate,
                                time.time() + 0.3, seconds,
                            )  # fmt: skip
                            runs.append(_fleet_run(server, pool, processes, plan))
                    except Exception as error:
                        section.failed({label: said(error)})
                        continue
                    pressing, paced = runs
                    exact.get(mode, []).extend(runs)
                    if mode == "leased":
                        used.append(paced)
                    base = base or pressing.rate
                    section.add(
                        f"{label}: decisions per second, over direct's",
                        pressing.rate / base,
                        detail=f"{pressing.rate:,.0f}/s; pressing: {pressing}; "
                        f"at twice the limit: {paced}",
                    )
    for mode, outcomes in exact.items():
        section.add(
            f"the fullest window of all these runs, over the limit: {mode}",
            max(outcome.fullest for outcome in outcomes),
            target=EXACT,
        )
    section.add(
        "the least mean at twice the limit, over the limit: leased",
        min(outcome.mean for outcome in used),
        target=USED,
    )


def _shapes(processes: int) -> Sequence[tuple[str, float | None]]:
    plain: list[tuple[str, float | None]] = [(mode, None) for mode in MODES]
    return plain if processes == 1 else [*plain, ("eventual", 1 / processes)]


def run(quick: bool) -> Section:
    section = Section("near", "decided nearby: leases, remembered refusals, periodic sync")
    for part in (_calls, _threads, _hot_key, _memory, _flood, _fleet):
        part(section, quick)
    return section
