"""The context of a call: where it has entered this process (Sentinel `ContextUtil`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..core.errors import short_repr
from ..entry_options import check_origin


class CallContext:
    """The entrance of the calls of a thread or task, and who calls; empty if that is not known."""

    __slots__ = ("name", "origin")

    def __init__(self, name: str, origin: str) -> None:
        self.name = name
        self.origin = origin


NO_CONTEXT = CallContext("", "")

_context: ContextVar[CallContext] = ContextVar("distwindow_context", default=NO_CONTEXT)
current_context = _context.get
"""Return the context of this thread or task."""


@contextmanager
def call_context(name: str, origin: str | None = None) -> Iterator[None]:
    """Have the entries of guards inside the block, in this thread or task and in tasks that it
    creates, come from the entrance `name` and from `origin`, unless they say otherwise.

        with call_context("GET:/checkout", origin="app-a"):
            with guard.entry("payments"): ...

    `FlowRule(strategy="chain", ref_resource=name)` counts these entries alone. The outermost
    context holds: one inside it has no effect, as in Sentinel (`ContextUtil.trueEnter`). Raises
    `TypeError` and `ValueError` for what is no name.

    A block that is left in another thread or task than it was entered in, as a framework does with
    generators, has an effect only where it was entered, and only until it is left.
    """
    caller = check_origin(origin)
    if type(name) is not str:
        raise TypeError(f"name={short_repr(name)} is not a str")
    if not name:
        raise ValueError("name must not be empty")
    if _context.get().name:
        yield
        return
    context = CallContext(name, caller)
    token = _context.set(context)
    try:
        yield
    finally:
        try:
            _context.reset(token)
        except ValueError:  # it was set for another thread or task: empty it there
            context.name = context.origin = ""
