"""Fleets at work: by a script of single steps, where anything may happen in between, or by a
timetable, where everything takes its time.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from hypothesis import strategies as st

from distwindow.consistency.leased import Leased
from distwindow.core.decision import Decision
from distwindow.core.limit import Limit
from distwindow.core.stats import window_at
from distwindow.operations.command_cache import CommandCache
from distwindow.operations.completion import Completion
from distwindow.operations.key_operations import refund, stats
from distwindow.operations.steps import Pipeline
from distwindow.operations.strategy import Strategy
from distwindow.protocol.commands import Command, Read
from tests.fleet import Local, Process, Way, World

FAR = float("inf")
Mode = Callable[[CommandCache, Local], Strategy]
Step = tuple[Any, ...]


class Admission(NamedTuple):
    """What a call was given, and when on the store's clock."""

    who: int
    key: str
    at: int
    cost: int
    source: str
    counted_in: int = 0
    """Where the process itself counts it: the start of its bucket, ms."""


class Recorded(World):
    """Remembers what the store has executed."""

    def __init__(self, start_ms: float) -> None:
        super().__init__(start_ms)
        self.log: list[tuple[Command[Any], Any]] = []

    def execute(self, command: Command[Any]) -> Any:
        reply = super().execute(command)
        self.log.append((command, reply))
        return reply


class Trip(NamedTuple):
    """A dialogue under way, and whose."""

    who: int
    way: Way
    key: str | None
    """What is called; None for the worker and for whoever asks for statistics."""
    cost: int


class Crowd:
    """Processes that do what a script says. Steps name a process or a trip by any whole number."""

    def __init__(
        self,
        limits: Any,
        mode: Mode,
        starts: Iterable[tuple[float, int]],
        *,
        start_ms: float,
        rates: Sequence[float] = (1.0,),
        at_fork: Callable[[Strategy], None] = lambda near: near.after_fork(),
    ) -> None:
        """`starts`: for each process what its monotonic clock shows, and how wrong its wall is;
        `rates`: how fast these clocks run, for each process by turns.
        """
        self.world = Recorded(start_ms)
        self.limits: tuple[Limit, ...] = CommandCache("fleet", limits).limits
        self.trips: list[Trip] = []
        self.admitted: list[Admission] = []
        self.refused: list[tuple[int, str, Decision]] = []
        self.nearby: Callable[[int, str, Decision], None] = lambda who, key, decision: None
        """Told of each decision made without the store, when it is made."""
        self.sent: list[tuple[int, Command[Any]]] = []
        """What each process has asked of the store, whether it came there or not."""
        self.delivered: list[tuple[int, Command[Any], Any]] = []
        """The replies that came back."""
        self._decisions: list[tuple[int, Decision]] = []
        self._limits, self._mode, self._at_fork = limits, mode, at_fork
        self.alive: dict[int, Process] = {}
        self._names = itertools.count()
        self._starts = list(starts)
        self._rates = itertools.cycle(rates)
        for start in self._starts:
            self._join(start)

    def _join(self, start: tuple[float, int]) -> None:
        shows, skew_ms = start
        origin = self.world.monotonic() - shows
        made = Process(
            self.world, self._limits, self._mode, origin=origin, skew_ms=skew_ms,
            rate=next(self._rates),
        )  # fmt: skip
        self.alive[next(self._names)] = made

    def play(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.do(step)

    def do(self, step: Step) -> None:
        verb, *rest = step
        getattr(self, f"_{verb}")(*rest)

    # -- steps ------------------------------------------------------------------------------------

    def _calls(self, who: int, key: str, cost: int, times: int) -> None:
        """Calls one after the other, whose trips take no time."""
        for _ in range(times):
            way = self._sets_out(who, key, cost)
            if way is not None:
                self._answer(-1)

    def _rushes(self, who: int, key: str) -> None:
        """Calls until one is refused."""
        refused = len(self.refused)
        for _ in range(100):
            self._calls(who, key, 1, 1)
            if len(self.refused) > refused:
                return

    def _sets_out(self, who: int, key: str, cost: int) -> Way | None:
        """A call, whose trip is moved by later steps."""
        name = self._name(who)
        found = self.alive[name].call(key, cost)
        if isinstance(found, Way):
            self._under_way(Trip(name, found, key, cost))
            return found
        self.nearby(name, key, found)
        self._told(name, key, found, int(self.world.ms))
        return None

    def _works(self, who: int) -> None:
        """The worker comes; whoever comes while it is away waits for it."""
        name = self._name(who)
        if all(trip.who != name or trip.key is not None for trip in self.trips):
            self._under_way(Trip(name, self.alive[name].work(), None, 0))

    def _rests(self, ms: float) -> None:
        """Time passes, and then the workers come and go at once."""
        self.world.ms += ms
        for who in range(len(self.alive)):
            before = len(self.trips)
            self._works(who)
            while len(self.trips) > before:
                self._answer(-1)

    def _asks(self, who: int, key: str) -> None:
        """Somebody wants statistics, which tells first what is not told."""
        name = self._name(who)
        process = self.alive[name]
        charges = CommandCache("fleet", self._limits).acquire(key).charges
        dialogue = stats(process.near, charges, process.clock)
        self._under_way(Trip(name, Way(self.world, dialogue), None, 0))

    def _refunds(self, which: int) -> None:
        """A caller gives back what it got, at once."""
        if self._decisions:
            name, decision = self._decisions.pop(which % len(self._decisions))
            if name in self.alive:
                process = self.alive[name]
                way = Way(self.world, refund(process.near, decision, process.clock))
                while not way.done:
                    way.answer()

    def _reach(self, which: int) -> None:
        if self.trips:
            self.trips[which % len(self.trips)].way.reach()

    def _answer(self, which: int) -> None:
        if self.trips:
            trip = self.trips.pop(which % len(self.trips))
            trip.way.reach()
            self.delivered += [(trip.who, *exchange) for exchange in replies_of(trip.way)]
            trip.way.answer()
            self._under_way(trip)

    def _lose(self, which: int) -> None:
        if self.trips:
            trip = self.trips.pop(which % len(self.trips))
            trip.way.lose()
            self._under_way(trip)

    def _passes(self, ms: float) -> None:
        self.world.ms += ms

    def _turns(self, edge: float, limit: int = 0) -> None:
        """The next bucket begins, but for `edge` ms."""
        width = self.limits[limit % len(self.limits)].bucket_ms
        self.world.ms = max(self.world.ms, (self.world.ms // width + 1) * width + edge)

    def _dies(self, who: int) -> None:
        """Killed; another takes its place."""
        name = self._name(who)
        self.trips = [trip for trip in self.trips if trip.who != name]
        del self.alive[name]
        self._join(self._starts[name % len(self._starts)])

    def _forks(self, who: int) -> None:
        """A copy of everything but the trips, whose threads stay with the parent."""
        if len(self.alive) < 6:
            child = forked(self.alive[self._name(who)], self.world)
            self._at_fork(child.near)
            self.alive[next(self._names)] = child

    def settle(self, rounds: int = 6) -> None:
        """All trips come home, and the workers carry what there is, at once."""
        self._bring_home()
        for _ in range(rounds):
            for who in range(len(self.alive)):
                self._works(who)
                self._bring_home()

    def close(self) -> None:
        """Every process ends in peace."""
        self._bring_home()
        for process in self.alive.values():
            way = process.work(last=True)
            while not way.done:
                way.answer()

    def held(self, key: str, limit: Limit, *, blocked: bool = False) -> dict[int, int]:
        """What the store has in the window, by the number of the bucket; empty buckets too."""
        charges = CommandCache("fleet", self._limits).acquire(key).charges
        (ring,) = [charge for charge in charges if charge.limit == limit]
        (state,), now = self.world.store.execute(Read((ring,)))
        seen = window_at(state, limit, now).buckets
        counts = {b.start // limit.bucket_ms: b.blocked if blocked else b.passed for b in seen}
        newest = now // limit.bucket_ms
        return {n: counts.get(n, 0) for n in range(newest - limit.span + 1, newest + 1)}

    def _bring_home(self) -> None:
        for _ in range(1000):
            if not self.trips:
                return
            self._answer(0)
        raise AssertionError(f"these trips never end: {self.trips}")

    # -- what comes of them -----------------------------------------------------------------------

    def _name(self, who: int) -> int:
        names = list(self.alive)
        return names[who % len(names)]

    def _under_way(self, trip: Trip) -> None:
        if not trip.way.done:
            self.trips.append(trip)
            self.sent += [(trip.who, command) for command in commands_of(trip.way)]
        elif trip.key is not None and isinstance(trip.way.result, Decision):
            self._told(trip.who, trip.key, trip.way.result, trip.way.result.now_ms)

    def _told(self, name: int, key: str, decision: Decision, at: int) -> None:
        if decision.allowed:
            where = counted_in(self.alive[name], key)
            one = Admission(name, key, at, decision.cost, decision.source, where)
            self.admitted.append(one)
            self._decisions.append((name, decision))
        else:
            self.refused.append((name, key, decision))


def counted_in(process: Process, key: str) -> int:
    """The start of the bucket that this process takes for the present one."""
    near: Any = process.near
    cell = near._get(key)
    return 0 if cell is None else int(cell.bucket_start)


def commands_of(way: Way) -> tuple[Command[Any], ...]:
    """What a trip asks now."""
    return way.effect.commands if isinstance(way.effect, Pipeline) else (way.effect,)


def replies_of(way: Way) -> list[tuple[Command[Any], Any]]:
    """What the store has executed for a trip whose reply is still on its way."""
    replies = way._reply if isinstance(way.effect, Pipeline) else (way._reply,)
    return list(zip(commands_of(way), replies, strict=True))


def forked(process: Process, world: World) -> Process:
    """What `os.fork` leaves in the child, before anybody tells it what it is."""
    near: Any = process.near
    cells = near._key_states
    memo: dict[int, Any] = {
        id(world): world,
        id(near._command_cache): near._command_cache,
        id(cells.counter_lock): threading.Lock(),
        id(cells.state_lock): threading.RLock(),
        id(near._collect_lock): threading.RLock(),
        id(near._seq): itertools.count(1000),
    }
    child = copy.copy(process)
    child.clock = copy.copy(process.clock)
    memo[id(process.clock)] = child.clock
    known = [*cells.all(), *near._dirty]
    if isinstance(near, Leased):
        memo.update((id(gate), Completion()) for gate in near._lease_fetches)
        known += [
            *near._prefetch_queue,
            *near._review_queue,
            *(look[2] for look in near._review_heap),
        ]
        memo[id(near._heap_order)] = itertools.count(1_000_000)
    for cell in known:
        memo[id(cell.charges)] = cell.charges
        if getattr(cell, "lease_fetch", None) is not None:
            memo[id(cell.lease_fetch)] = Completion()
    twin: Any = copy.deepcopy(near, memo)
    twin._key_states.get = twin._get = twin._key_states._states.get
    twin._key_states.touch = twin._touch = twin._key_states._states.move_to_end
    child.near = twin
    return child


def steps(
    keys: tuple[str, ...],
    *,
    also: Iterable[st.SearchStrategy[Step]] = (),
    without: tuple[str, ...] = (),
    dearest: int = 3,
    most: int = 60,
) -> st.SearchStrategy[list[Step]]:
    """Scripts, in which a script is mostly calls, time and workers."""
    anyone, key = st.integers(0, 5), st.sampled_from(keys)
    which, cost = st.integers(-3, 3), st.integers(1, dearest)
    one = st.one_of(
        st.tuples(st.just("calls"), anyone, key, st.just(1), st.integers(1, 30)),
        st.tuples(st.just("calls"), anyone, key, cost, st.integers(1, 4)),
        st.tuples(st.just("rushes"), anyone, key),
        st.tuples(st.just("sets_out"), anyone, key, cost),
        st.tuples(st.just("works"), anyone),
        st.tuples(st.sampled_from(["reach", "answer", "answer", "lose"]), which),
        st.tuples(st.just("rests"), st.sampled_from([0.0, 4.0, 30.0, 253.0, 253.0, 900.0])),
        st.tuples(st.just("rests"), st.just(253.0)),
        st.tuples(st.just("passes"), st.sampled_from([0.2, 1.0, 2.5, 10.0, 60.0, 251.0, 1100.0])),
        st.tuples(st.just("turns"), st.sampled_from([-5.0, -1.5, -0.5, 0.0, 0.5, 3.0])),
        *also,
    )
    scripts = st.lists(one, min_size=1, max_size=most)
    return scripts.map(lambda script: [step for step in script if step[0] not in without])


# -- windows --------------------------------------------------------------------------------------


def buckets_of(admitted: Iterable[Admission], width: int) -> Counter[int]:
    """Permits by the number of their bucket."""
    counted: Counter[int] = Counter()
    for one in admitted:
        counted[one.at // width] += one.cost
    return counted


def most_in_run(counted: Counter[int], buckets: int) -> int:
    """The most in any run of so many buckets."""
    return max(
        (sum(counted[number - i] for i in range(buckets)) for number in list(counted)), default=0
    )


def most_in_any(admitted: Iterable[Admission], span_ms: float) -> int:
    """The most in any span [t, t + span_ms)."""
    most = held = 0
    window: list[Admission] = []
    for one in sorted(admitted, key=lambda one: one.at):
        window.append(one)
        held += one.cost
        while one.at - window[0].at >= span_ms:
            held -= window.pop(0).cost
        most = max(most, held)
    return most


# -- time that passes -----------------------------------------------------------------------------


class Arrival(NamedTuple):
    at: float
    """ms since the beginning."""
    who: int


def poisson(rates: Iterable[float], seconds: float, chance: random.Random) -> list[Arrival]:
    """Arrivals at these rates per second, one for each process."""
    arrivals = []
    for who, rate in enumerate(rates):
        at = chance.expovariate(rate / 1000) if rate else FAR
        while at < seconds * 1000:
            arrivals.append(Arrival(at, who))
            at += chance.expovariate(rate / 1000)
    return sorted(arrivals)


class Timetable:
    """Processes whose trips take `delay_ms` each way and whose workers come when they are due."""

    def __init__(
        self, world: World, processes: list[Process], delay_ms: Callable[[], float]
    ) -> None:
        self.world, self.processes, self._delay = world, processes, delay_ms
        self.admitted: list[Admission] = []
        self._began = world.ms
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._away = [False] * len(processes)
        self._expected = [FAR] * len(processes)

    def play(self, arrivals: Iterable[Arrival], key: str = "k") -> None:
        """Calls of cost 1."""
        for at, who in arrivals:
            self.pass_until(at)
            found = self.processes[who].call(key)
            if isinstance(found, Way):
                self._travel(found, partial(self._back, who))
            else:
                self._told(who, found)
            self._expect(who)

    def pass_until(self, at: float) -> None:
        """Time passes until `at`, ms since the beginning."""
        until = self._began + at
        while self._events and self._events[0][0] <= until:
            self.world.ms, _, do = heappop(self._events)
            do()
        self.world.ms = until

    def _back(self, who: int, way: Way) -> None:
        self._told(who, way.result)

    def _told(self, who: int, decision: Any) -> None:
        if isinstance(decision, Decision):
            if decision.allowed:
                key = str(decision.key)
                where = counted_in(self.processes[who], key)
                source = decision.source
                at = decision.now_ms if source == "store" else int(self.world.ms)
                one = Admission(who, key, at, decision.cost, source, where)
                self.admitted.append(one)
            self._expect(who)

    def _at(self, at: float, do: Callable[[], None]) -> None:
        heappush(self._events, (at, next(self._order), do))

    def _travel(self, way: Way, done: Callable[[Way], None]) -> None:
        if way.done:
            done(way)
            return

        def answered() -> None:
            way.answer()
            self._travel(way, done)

        def reached() -> None:
            way.reach()
            self._at(self.world.ms + self._delay(), answered)

        self._at(self.world.ms + self._delay(), reached)

    def _expect(self, who: int) -> None:
        """The worker of this process is to come when it is due."""
        if self._away[who]:
            return
        # A little later, as floats are: early by nothing at all, it would find nothing to do.
        at = max(self.processes[who].due(), self.world.ms) + 0.01
        if at < self._expected[who]:
            self._expected[who] = at
            self._at(at, lambda: self._come(who))

    def _come(self, who: int) -> None:
        self._expected[who] = FAR
        if self._away[who]:
            return
        if self.processes[who].due() > self.world.ms:
            self._expect(who)
            return

        def back(way: Way) -> None:
            self._away[who] = False
            self._expect(who)

        self._away[who] = True
        self._travel(self.processes[who].work(), back)


class Simulated(NamedTuple):
    """A fleet that has had its time."""

    world: Recorded
    arrivals: list[Arrival]
    admitted: list[Admission]


def simulated(
    mode: Mode,
    limit: Limit,
    rates: list[float],
    seconds: float,
    *,
    seed: int,
    delay_ms: Callable[[random.Random], float] = lambda chance: 0.25,
    warm: float = 0.0,
) -> Simulated:
    """Poisson arrivals at these rates per second, one for each process. In the `warm` seconds
    before each calls once on another key, so that it has heard from the store.
    """
    world, chance = Recorded(1_700_000_040_000.3), random.Random(seed)
    origin = world.monotonic() - 50.0
    processes = [Process(world, limit, mode, origin=origin) for _ in rates]
    table = Timetable(world, processes, lambda: delay_ms(chance))
    if warm:
        firsts = [Arrival(chance.uniform(0, 250 * warm), who) for who in range(len(rates))]
        table.play(sorted(firsts), "elsewhere")
        table.pass_until(1000 * warm)
    arrivals = [Arrival(1000 * warm + at, who) for at, who in poisson(rates, seconds, chance)]
    table.play(arrivals)
    table.pass_until(1000 * (warm + seconds + 1))
    return Simulated(world, arrivals, [one for one in table.admitted if one.key == "k"])


def busiest(arrivals: list[Arrival], span_ms: float) -> int:
    """The most arrivals in a span of time."""
    times = [arrival.at for arrival in arrivals]
    return max((bisect_left(times, at + span_ms) - i for i, at in enumerate(times)), default=0)
