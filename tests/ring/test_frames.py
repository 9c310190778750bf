"""The common part of frames, which commands share, is whole whenever another thread may take it."""

from __future__ import annotations

from typing import Any

from distwindow.ring.command import FrameParts
from distwindow.ring.commands import Acquire
from distwindow.runtime.command_cache import CommandCache

STAMP = b"1700000000250.000042"


class Watched(FrameParts):
    """Has another command make its frame after each change, as another thread may."""

    def __init__(self, other: Acquire) -> None:
        super().__init__()
        self.seen: list[bytes] = []
        self.__dict__["other"] = other

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        other, self.__dict__["other"] = self.__dict__.get("other"), None
        if other is not None:
            self.seen.append(Acquire(other.charges, frame_parts=self).frame(STAMP))
            self.__dict__["other"] = other


def test_a_frame_that_is_made_amid_another_is_whole() -> None:
    cache = CommandCache("p", "5/minute")
    one, two = cache.acquire_command("one"), cache.acquire_command("two")
    parts = Watched(two)
    Acquire(one.charges, frame_parts=parts).frame(STAMP)
    assert len(parts.seen) > 1
    assert set(parts.seen) == {Acquire(two.charges).frame(STAMP)}
