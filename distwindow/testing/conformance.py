"""The checks that every store has to pass: it answers as `MemoryStore` does, which is the
specification, executes each command atomically, and refuses calls once it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NamedTuple, get_args

from ..errors import ConfigurationError
from ..ring.clock import Clock
from ..ring.command import Command
from ..ring.commands import Acquire, Read
from ..ring.decision import Decision, Source
from ..ring.key import Key
from ..ring.limit import Limit
from ..ring.store import AsyncStore, Store
from ..stores.memory import MemoryStore
from .histories import (
    FEATURES,
    LIMIT_COMMANDS,
    START_MS,
    Feature,
    charges_for,
    commands_of,
    limits_together,
    random_history,
)
from .manual_clock import ManualClock

MakeStore = Callable[[Clock], "Store | AsyncStore"]
"""Makes a store whose time is that of the clock it is given. It may share a server, a file or a
table with the stores that were made before: each check uses keys of its own.
"""

_THREADS = 8
_CALLS = 80
_ADMITTED = 50


def store_conformance(
    make_store: MakeStore,
    *,
    seeds: Iterable[int] = range(25),
    length: int = 40,
    without: Collection[str] = (),
) -> None:
    """Raise `AssertionError`, with what differs, if a store of `make_store` fails a check.

    The store may be a `Store` or an `AsyncStore`; the latter is called in an event loop of its own,
    so this function must not be called in a running one. For each of `seeds` and each feature a
    random history of `length` commands is executed by the store and by a `MemoryStore`; where they
    differ, the history is cut down to the commands that are needed for the difference.

    `without`: the names of the features (docs/testing.md) that the store leaves out. It has to
    raise `ConfigurationError` for their commands.
    """
    check_members(make_store)
    check_features(make_store, seeds, length, without)
    check_attempts(make_store)
    check_exchange(make_store)
    check_atomicity(make_store)
    check_closed(make_store)


class StoreTests:
    """The same checks as test methods, for pytest and other runners that collect classes:

    class TestMyStore(StoreTests):
        def make_store(self, clock):
            return MyStore(clock=clock)
    """

    seeds: Iterable[int] = range(25)
    without: Collection[str] = ()

    def make_store(self, clock: Clock) -> Store | AsyncStore:
        """Return a store whose time is that of `clock`."""
        raise NotImplementedError("define make_store(self, clock) in the class of your tests")

    def test_it_has_the_members_of_a_store(self) -> None:
        check_members(self.make_store)

    def test_it_replies_as_the_specification(self) -> None:
        check_features(self.make_store, self.seeds, without=self.without)

    def test_its_decisions_are_those_of_the_specification(self) -> None:
        check_attempts(self.make_store)

    def test_it_executes_several_commands_together(self) -> None:
        check_exchange(self.make_store)

    def test_it_executes_each_command_atomically(self) -> None:
        check_atomicity(self.make_store)

    def test_it_refuses_calls_once_it_is_closed(self) -> None:
        check_closed(self.make_store)


def check_members(make_store: MakeStore) -> None:
    """Check the attributes that limiters read."""
    clock = ManualClock(START_MS)
    with _opened(make_store, clock) as calls:
        store = calls.store
        assert store.clock is clock, "`clock` is not the clock that make_store was given"
        assert store.decided_by in get_args(Source), (
            f"decided_by={store.decided_by!r} is not a Source"
        )
        assert store.unknown_total == 0, f"unknown_total={store.unknown_total!r} before any call"


def check_features(
    make_store: MakeStore,
    seeds: Iterable[int],
    length: int = 40,
    without: Collection[str] = (),
) -> None:
    """Check that every reply over the histories of `seeds` of each feature, and of all limits
    together, is that of `MemoryStore`, in each field; and that no command of a feature in `without`
    is executed.
    """
    unknown = {*without} - (FEATURES.keys() - {"windows"})
    if unknown:
        others = ", ".join(name for name in FEATURES if name != "windows")
        raise ValueError(f"without={sorted(unknown)}: a store may leave out {others}")
    seeds = list(seeds)
    with _opened(make_store, ManualClock(START_MS)) as calls:
        together = {f"{' and '.join(LIMIT_COMMANDS)} together": limits_together(without)}
        for name, feature in (FEATURES | together).items():
            for seed in seeds:
                history = feature.random_history(Random(seed), length)
                if name in without:
                    _check_left_out(calls.execute, feature, history)
                else:
                    compare_replies(calls.execute, feature, history, f"{name}, seed {seed}")


def _check_left_out(
    execute: Callable[[Command[Any]], Any], feature: Feature, history: Sequence[Any]
) -> None:
    for command in feature.commands_of(history, _new_key()):
        if command.script in feature.scripts:
            with contextlib.suppress(ConfigurationError):
                execute(command)
                raise AssertionError(f"the store leaves {command.script!r} out, and executed it")


def check_attempts(make_store: MakeStore, seed: int = 0) -> None:
    """Check that `decide` on the store's clock returns the decisions of `MemoryStore`."""
    random, clock = Random(seed), ManualClock(START_MS)
    limits = [Limit(4, per=60, buckets=2), Limit(6, per=120, buckets=4, bound="strict")]
    key, specification = _new_key(), MemoryStore(clock)
    with _opened(make_store, clock) as calls:
        for number in range(60):
            chosen = limits[: random.choice((1, 2))]
            command = Acquire(charges_for(key, chosen, random.randint(1, 2)))
            expected = specification.decide(command)
            actual = calls.decide(command)._replace(source=expected.source)
            _check_equal(actual, expected, f"attempt number {number + 1}, {describe(command)}")
            clock.advance(random.choice((0, 0, 0.001, 7, 15, 30, 61, 400)))


def check_exchange(make_store: MakeStore) -> None:
    """Check that `execute_many` returns the replies in the order of the commands."""
    with _opened(make_store, ManualClock(START_MS)) as calls:
        # A command whose script the server does not have may be executed after the others, so the
        # same commands come first on a key of the same node, one by one.
        key = _new_key()
        for command in commands_of(random_history(1), Key("another", tag=key)):
            calls.execute(command)
        commands = list(commands_of(random_history(1), Key("one", tag=key)))
        specification = MemoryStore(calls.store.clock)
        expected = [specification.execute(command) for command in commands]
        replies = calls.execute_many(commands)
        assert len(replies) == len(commands), (
            "execute_many did not return one reply for each command"
        )
        for command, got, reply in zip(commands, replies, expected, strict=True):
            _check_equal(got, reply, f"in execute_many, {describe(command)}")
        assert list(calls.execute_many([])) == [], "execute_many([]) did not return an empty list"


def check_atomicity(make_store: MakeStore) -> None:
    """Check that concurrent calls admit exactly the limit, and count what they admit."""
    limit = Limit(_ADMITTED, per=60, buckets=1)
    charges = charges_for(_new_key(), [limit], 1)
    with _opened(make_store, ManualClock(START_MS)) as calls:
        decisions = calls.concurrently([Acquire(charges) for _ in range(_CALLS)])
        admitted = sum(decision.allowed for decision in decisions)
        assert admitted == _ADMITTED, (
            f"{_CALLS} concurrent calls under {limit}: {admitted} were admitted, "
            f"not {_ADMITTED}; execute each command in one transaction, or under one lock"
        )
        state = calls.execute(Read(charges)).states[0]
        assert state is not None
        assert state.used == _ADMITTED, (
            f"{_ADMITTED} calls were admitted, and {state.used} are counted"
        )


def check_closed(make_store: MakeStore) -> None:
    """Check that calls of a closed store raise `ConfigurationError`; closing twice is allowed."""
    command = Acquire(charges_for(_new_key(), [Limit(1, per=60, buckets=1)], 1))
    with _opened(make_store, ManualClock(START_MS)) as calls:
        calls.close()
        try:
            calls.execute(command)
        except ConfigurationError:
            return
        raise AssertionError("execute on a closed store did not raise ConfigurationError")


class Difference(NamedTuple):
    """Where a store differs from the specification."""

    commands: list[Command[Any]]
    """The commands up to the one whose reply differs."""
    actual: Any
    expected: Any


def compare_replies(
    execute: Callable[[Command[Any]], Any], feature: Feature, history: Sequence[Any], title: str
) -> None:
    """Raise `AssertionError` where the replies of `execute` differ from those of `MemoryStore`,
    with a history that was cut down to the steps that are needed for the difference.
    """
    found = _difference(execute, feature, history)
    if found is None:
        return
    found = _shortest(execute, feature, list(history), found)
    lines = [f"{title}: the store differs from MemoryStore. The commands that show it:"]
    lines += [f"  {number}. {describe(each)}" for number, each in enumerate(found.commands, 1)]
    lines += [f"On number {len(found.commands)}:", *_lines_of(found.actual, found.expected)]
    raise AssertionError("\n".join(lines))


def _difference(
    execute: Callable[[Command[Any]], Any], feature: Feature, history: Sequence[Any]
) -> Difference | None:
    specification = MemoryStore(ManualClock(START_MS))
    commands = []
    for command in feature.commands_of(history, _new_key()):
        commands.append(command)
        expected, actual = specification.execute(command), execute(command)
        if actual != expected:
            return Difference(commands, actual, expected)
    return None


def _shortest(
    execute: Callable[[Command[Any]], Any],
    feature: Feature,
    history: list[Any],
    found: Difference,
) -> Difference:
    """Leave out steps, from the last, that the difference does not need. Return what is left."""
    at = len(history) - 1
    while at >= 0:
        # The later steps keep their times, and so the buckets that they count in.
        without = history[:at] + history[at + 1 :]
        if at < len(without):
            passed = history[at].elapsed_ms + without[at].elapsed_ms
            without[at] = without[at]._replace(elapsed_ms=passed)
        shorter = _difference(execute, feature, without)
        if shorter is not None:
            history, found = without, shorter
        at -= 1
    return found


def describe(command: Command[Any]) -> str:
    """Return a command in one line: its limits and costs, and its other arguments."""
    charges = ", ".join(f"{charge.cost} of {charge.limit}" for charge in command.charges)
    arguments = [
        f"{each.name}={getattr(command, each.name)!r}"
        for each in dataclasses.fields(command)
        if each.name != "charges" and not each.name.startswith("_")
    ]
    return f"{type(command).__name__}([{charges}], {', '.join(arguments)})"


def _check_equal(actual: Any, expected: Any, title: str) -> None:
    if actual != expected:
        lines = "\n".join(_lines_of(actual, expected))
        raise AssertionError(f"the store differs from MemoryStore: {title}\n{lines}")


def _lines_of(actual: Any, expected: Any) -> list[str]:
    """Return the fields that differ, or the whole values where they are of different types."""
    if type(actual) is not type(expected) or not hasattr(expected, "_fields"):
        return [f"  returned {actual!r}", f"  expected {expected!r}"]
    return [
        f"  {name}: returned {got!r}, expected {wanted!r}"
        for name, got, wanted in zip(expected._fields, actual, expected, strict=True)
        if got != wanted
    ]


def _new_key() -> str:
    return f"conformance-{uuid.uuid4().hex[:12]}"


class _BlockingCalls:
    """The calls of a `Store`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.execute: Callable[[Command[Any]], Any] = store.execute
        self.decide = store.decide
        self.execute_many = store.execute_many
        self.close = store.close

    def concurrently(self, commands: Sequence[Acquire]) -> list[Decision]:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(self.store.decide, commands))


class _AsyncCalls:
    """The calls of an `AsyncStore`, in an event loop of their own."""

    def __init__(self, store: AsyncStore, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self._loop = loop
        self._closed = False

    def execute(self, command: Command[Any]) -> Any:
        late_replies: list[Any] = []
        reply = self._loop.run_until_complete(
            self.store.execute(command, None, late_replies.append)
        )
        assert not late_replies, "on_late_reply was called although the reply was returned"
        return reply

    def decide(self, command: Acquire) -> Decision:
        async def decide() -> Decision:
            return await self.store.decide(command)

        return self._loop.run_until_complete(decide())

    def execute_many(self, commands: Sequence[Command[Any]]) -> list[Any]:
        return self._loop.run_until_complete(self.store.execute_many(commands))

    def concurrently(self, commands: Sequence[Acquire]) -> list[Decision]:
        async def gather() -> list[Decision]:
            return list(await asyncio.gather(*map(self.store.decide, commands)))

        return self._loop.run_until_complete(gather())

    def close(self) -> None:
        async def close() -> None:
            if not self._closed:
                await self.store.drain()
            await self.store.aclose()

        self._loop.run_until_complete(close())
        self._closed = True


@contextlib.contextmanager
def _opened(make_store: MakeStore, clock: Clock) -> Iterator[_BlockingCalls | _AsyncCalls]:
    store: Any = make_store(clock)
    if not hasattr(store, "aclose"):
        with contextlib.closing(_BlockingCalls(store)) as blocking:
            yield blocking
        return
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        with contextlib.closing(_AsyncCalls(store, loop)) as calls:
            yield calls
