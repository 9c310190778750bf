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
from collections.abc import Callable, Generator
from typing import Any, Literal

import pytest
import redis
import redis.asyncio

import distwindow

from ..contrib.http.rate_limits import AsyncRateLimits, BlockingRateLimits
from ..lifecycle.connect import check_url, store_name
from ..ring.command import Command
from ..ring.commands import Acquire
from ..ring.decision import Decision
from ..ring.decisions import decision_of
from ..stores.memory import MemoryStore
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
        self.kept: dict[bytes, Any] = {}
        super().__init__(clock, self.kept)

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        return decision_of(command, self.execute(command, deadline), "local")

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        reply = super().execute(command, deadline)
        if isinstance(command, Acquire):
            self.calls.append(decision_of(command, reply, "local"))
        return reply


class _OpenStore(_TestStore):
    """Admits each call, as it keeps nothing of the calls before."""

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        return MemoryStore(self.clock).execute(command, deadline)


class _Made:
    """One object of the application, and how it is made."""

    def __init__(
        self, made: Any, init: Callable[..., None], store: Any, arguments: Any, options: Any
    ) -> None:
        self.object = weakref.ref(made)
        self._init, self._store, self._arguments, self._options = init, store, arguments, options
        self._own_state: dict[str, Any] | None = None
        """What it is without this plugin, while it is something else; None before it was made."""
        self._is_own = True

    def make(self, target: Any, switch: Switch) -> None:
        """Initialize `target`, with the store of `switch` in the place of its own."""
        store, options = self._store, self._options
        if switch.mode:
            clock = options.get("time", switch.clock)
            store, options = switch.store_for(store, clock), {**options, "time": clock}
        self._init(target, store, *self._arguments, **options)
        self._is_own = not switch.mode

    def switch(self, switch: Switch) -> None:
        """Make the object what it is with the store of `switch`."""
        made = self.object()
        if made is None or (self._is_own and not switch.mode):
            return
        if self._is_own:
            self._own_state = _state_of(made)
        if switch.mode or self._own_state is None:
            other = object.__new__(type(made))
            self.make(other, switch)
            state = _state_of(other)
        else:
            self._is_own, state = True, self._own_state
        _set_state(made, state)


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
        self._made: list[_Made] = []
        self.begin("")

    def begin(self, mode: Mode) -> None:
        """Begin a test: with memory, the stores are new and empty, and the clock is a new one."""
        self.mode = mode
        self.clock = ManualClock()
        self.calls: list[Decision] = []
        self.stores: dict[Any, _TestStore] = {}
        self._made = [made for made in self._made if made.object() is not None]
        for made in self._made:
            made.switch(self)

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
        """Empty all windows, slots and breakers of the test."""
        for store in self.stores.values():
            store.kept.clear()

    def follow(self, cls: type) -> Callable[[], None]:
        """Have the objects of `cls` be switched. Return what undoes that."""
        init: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def initialize(made: Any, *arguments: Any, **options: Any) -> None:
            given = dict(options)
            store = arguments[0] if arguments else given.pop("store", None)
            if not isinstance(store, (str, *_CLIENTS)):
                init(made, *arguments, **options)
                return
            if isinstance(store, str):
                check_url(store)
            how = _Made(made, init, store, arguments[1:], given)
            how.make(made, self)
            self._made.append(how)

        cls.__init__ = initialize  # type: ignore[misc]
        return functools.partial(setattr, cls, "__init__", init)


def classes_with_a_store() -> list[type]:
    """Return the public classes that open a store."""
    public = [getattr(distwindow, name) for name in distwindow.__all__]
    classes = [each for each in public if inspect.isclass(each)]
    of_store = [cls for cls in classes if next(iter(_parameters(cls)), "") == "store"]
    return [*of_store, AsyncRateLimits, BlockingRateLimits]


def _parameters(cls: type) -> Any:
    try:
        return inspect.signature(cls).parameters
    except ValueError:
        return {}


_SWITCH = pytest.StashKey[Switch]()
_BASE = pytest.StashKey[Mode]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "distwindow",
        "limits in all tests: memory (on memory://, empty in each test, with distwindow_clock), "
        "off (each call is admitted), or nothing (as the application has made them)",
        default="",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before a conftest.py imports the application."""
    switch = early_config.stash[_SWITCH] = Switch()
    for cls in classes_with_a_store():
        early_config.add_cleanup(switch.follow(cls))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distwindow_off: each call to a limit is admitted")
    mode = config.getini("distwindow")
    if mode not in _MODES:
        raise pytest.UsageError(f"distwindow = {mode}: write memory or off, or leave it out")
    config.stash[_BASE] = mode
    config.stash[_SWITCH].begin(mode)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    base, switch = item.config.stash[_BASE], item.config.stash[_SWITCH]
    names = getattr(item, "fixturenames", ())
    mode: Mode = base
    if item.get_closest_marker("distwindow_off"):
        mode = "off"
    elif any(name in names for name in ("distwindow_clock", "distwindow_calls")):
        mode = "memory"
    if mode:
        switch.begin(mode)
    try:
        return (yield)
    finally:
        if mode:
            switch.begin(base)


@pytest.fixture
def distwindow_clock(request: pytest.FixtureRequest) -> ManualClock:
    """The clock of all limits in this test, which are on memory:// and empty at its beginning."""
    switch = request.config.stash[_SWITCH]
    if not switch.mode:  # asked for while the test runs
        switch.begin("memory")
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
