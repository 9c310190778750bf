"""Stores, which execute commands: one protocol for threads, one for tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from .clock import Clock
from .command import Command
from .commands import Acquire
from .decision import Decision, Source

Reply = TypeVar("Reply")


class Store(Protocol):
    """Executes commands one after the other, each atomically. Safe to share between threads.

    Each call has one deadline (monotonic seconds), by default its start plus the store's timeout.
    Calls raise `StoreError` if no reply came in time, `ConfigurationError` if none ever will.
    """

    decided_by: Source
    clock: Clock
    unknown_total: int
    """Calls of which nobody knows whether they were charged."""

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        """The decision on one call: `decision_of` its reply. The hot path, with shortcuts."""

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        """The reply to `command`."""

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """The replies to many commands, which are sent together. A command that fails has its
        `DistwindowError` in place of the reply. The commands are executed in order, except for
        those that are sent again because the server did not have the script.
        """

    def close(self) -> None:
        """Close the store. Calls after this raise `ConfigurationError`."""


class AsyncStore(Protocol):
    """A `Store` for tasks. Safe to share between tasks, and between event loops."""

    decided_by: Source
    clock: Clock
    unknown_total: int
    """Calls of which nobody knows whether they were charged."""

    def decide(self, command: Acquire, deadline: float | None = None) -> Awaitable[Decision]: ...

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """The reply to `command`; `on_late_reply` gets one that comes after the caller is gone."""

    async def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]: ...

    async def drain(self) -> None:
        """Wait until what this event loop has sent is answered, or the timeout has passed."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` on the store's clock."""

    async def aclose(self) -> None:
        """Close the store. Calls after this raise `ConfigurationError`."""
