"""What a store is: something that executes commands. One protocol for each world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from ..core.clock import Clock
from ..core.decision import Decision, Source
from ..core.errors import ConfigurationError
from ..protocol.commands import Acquire, Command

Reply = TypeVar("Reply")


class Store(Protocol):
    """Executes commands one after the other, atomically. Safe to share between threads.

    Each call has one deadline (monotonic seconds), by default its start plus the store's timeout.
    `execute` raises `StoreError` where the store did not answer in time or at all, and
    `ConfigurationError` where it never will.
    """

    source: Source
    clock: Clock
    unknown_total: int
    """Calls of which nobody knows whether they were charged."""

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        """`flow.admit.decide` on the reply to `command`: the hot path, which stores shorten."""
        ...

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply: ...

    def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """The replies to many commands, sent together; in the place of a reply the
        `DistwindowError` that a command came to. In order, but for those that a server has to be
        sent again because it has lost its scripts.
        """
        ...

    def close(self) -> None: ...


class AsyncStore(Protocol):
    """The same for tasks. Safe to share between tasks, and between event loops."""

    source: Source
    clock: Clock
    unknown_total: int
    """Calls of which nobody knows whether they were charged."""

    def attempt(self, command: Acquire, deadline: float | None = None) -> Awaitable[Decision]: ...

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """`on_late_reply` is called with a reply that comes after the caller was cancelled or has
        given up.
        """
        ...

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]: ...

    async def drain(self) -> None:
        """Until what this event loop has sent is answered, or the timeout has passed."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def aclose(self) -> None: ...


def closed_failure() -> ConfigurationError:
    """The error of every call after `close`."""
    return ConfigurationError("this limiter is closed; make a new one")
