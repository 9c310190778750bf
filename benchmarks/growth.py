"""How the cost of a call grows: with keys in use, threads, limits in a call, and three shards.

All combinations, of calls that are admitted, under `direct`. Client and servers share one core.
Calls per second are those of a second of that core's work for client and servers: so many it makes
when nothing else runs on it, and other load on the machine hardly changes the figure.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks import peers
from benchmarks.measure import Quartiles, Trial, error_text, log, run_rounds
from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import last_core, pinned, running
from distwindow import Limit, Limiter
from tests.servers import Cluster

KEYS = (1, 10, 100, 1_000, 100_000)
THREADS = (1, 8, 64)
LIMITS = (1, 2, 4)
PLACES = ("one server", "three shards")
DAY_S = 86_400
"""Windows of days, so that hardly any run meets the beginning of a bucket."""
FEW_KEYS = 1_000
"""Up to so many keys are called before a trial, so that they are cached as after a long use."""
WARM_CALLS = 20
"""Calls of a thread that are not timed, in which it connects to every shard."""


def name_of(place: str, limits: int, threads: int, keys: int) -> str:
    parts = ((limits, "limit"), (threads, "thread"), (keys, "key"))
    counts = ", ".join(f"{count:,} {noun}{'s' * (count > 1)}" for count, noun in parts)
    return f"{place}, {counts}"


def limits_of(count: int) -> list[Limit]:
    """Return limits of 1, 2, 4 and 8 days."""
    return [Limit(10**10, per=DAY_S * 2**number) for number in range(count)]


class Calls:
    """The calls of threads on keys, of a limiter that stays open through all rounds."""

    def __init__(
        self,
        limiter: Limiter,
        servers: list[Socket],
        keys: list[str],
        threads: int,
        seconds: float,
    ) -> None:
        self._acquire, self._servers = limiter.try_acquire, servers
        self._keys, self._threads, self._seconds = keys, threads, seconds
        self._random = random.Random(len(keys))
        self.rates: list[float] = []
        """Calls per second of the core, of each trial."""
        self.scripts: list[float] = []
        """Script calls per call, of each trial: less than one where threads share them."""

    def cpu_us(self) -> float:
        """Return the µs of processor time of one call."""
        if len(self._keys) <= FEW_KEYS:
            for key in self._keys:
                self._acquire(key)
        barrier = threading.Barrier(self._threads + 1)
        made, errors, end = [0] * self._threads, list[str](), [0.0]

        def work(number: int, names: Iterator[str]) -> None:
            acquire, clock, count = self._acquire, time.perf_counter, 0
            try:
                try:
                    for _ in range(WARM_CALLS):
                        acquire(next(names))
                finally:
                    barrier.wait()
                    barrier.wait()
                for name in names:
                    if clock() >= end[0]:
                        break
                    if not acquire(name):
                        raise RuntimeError(f"{name} was refused")
                    count += 1
            except Exception as error:
                errors.append(error_text(error))
            made[number] = count

        first, share = self._random.randrange(len(self._keys)), len(self._keys) / self._threads
        workers = [
            threading.Thread(target=work, args=(number, self._from(first + int(number * share))))
            for number in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        barrier.wait()
        scripts, servers_s = self._script_calls(), self._servers_s()
        end[0], began_s = time.perf_counter() + self._seconds, time.process_time()
        barrier.wait()
        for worker in workers:
            worker.join()
        client_s, servers_s = time.process_time() - began_s, self._servers_s() - servers_s
        if errors:
            raise RuntimeError(errors[0])
        self.rates.append(sum(made) / (client_s + servers_s))
        self.scripts.append((self._script_calls() - scripts) / sum(made))
        return client_s * 1e6 / sum(made)

    def _script_calls(self) -> int:
        return sum(server.script_calls()[0] for server in self._servers)

    def _servers_s(self) -> float:
        """Return the processor time of the servers until now, seconds."""
        infos = [server.info("cpu") for server in self._servers]
        return sum(float(one["used_cpu_user"]) + float(one["used_cpu_sys"]) for one in infos)

    def _from(self, at: int) -> Iterator[str]:
        """Return the keys from this number on, again and again."""
        size = len(self._keys)
        while True:
            yield self._keys[at % size]
            at += 1


def run(quick: bool) -> Section:
    section = Section("growth", "how the cost of a call grows")
    seconds, rounds = (0.1, 3) if quick else (0.2, 9)
    keys = [f"user:{number}" for number in range(max(KEYS))]
    random.Random(0).shuffle(keys)
    combinations = list(itertools.product(PLACES, LIMITS, THREADS, KEYS))
    core = last_core()
    with running(core) as server, pinned(core), ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        ports = [server.port], [node.port for node in cluster.nodes]
        limiters: dict[tuple[str, int], Limiter] = {}
        servers: dict[str, list[Socket]] = {}
        for place, url, its_ports in zip(PLACES, (server.url, cluster.url), ports, strict=True):
            servers[place] = [stack.enter_context(Socket(port)) for port in its_ports]
            for count in LIMITS:
                limiter = Limiter(url, limits_of(count), timeout=peers.TIMEOUT_S)
                limiters[place, count] = stack.enter_context(limiter)
            log(f"growth: the first call on each of {len(keys):,} keys, {place}")
            for key in keys:  # of the most limits, which are those of the others, too
                limiters[place, max(LIMITS)].try_acquire(key)
        calls = {
            name_of(place, limits, threads, count): Calls(
                limiters[place, limits], servers[place], keys[:count], threads, seconds
            )
            for place, limits, threads, count in combinations
        }
        trials: dict[str, Trial] = {name: one.cpu_us for name, one in calls.items()}
        results = run_rounds("growth", trials, rounds)
    base = name_of(PLACES[0], LIMITS[0], THREADS[0], KEYS[0])
    for name in trials:
        if {name, base} <= results.values.keys():
            us, rate = results.stat(name), Quartiles.of(calls[name].rates)
            section.add(
                name,
                results.ratio(name, base),
                detail=f"{us.median:.2f} µs ({us.low:.2f}..{us.high:.2f}) of the client, "
                f"{rate.median:,.0f} calls/s ({rate.low:,.0f}..{rate.high:,.0f}), "
                f"{statistics.median(calls[name].scripts):.2f} script calls",
            )
    section.add_failures(results.errors)
    return section
