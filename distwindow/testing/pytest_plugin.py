"""The pytest plugin `distwindow`: limits in memory, with a clock that tests move, or switched off.

What a test sees of the limiters, concurrency limits, breakers, guards and web limits of the
application that name a store by its URL or by a client:

    the test                            they are
    asks for `distwindow_clock`,        on memory://, empty when the test begins, and on its clock;
    or the ini has                      of one URL on one store, as they are on one Redis
    `distwindow = memory`
    has the mark `distwindow_off`,      open: each call is admitted, and nothing is counted
    or the ini has `distwindow = off`
    none of these                       as the application has made them

Those that were made before, when a module was imported or in another test, are made once more with
the same arguments for each such test, and are what they were after it. A store object of the test,
and a `time=` of its own, stay what they are.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

import pytest
import redis
import redis.asyncio

import distwindow

from ..borrow.commands import Borrow, borrow_decision
from ..breaker import AsyncCircuitBreaker, CircuitBreaker
from ..contrib.http.rate_limits import AsyncRateLimits, BlockingRateLimits
from ..contrib.upstream import AsyncUpstreamLimits, UpstreamLimits
from ..lifecycle.connect import store_name
from ..ring.command import Command
from ..ring.commands import Acquire
from ..ring.decision import Decision
from ..ring.decisions import decision_of
from ..stores.memory import MemoryStore
from ..waiting.commands import AcquireTurn, turn_decision
from .manual_clock import ManualClock

Mode = Literal["", "memory", "off"]
_MODES = ("", "memory", "off")
_CLIENTS = (
    redis.Redis, redis.RedisCluster, redis.asyncio.Redis, redis.asyncio.RedisCluster,
)  # fmt: skip


class _TestStore(MemoryStore):
    """`memory://` in the place of another store, with a list of the calls that it has decided."""

    def __init__(self, clock: Any, shown_name: str, calls: list[Decision]) -> None:
        self.shown_name = shown_name
        self.calls = calls
        super().__init__(clock)

    def decide_at_once(self, command: Acquire) -> Decision:
        return self._attempt_by_reply(command)  # by `execute`, which has the list

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        reply = super().execute(command, deadline)
        if isinstance(command, Acquire):
            self.calls.append(decision_of(command, reply, "local"))
        elif isinstance(command, Borrow):
            self.calls.append(borrow_decision(command, reply, "local"))
        elif isinstance(command, AcquireTurn) and reply.acquire_reply.admitted:
            self.calls.append(turn_decision(command, reply, "local"))
        return reply


class _OpenStore(_TestStore):
    """Admits each call, as it keeps nothing of the calls before."""

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        return MemoryStore(self.clock).execute(command, deadline)


class _Made:
    """How one object of the application is made. The object has it as an attribute, so that what it
    was made with lives as long as the object.
    """

    def __init__(
        self, made: Any, init: Callable[..., None], store: Any, arguments: Any, options: Any
    ) -> None:
        self._object = weakref.ref(made)
        self._init, self._store, self._arguments, self._options = init, store, arguments, options
        self._own_state: dict[str, Any] | None = None
        """What the object is without this plugin, while it is something else."""

    def switch(self, switch: Switch) -> None:
        """Make the object what it is with the stores of `switch`, or without this plugin."""
        made = self._object()
        if made is None:
            return
        if not switch.mode:
            if self._own_state is not None:
                _set_state(made, self._own_state)
                self._own_state = None
            return
        if self._own_state is None:
            self._own_state = _state_of(made)
        other = object.__new__(type(made))
        clock = self._options.get("time", switch.clock)
        store = switch.store_for(self._store, clock)
        options = {**self._options, "time": clock}
        is_upstream = isinstance(made, (AsyncUpstreamLimits, UpstreamLimits))
        if is_upstream and switch.mode == "off":
            options["learn"] = False  # what asks to wait is not the store
        self._init(other, store, *self._arguments, **options)
        if isinstance(made, (CircuitBreaker, AsyncCircuitBreaker)):  # added since it was made
            other.listeners.added = made.listeners.added
        elif is_upstream:
            other.listeners = made.listeners
        _set_state(made, _state_of(other))


_OF_RATE_LIMITS = ("_given_store", "_options", "opened")
"""What of web limits is another one with another store; the routes have the rest."""


def _state_of(made: Any) -> dict[str, Any]:
    state = vars(made)
    if isinstance(made, (AsyncRateLimits, BlockingRateLimits)):
        return {name: state[name] for name in _OF_RATE_LIMITS}
    return dict(state)


def _set_state(made: Any, state: dict[str, Any]) -> None:
    now = vars(made)
    if not isinstance(made, (AsyncRateLimits, BlockingRateLimits)):
        # What it has noted since it was made in the place of a class's default: that it was closed.
        for name in [name for name in now if name not in state and hasattr(type(made), name)]:
            del now[name]
    now.update(state)


class Switch:
    """What the objects of the application are at this moment."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[_Made]] = []
        self.begin("")

    def begin(self, mode: Mode) -> None:
        """Begin a test: with memory, the stores are new and empty, and the clock is a new one."""
        self.mode = mode
        self.clock = ManualClock()
        self.calls: list[Decision] = []
        self.reset()

    def store_for(self, store: Any, clock: Any) -> MemoryStore:
        """Return the store that takes the place of `store`, a URL or a client."""
        # Each object that names memory:// has a store of its own.
        name = (object() if store == "memory://" else store, clock)
        if name not in self.stores:
            kind = _OpenStore if self.mode == "off" else _TestStore
            shown = "memory://" if store == "memory://" else f"memory:// for {store_name(store)}"
            self.stores[name] = kind(clock, shown, self.calls)
        return self.stores[name]

    def reset(self) -> None:
        """Empty all windows, slots and breakers: the stores are new, and so are all objects."""
        self.stores: dict[Any, _TestStore] = {}
        self._made = [made for made in self._made if made() is not None]
        for made in self._made:
            if (alive := made()) is not None:
                alive.switch(self)

    def follow(self, cls: type) -> Callable[[], None]:
        """Have the objects of `cls` be switched. Return what undoes that."""
        init: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def initialize(made: Any, *arguments: Any, **options: Any) -> None:
            arguments = tuple(map(_reusable, arguments))
            options = {name: _reusable(each) for name, each in options.items()}
            init(made, *arguments, **options)  # so that it finds what is wrong with its own store
            store = arguments[0] if arguments else options.pop("store", None)
            if isinstance(store, (str, *_CLIENTS)):
                how = made._made_for_tests = _Made(made, init, store, arguments[1:], options)
                self._made.append(weakref.ref(how))
                how.switch(self)

        cls.__init__ = initialize  # type: ignore[misc]
        return functools.partial(setattr, cls, "__init__", init)


def _reusable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, Iterator) else argument


def classes_with_a_store() -> list[type]:
    """Return the public classes that open a store."""
    public = [getattr(distwindow, name) for name in distwindow.__all__]
    classes = [each for each in public if inspect.isclass(each)]
    of_store = [cls for cls in classes if next(iter(_parameters(cls)), "") == "store"]
    return [
        *of_store, AsyncRateLimits, BlockingRateLimits, AsyncUpstreamLimits, UpstreamLimits,
    ]  # fmt: skip


def _parameters(cls: type) -> Any:
    try:
        return inspect.signature(cls).parameters
    except ValueError:
        return {}


_SWITCH = pytest.StashKey[Switch]()
_BASE = pytest.StashKey[Mode]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: Any) -> None:
    parser.addini(
        "distwindow",
        "limits in all tests: memory (on memory://, empty in each test, with distwindow_clock), "
        "off (each call is admitted), or nothing (as the application has made them)",
        default="",
    )
    # Before a conftest.py, or another plugin as that of Django, imports the application.
    config = pluginmanager.get_plugin("pytestconfig")
    switch = config.stash[_SWITCH] = Switch()
    for cls in classes_with_a_store():
        config.add_cleanup(switch.follow(cls))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distwindow_off: each call to a limit is admitted")
    mode = config.getini("distwindow")
    if mode not in _MODES:
        raise pytest.UsageError(f"distwindow = {mode}: write memory or off, or leave it out")
    config.stash[_BASE] = mode
    config.stash[_SWITCH].begin(mode)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Begin before fixtures of any scope. A test that is run again begins again."""
    mode = item.config.stash[_BASE]
    if item.get_closest_marker("distwindow_off"):
        mode = "off"
    elif "distwindow_clock" in getattr(item, "fixturenames", ()):
        mode = "memory"
    if mode:
        item.config.stash[_SWITCH].begin(mode)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    base, switch = item.config.stash[_BASE], item.config.stash[_SWITCH]
    try:
        return (yield)
    finally:
        if switch.mode != base:
            switch.begin(base)


@pytest.fixture
def distwindow_clock(request: pytest.FixtureRequest) -> ManualClock:
    """The clock of all limits in this test, which are on memory:// and empty at its beginning."""
    switch = request.config.stash[_SWITCH]
    if switch.mode != "memory" and not request.node.get_closest_marker("distwindow_off"):
        switch.begin("memory")  # asked for while the test runs
    return switch.clock


@pytest.fixture
def distwindow_calls(
    request: pytest.FixtureRequest, distwindow_clock: ManualClock
) -> list[Decision]:
    """The decisions on the calls of this test, the earliest first."""
    return request.config.stash[_SWITCH].calls


@pytest.fixture
def distwindow_reset(
    request: pytest.FixtureRequest, distwindow_clock: ManualClock
) -> Callable[[], None]:
    """A function that empties all windows, slots and breakers in the middle of a test."""
    return request.config.stash[_SWITCH].reset
