"""Outages of Redis, beside the peers: `python -m benchmarks.outages`.

For each outage, two processes of a contender call a limit that is shared. In each, one thread calls
a key whose limit is less than what both ask for, and one calls a new key each time: the server
then shows of each call whether it was counted. A thread calls each 10 ms, or as soon as its
last call has ended.

With `--write` the results become docs/make/outages.json and the tables of docs/outages.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import multiprocessing
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import distwindow
from benchmarks import report, server
from benchmarks.measure import error_text, log, percentile
from benchmarks.peers.base import Quota
from benchmarks.peers.libraries import (
    limits_item,
    no_retry,
    pyrate_bucket,
    pyrate_limiter,
    pyrate_script,
    throttled_quota,
)
from tests.servers import Blackhole, DropReply, Pass, Proxy, Refuse, SentinelSet, Silent, Standalone
from tests.servers.faults import Fault

ROOT = Path(__file__).resolve().parents[1]
JSON = ROOT / "docs" / "make" / "outages.json"
PAGE = ROOT / "docs" / "outages.md"

TIMEOUT_S = 0.25
HOT = Quota(100, 1)
EACH = Quota(10**6, 3600)
PROCESSES = 2
PERIOD_S = 0.01
BEFORE_S = 1.0
OUTAGE_S = 3.0
FIRST_FAILURES_S = 1.0
"""p50 and p99 are of calls after this time: the first ones of an outage may take a timeout."""
HEALED_S = 0.5
"""How long the store has to have decided all calls."""
NOT_HEALED_S = 10.0

# --------------------------------------------------------------------------------------------------
#
# The outages. Each is a context manager, which yields a scene.


class Scene(NamedTuple):
    url: str
    begin: Callable[[], object]
    end: Callable[[], object]
    server_url: Callable[[], str]
    """Where the counts are read afterwards."""


@contextmanager
def _faulty(fault: Fault, *, cut: bool = False) -> Iterator[Scene]:
    """The link has a fault. `cut`: open connections end when it begins."""
    with Standalone() as standalone, Proxy(standalone.port) as proxy:

        def begin() -> None:
            proxy.fault = fault
            if cut:
                proxy.cut()

        def end() -> None:
            proxy.fault = Pass()

        yield Scene(proxy.url, begin, end, lambda: standalone.url)


@contextmanager
def _stalled() -> Iterator[Scene]:
    with Standalone() as standalone:
        yield Scene(standalone.url, standalone.pause, standalone.resume, lambda: standalone.url)


@contextmanager
def _full() -> Iterator[Scene]:
    with Standalone() as standalone, standalone.client() as admin:
        yield Scene(
            standalone.url,
            lambda: admin.config_set("maxmemory", 1),
            lambda: admin.config_set("maxmemory", 0),
            lambda: standalone.url,
        )


@contextmanager
def _failover() -> Iterator[Scene]:
    with SentinelSet() as sentinels:
        dead = sentinels.primary

        def new_url() -> str:
            return f"redis://127.0.0.1:{sentinels.primary.port}/0"

        yield Scene(sentinels.url, dead.kill, lambda: sentinels.await_failover(dead), new_url)


@dataclass(frozen=True)
class Outage:
    name: str
    words: str
    open: Callable[[], Any]
    seconds: float = OUTAGE_S


OUTAGES = {
    outage.name: outage
    for outage in (
        Outage("none", "No outage, for comparison.", partial(_faulty, Pass())),
        Outage(
            "refused", "The server's port is closed, and its connections are reset.",
            partial(_faulty, Refuse()),
        ),
        Outage(
            "black-holed",
            "All packets are dropped: open connections stay half-open, and connecting never ends.",
            partial(_faulty, Blackhole(connects=False)),
        ),
        Outage("stalled", "The server is stopped (`SIGSTOP`) for two seconds.", _stalled, 2.0),
        Outage(
            "never-speaks",
            "Connections are reset, and new ones are accepted, and nothing is ever answered.",
            partial(_faulty, Silent(), cut=True),
        ),
        Outage(
            "reply-dropped", "The server executes what it is sent, and all its replies are lost.",
            partial(_faulty, DropReply()),
        ),
        Outage(
            "failover", "The primary is killed; the sentinels promote its replica.", _failover, 0.0
        ),
        Outage("full", "The server answers `OOM` to each write.", _full),
    )
}  # fmt: skip

# --------------------------------------------------------------------------------------------------
#
# The contenders. Each opens its limiters, and yields functions for both kinds of keys.


class Answer(NamedTuple):
    admitted: bool
    by_store: bool
    now_ms: float | None = None
    """When it was decided, by the server's clock; None where the library does not say."""


Call = Callable[[str], Answer]
Calls = Iterator[tuple[Call, Call]]


def _options(name: str, **more: Any) -> dict[str, Any]:
    return {"timeout": TIMEOUT_S, "prefix": "distwindow", "on_store_error": name, **more}


def _answer(decision: Any) -> Answer:
    return Answer(decision.allowed, decision.reason != "store_down", decision.now_ms)


@contextmanager
def _distwindow(url: str, **options: Any) -> Calls:
    with (
        distwindow.Limiter(url, HOT.limit(), **options) as hot,
        distwindow.Limiter(url, EACH.limit(), **options) as each,
    ):
        yield (
            (lambda key: _answer(hot.try_acquire(key))),
            lambda key: _answer(each.try_acquire(key)),
        )


def _redis(url: str) -> Any:
    """Return redis-py's client with its best settings for an outage: short timeouts, no retries."""
    redis = import_module("redis")
    retry = no_retry("redis")
    if "+sentinel" not in url:
        return redis.Redis.from_url(url, retry=retry, **_timeouts())
    hosts, service = re.match(r"redis\+sentinel://(.*?)/(\w+)", url).groups()  # type: ignore[union-attr]
    nodes = [(host.split(":")[0], int(host.split(":")[1])) for host in hosts.split(",")]
    return redis.Sentinel(nodes, retry=retry, **_timeouts()).master_for(service, retry=retry)


def _timeouts() -> dict[str, Any]:
    return {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}


def _limits_options(url: str) -> dict[str, Any]:
    options = {"retry": no_retry("redis"), **_timeouts()}
    return {**options, "sentinel_kwargs": options} if "+sentinel" in url else options


@contextmanager
def _limits(url: str) -> Calls:
    storage = import_module("limits.storage").storage_from_string(
        url.removesuffix("/0"), **_limits_options(url)
    )
    hit = import_module("limits.strategies").MovingWindowRateLimiter(storage).hit
    hot, each = limits_item(HOT), limits_item(EACH)
    yield (lambda key: Answer(hit(hot, key), True)), lambda key: Answer(hit(each, key), True)


@contextmanager
def _flask_limiter(url: str) -> Calls:
    """Flask-Limiter, which falls back to memory, and asks for the store after 1, 2, 4, ... s."""
    flask, extension = import_module("flask"), import_module("flask_limiter")
    app = flask.Flask("benchmark")
    limiter = extension.Limiter(
        key_func=lambda: flask.request.view_args["key"],
        app=app,
        storage_uri=url.removesuffix("/0"),
        storage_options=_limits_options(url),
        strategy="moving-window",
        in_memory_fallback_enabled=True,
    )
    refused = extension.errors.RateLimitExceeded

    def hot(key: str) -> str:
        return key

    def each(key: str) -> str:
        return key

    for view, quota in ((hot, HOT), (each, EACH)):
        limited = limiter.limit(f"{quota.amount}/{quota.seconds} second")(view)
        app.add_url_rule(f"/{view.__name__}/<key>", view.__name__, limited)

    def call(path: str, key: str) -> Answer:
        with app.test_request_context(f"/{path}/{key}"):
            try:
                app.preprocess_request()
                app.dispatch_request()
                admitted = True
            except refused:
                admitted = False
            return Answer(admitted, not limiter._storage_dead)

    yield partial(call, "hot"), partial(call, "each")


@contextmanager
def _throttled(url: str) -> Calls:
    package = import_module("throttled")
    timeouts = {name.upper(): value for name, value in _timeouts().items()}
    retry = {"retry": no_retry("redis")}
    store = package.RedisStore(
        server=url,
        options={
            **timeouts,
            "REDIS_CLIENT_KWARGS": retry,
            **({"SENTINEL_KWARGS": _timeouts()} if "+sentinel" in url else {}),
        },
    )
    hot, each = (
        package.Throttled(using="sliding_window", quota=throttled_quota(quota), store=store)
        for quota in (HOT, EACH)
    )
    yield (
        (lambda key: Answer(not hot.limit(key).limited, True)),
        (lambda key: Answer(not each.limit(key).limited, True)),
    )


@contextmanager
def _pyrate(url: str) -> Calls:
    client = _redis(url)
    sha = client.script_load(pyrate_script())
    hot, each = (pyrate_limiter(quota, pyrate_bucket("log", client, sha)) for quota in (HOT, EACH))
    yield (
        (lambda key: Answer(hot.try_acquire(key, blocking=False), True)),
        (lambda key: Answer(each.try_acquire(key, blocking=False), True)),
    )


SHARE = {"share": 1 / PROCESSES}
CONTENDERS: dict[str, Callable[[str], Any]] = {
    "distwindow, raise": partial(_distwindow, **_options("raise")),
    "distwindow, allow": partial(_distwindow, **_options("allow")),
    "distwindow, local": partial(_distwindow, **_options("local", **SHARE)),
    "distwindow, leased, local": partial(
        _distwindow, **_options("local", consistency="leased", **SHARE)
    ),
    "distwindow, AsyncLimiter, local": lambda url: url,
    "limits": _limits,
    "Flask-Limiter, in memory": _flask_limiter,
    "throttled-py": _throttled,
    "pyrate-limiter": _pyrate,
}
ASYNC = "distwindow, AsyncLimiter, local"

# --------------------------------------------------------------------------------------------------
#
# One process of a contender.


class Made(NamedTuple):
    """A call that was made. Times are monotonic seconds, the same in all processes."""

    key: str
    began: float
    ended: float
    admitted: bool | None
    """None if it raised."""
    by_store: bool
    wall_ms: float
    """When it was decided."""


@dataclass
class Calling:
    """What the threads or tasks of a process have called."""

    returned_at: Any
    """When the server was back, 0 before; shared with the benchmark's own process."""
    made: list[Made] = field(default_factory=list)
    delays: list[tuple[float, float]] = field(default_factory=list)
    """When another task of the event loop should have run, and the seconds it was late by."""
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """When each round of the event loop has ended, and its seconds of CPU: what other tasks would
    wait for it on a machine that does nothing else.
    """
    last_failed_at: float = 0.0
    last_by_store_at: float = 0.0

    def add(self, key: str, began: float, answer: Answer | None) -> float:
        """Record a call that has ended, and return when it did."""
        ended = time.monotonic()
        admitted = by_store = None
        wall_ms = (time.time() - (ended - began) / 2) * 1000
        if answer is not None:
            admitted, by_store, wall_ms = answer[0], answer[1], answer[2] or wall_ms
        self.made.append(Made(key, began, ended, admitted, bool(by_store), wall_ms))
        if key != "hot":
            if by_store:
                self.last_by_store_at = ended
            else:
                self.last_failed_at = ended
        return ended

    @property
    def is_over(self) -> bool:
        returned_at = self.returned_at.value
        if not returned_at:
            return False
        healed_s = self.last_by_store_at - max(returned_at, self.last_failed_at)
        return bool(healed_s > HEALED_S or time.monotonic() - returned_at > NOT_HEALED_S)


def _keys(number: int) -> tuple[Iterator[str], Iterator[str]]:
    return itertools.repeat("hot"), (f"u{number}-{count}" for count in itertools.count())


def _call_in_thread(calling: Calling, call: Call, keys: Iterator[str]) -> None:
    next_at = time.monotonic()
    while not calling.is_over:
        time.sleep(max(0.0, next_at - time.monotonic()))
        key, began = next(keys), time.monotonic()
        try:
            answer = call(key)
        except Exception:  # whatever the library raises: the call has no answer
            answer = None
        next_at = max(next_at + PERIOD_S, calling.add(key, began, answer))


def _threads(calling: Calling, contender: str, url: str, number: int, ready: Any) -> None:
    with CONTENDERS[contender](url) as calls:
        threads = [
            threading.Thread(target=_call_in_thread, args=(calling, call, keys))
            for call, keys in zip(calls, _keys(number), strict=True)
        ]
        for thread in threads:
            thread.start()
        ready.set()
        for thread in threads:
            thread.join()


class TimedLoop(asyncio.SelectorEventLoop):
    """Takes the processor time of each of its rounds."""

    def __init__(self, rounds: list[tuple[float, float]]) -> None:
        self._rounds = rounds
        super().__init__()

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # typeshed does not know it
        self._rounds.append((time.monotonic(), time.thread_time() - began))


async def _tasks(calling: Calling, url: str, number: int, ready: Any) -> None:
    async def call_in_task(limiter: distwindow.AsyncLimiter, keys: Iterator[str]) -> None:
        next_at = time.monotonic()
        while not calling.is_over:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            key, began = next(keys), time.monotonic()
            try:
                answer = _answer(await limiter.try_acquire(key))
            except distwindow.DistwindowError:
                answer = None
            next_at = max(next_at + PERIOD_S, calling.add(key, began, answer))

    async def another_task() -> None:
        while True:
            due_at = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            calling.delays.append((due_at, time.monotonic() - due_at))

    other = asyncio.ensure_future(another_task())
    async with (
        distwindow.AsyncLimiter(url, HOT.limit(), **_options("local", **SHARE)) as hot,
        distwindow.AsyncLimiter(url, EACH.limit(), **_options("local", **SHARE)) as each,
    ):
        ready.set()
        await asyncio.gather(
            *(
                call_in_task(limiter, keys)
                for limiter, keys in zip((hot, each), _keys(number), strict=True)
            )
        )
        other.cancel()


def _process(
    contender: str, url: str, number: int, ready: Any, returned_at: Any, results: Any
) -> None:
    logging.disable(logging.CRITICAL)  # peers log each call that fails
    calling = Calling(returned_at)
    gc.freeze()
    try:
        if contender == ASYNC:
            loop = TimedLoop(calling.rounds)
            loop.run_until_complete(_tasks(calling, url, number, ready))
            loop.close()
        else:
            _threads(calling, contender, url, number, ready)
        results.send((calling.made, calling.delays, calling.rounds))
    except Exception as error:
        results.send(error_text(error))
    finally:
        ready.set()


# --------------------------------------------------------------------------------------------------
#
# One trial.


@dataclass
class Trial:
    """What two processes of one contender have met with, in one outage."""

    calls: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    no_answer: float
    """Calls of the outage that raised, of all its calls."""
    lost: int
    """Admitted, and not counted by the server in the end."""
    counted_without_answer: int
    counted_twice: int
    fullest: float
    """The fullest window of the hot key, over its limit."""
    heal_s: float
    """From the server's return until the last call ended that it has not decided."""
    delay_ms: float | None
    """The longest delay of another task of the event loop."""
    round_cpu_ms: float | None
    """The most CPU of a round of the event loop."""


def run_trial(contender: str, outage: Outage) -> Trial:
    context = multiprocessing.get_context("spawn")
    with outage.open() as scene:
        returned_at = context.Value("d", 0.0)
        pipes = [context.Pipe(duplex=False) for _ in range(PROCESSES)]
        ready = [context.Event() for _ in range(PROCESSES)]
        processes = [
            context.Process(
                target=_process, args=(contender, scene.url, number, is_ready, returned_at, send)
            )
            for number, ((_, send), is_ready) in enumerate(zip(pipes, ready, strict=True))
        ]
        for process in processes:
            process.start()
        for is_ready in ready:
            is_ready.wait(60)
        time.sleep(BEFORE_S)
        began_at = time.monotonic()
        scene.begin()
        time.sleep(outage.seconds)
        scene.end()
        returned_at.value = time.monotonic()
        found: list[Any] = [
            receive.recv() if receive.poll(NOT_HEALED_S + 10) else "it hangs"
            for receive, _ in pipes
        ]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        for one in found:
            if isinstance(one, str):
                raise RuntimeError(one)
        counted = _counted(scene.server_url())
        return _trial(found, counted, began_at, returned_at.value)


def _trial(found: list[Any], counted: Counter[str], began_at: float, returned_at: float) -> Trial:
    made: list[Made] = [one for calls, _, _ in found for one in calls]
    outage = [one for one in made if one.ended > began_at and one.began < returned_at]
    settled = [
        one.ended - one.began for one in outage if one.began > began_at + FIRST_FAILURES_S
    ] or [one.ended - one.began for one in outage]
    single = [one for one in made if one.key != "hot"]
    windows: Counter[int] = Counter()
    buckets = 10
    for one in made:
        if one.key == "hot" and one.admitted and one.ended > began_at:
            bucket = int(one.wall_ms) * buckets // (HOT.seconds * 1000)
            for window in range(bucket, bucket + buckets):
                windows[window] += 1
    failed_at = [one.ended for one in single if not one.by_store and one.ended > returned_at]

    def longest_ms(times: list[tuple[float, float]]) -> float | None:
        seconds = [seconds for at, seconds in times if began_at < at < returned_at]
        return max(seconds) * 1000 if seconds else None

    return Trial(
        calls=len(outage),
        p50_ms=percentile(sorted(settled), 0.5) * 1000,
        p99_ms=percentile(sorted(settled), 0.99) * 1000,
        longest_ms=max(one.ended - one.began for one in outage) * 1000,
        no_answer=sum(one.admitted is None for one in outage) / len(outage),
        lost=sum(bool(one.admitted) and not counted[one.key] for one in single),
        counted_without_answer=sum(one.admitted is None and counted[one.key] > 0 for one in single),
        counted_twice=sum(counted[one.key] > 1 for one in single),
        fullest=max(windows.values(), default=0) / HOT.amount,
        heal_s=max(failed_at, default=returned_at) - returned_at,
        delay_ms=longest_ms([one for _, delays, _ in found for one in delays]),
        round_cpu_ms=longest_ms([one for _, _, rounds in found for one in rounds]),
    )


def _counted(url: str) -> Counter[str]:
    """Return how often the server has counted each key that was called once."""
    found: Counter[str] = Counter()
    client = import_module("redis").Redis.from_url(url, decode_responses=True)
    with client, distwindow.Limiter(url, EACH.limit(), timeout=5) as limiter:
        for name in client.scan_iter(count=1000):
            key = re.search(r"u\d+-\d+", name)
            if key is None or name.endswith(":senders"):
                continue
            kind = client.type(name)
            if kind == "hash":
                found[key[0]] += limiter.stats(key[0]).passed
            elif kind == "string":
                found[key[0]] += int(client.get(name))
            else:
                found[key[0]] += client.llen(name) if kind == "list" else client.zcard(name)
    return found


# --------------------------------------------------------------------------------------------------
#
# close() and the end of the interpreter, in the middle of an outage.

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "leased": {"consistency": "leased"},
    "eventual": {"consistency": "eventual"},
}
_OF_AN_HOUR = Quota(100, 3600)
"""What is counted here is in its window until the end of the process: of a window that is over
nothing is left to be sent."""
_open_at_exit: list[object] = []


@dataclass
class End:
    """How long the end of a limiter takes, of a thread or an event loop, in one outage."""

    close_ms: float
    exit_ms: float
    """From the last line of the program until its process has ended."""


def _end_thread(
    url: str, options: dict[str, Any], closes: bool, ready: Any, begun: Any, results: Any
) -> None:
    limiter = distwindow.Limiter(url, _OF_AN_HOUR.limit(), **options)
    limiter.try_acquire("hot")
    ready.set()
    begun.wait(60)
    for _ in range(20):
        limiter.try_acquire("hot")
    began_at = time.monotonic()
    if closes:
        limiter.close()
    _open_at_exit.append(limiter)
    results.send((began_at, time.monotonic()))


def _end_task(*arguments: Any) -> None:
    asyncio.run(_end_in_loop(*arguments))


async def _end_in_loop(
    url: str, options: dict[str, Any], closes: bool, ready: Any, begun: Any, results: Any
) -> None:
    limiter = distwindow.AsyncLimiter(url, _OF_AN_HOUR.limit(), **options)
    await limiter.try_acquire("hot")
    ready.set()
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(20):
        await limiter.try_acquire("hot")
    began_at = time.monotonic()
    if closes:
        await limiter.aclose()
    _open_at_exit.append(limiter)
    results.send((began_at, time.monotonic()))


def run_end(outage: Outage, mode: str, run: Callable[..., None]) -> End:
    context = multiprocessing.get_context("spawn")
    ended_ms = []
    options = _options("local", **SHARE, **MODES[mode])
    for closes in (True, False):
        with outage.open() as scene:
            receive, send = context.Pipe(duplex=False)
            ready, begun = context.Event(), context.Event()
            process = context.Process(
                target=run, args=(scene.url, options, closes, ready, begun, send)
            )
            process.start()
            ready.wait(60)
            scene.begin()
            begun.set()
            began_at, closed_at = receive.recv() if receive.poll(20) else (0.0, 20.0)
            process.join(20)
            ended_at = time.monotonic()
            process.kill()
            ended_ms.append(((closed_at if closes else ended_at) - began_at) * 1000)
            scene.end()
    return End(*ended_ms)


# --------------------------------------------------------------------------------------------------
#
# All of them, and the tables.


def run_all(
    rounds: int, outages: list[str], contenders: list[str]
) -> tuple[dict[str, dict[str, list[Trial]]], dict[str, str]]:
    """Return the trials by outage and contender, and the error of each contender that failed."""
    trials: dict[str, dict[str, list[Trial]]] = {name: {} for name in outages}
    errors: dict[str, str] = {}
    for number in range(1, rounds + 1):
        pairs = list(itertools.product(outages, contenders))
        random.shuffle(pairs)
        for name, contender in pairs:
            log(f"round {number}/{rounds}: {name}: {contender}")
            try:
                trial = run_trial(contender, OUTAGES[name])
                trials[name].setdefault(contender, []).append(trial)
            except Exception as error:
                errors[f"{name}: {contender}"] = error_text(error)
                log(f"failed: {error_text(error)}")
    return trials, errors


def _row(trials: list[Trial]) -> dict[str, float | None]:
    """Return the medians of the rounds; of the longest call, the longest of all."""
    row: dict[str, float | None] = {}
    for name in Trial.__dataclass_fields__:
        values = [value for trial in trials if (value := getattr(trial, name)) is not None]
        of = max if name == "longest_ms" else statistics.median
        row[name] = of(values) if values else None
    return row


def _run_ends(rounds: int, outages: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the milliseconds of `close` and of the exit, by outage and mode: medians."""
    kinds = {"Limiter": _end_thread, "AsyncLimiter": _end_task}
    found: dict[str, dict[str, list[End]]] = {}
    for number, name in itertools.product(range(1, rounds + 1), outages):
        for kind, mode in itertools.product(kinds, MODES):
            log(f"ends {number}/{rounds}: {name}: {kind}, {mode}")
            ends = found.setdefault(name, {}).setdefault(f"{kind}, {mode}", [])
            ends.append(run_end(OUTAGES[name], mode, kinds[kind]))
    return {
        name: {
            mode: {
                "close_ms": statistics.median(end.close_ms for end in ends),
                "exit_ms": statistics.median(end.exit_ms for end in ends),
            }
            for mode, ends in modes.items()
        }
        for name, modes in found.items()
    }


def tables(report_: dict[str, Any]) -> str:
    """Return the tables of docs/outages.md."""
    about = report_["environment"]
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("redis", "limits", "throttled-py", "pyrate-limiter")
    )
    parts = [
        f"`python -m benchmarks.outages`, rounds: {report_['rounds']}; {about['server']}, "
        f"{about['python']}, {about['machine']}, {about['load']}; {versions}, Flask-Limiter "
        f"{about['Flask-Limiter']}."
    ]
    for name, rows in report_["rows"].items():
        lines = [
            "| | p50 | p99 | longest call | no answer | lost | counted without an answer | twice "
            "| fullest window | healed after |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [f"| {contender} | {_cells(row)} |" for contender, row in rows.items()]
        errors = [
            f"{where.split(': ')[1]}: {why}"
            for where, why in report_["errors"].items()
            if where.startswith(f"{name}: ")
        ]
        parts += [f"### {name.capitalize()}", OUTAGES[name].words, "\n".join([*lines, *errors])]
    lines = [
        "| | another task is late by | CPU of the longest round of the loop |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {name} | {_ms(rows[ASYNC]['delay_ms'])} | {_ms(rows[ASYNC]['round_cpu_ms'])} |"
        for name, rows in report_["rows"].items()
        if ASYNC in rows
    ]
    parts += ["### The event loop", "\n".join(lines)]
    modes = list(next(iter(report_["ends"].values()), {}))
    lines = [
        "| `close()`; the end of the interpreter | " + " | ".join(modes) + " |",
        "|---|" + "---:|" * len(modes),
    ]
    lines += [
        f"| {name} | "
        + " | ".join(f"{_ms(end['close_ms'])}; {_ms(end['exit_ms'])}" for end in ends.values())
        + " |"
        for name, ends in report_["ends"].items()
    ]
    return "\n\n".join([*parts, "### The end, while Redis is away", "\n".join(lines)]) + "\n"


def _cells(row: dict[str, Any]) -> str:
    heal_s = row["heal_s"]
    return " | ".join(
        (
            _ms(row["p50_ms"]), _ms(row["p99_ms"]), _ms(row["longest_ms"]),
            f"{row['no_answer']:.0%}", f"{row['lost']:.0f}",
            f"{row['counted_without_answer']:.0f}", f"{row['counted_twice']:.0f}",
            f"{row['fullest']:.0%}",
            f"over {NOT_HEALED_S:.0f} s" if heal_s >= NOT_HEALED_S - 0.5 else f"{heal_s:.2f} s",
        )
    )  # fmt: skip


def _ms(value: float | None) -> str:
    return "" if value is None else f"{report.number(value)} ms"


def page_of(found: dict[str, Any]) -> str:
    """Return the page with the tables of a report."""
    return report.page_with(PAGE, "outages", tables(found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=OUTAGES, help="an outage")
    parser.add_argument("--contender", action="append", choices=CONTENDERS)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    parser.add_argument("--tables", action="store_true", help="only make them anew from the JSON")
    options = parser.parse_args()
    if options.tables:
        PAGE.write_text(page_of(json.loads(JSON.read_text())), encoding="utf-8")
        return 0
    names = [name for name in OUTAGES if not options.only or name in options.only]
    contenders = options.contender or list(CONTENDERS)
    environment = report.environment(server.version())
    environment["Flask-Limiter"] = metadata.version("flask-limiter")
    trials, errors = run_all(options.rounds, names, contenders)
    found = {
        "environment": environment,
        "rounds": options.rounds,
        "rows": {
            name: {
                contender: _row(trials[name][contender])
                for contender in contenders
                if contender in trials[name]
            }
            for name in names
        },
        "errors": errors,
        "ends": _run_ends(options.rounds, [name for name in names if name != "failover"]),
    }
    print(tables(found))
    if options.write:
        JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page_of(found), encoding="utf-8")
    log("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
