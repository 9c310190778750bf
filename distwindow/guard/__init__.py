"""`Guard`: rules around calls, decided for the whole fleet."""

from .async_guard import AsyncGuard
from .chain import ChainSlot, GuardCall, Outcome
from .context import call_context
from .guard import Guard
from .guarded import guarded

__all__ = ["AsyncGuard", "ChainSlot", "Guard", "GuardCall", "Outcome", "call_context", "guarded"]
