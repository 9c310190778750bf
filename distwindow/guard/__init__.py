"""`Guard`: rules around calls, decided for the whole fleet."""

from .chain import ChainSlot, GuardCall, Outcome, call_context
from .guard import AsyncGuard, Guard
from .guarded import guarded

__all__ = ["AsyncGuard", "ChainSlot", "Guard", "GuardCall", "Outcome", "call_context", "guarded"]
