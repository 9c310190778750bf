"""The two drivers of dialogues: the only code that knows both worlds, blocking and awaiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .effect import Dialogue, Sleep, Wait

T = TypeVar("T")


def run(
    dialogue: Dialogue[T],
    execute: Callable[[Any], Any],
    sleep: Callable[[float], object],
) -> T:
    """Drive `dialogue` to its end, blocking. `execute` takes commands, alone and `Together`."""
    answer: Any = None
    failure: Exception | None = None
    while True:
        try:
            effect = dialogue.send(answer) if failure is None else dialogue.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = failure = None
        try:
            if isinstance(effect, Wait):
                effect.gate.wait(effect.seconds)
            else:
                answer = sleep(effect.seconds) if isinstance(effect, Sleep) else execute(effect)
        except Exception as exc:
            failure = exc


async def arun(
    dialogue: Dialogue[T],
    execute: Callable[[Any], Awaitable[Any]],
    sleep: Callable[[float], Awaitable[object]],
) -> T:
    """Drive `dialogue` to its end, awaiting."""
    answer: Any = None
    failure: Exception | None = None
    while True:
        try:
            effect = dialogue.send(answer) if failure is None else dialogue.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = failure = None
        try:
            if isinstance(effect, Wait):
                await effect.gate.await_(effect.seconds)
            else:
                asked = sleep(effect.seconds) if isinstance(effect, Sleep) else execute(effect)
                answer = await asked
        except Exception as exc:
            failure = exc
