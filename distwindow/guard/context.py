"""The context of a call: where it has entered this process (Sentinel `ContextUtil`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from ..core.errors import short_repr


class CallContext(NamedTuple):
    """The entrance of the calls of a thread or task, and who calls; empty if that is not known."""

    name: str
    origin: str


NO_CONTEXT = CallContext("", "")

_context: ContextVar[CallContext] = ContextVar("distwindow_context", default=NO_CONTEXT)
current_context = _context.get
"""Return the context of this thread or task."""


@contextmanager
def call_context(name: str, origin: str = "") -> Iterator[None]:
    """Have the entries of guards inside the block, in this thread or task and in tasks that it
    creates, come from the entrance `name` and from `origin`, unless they say otherwise.

        with call_context("GET:/checkout", origin="app-a"):
            with guard.entry("payments"): ...

    `FlowRule(strategy="chain", ref_resource=name)` counts these entries alone. The outermost
    context holds: one inside it has no effect, as in Sentinel (`ContextUtil.trueEnter`). Raises
    `TypeError` and `ValueError` for what is no name.
    """
    for what, value in (("name", name), ("origin", origin)):
        if type(value) is not str:
            raise TypeError(f"{what}={short_repr(value)} is not a str")
    if not name:
        raise ValueError("name must not be empty")
    if _context.get() is not NO_CONTEXT:
        yield
        return
    token = _context.set(CallContext(name, origin))
    try:
        yield
    finally:
        _context.reset(token)
