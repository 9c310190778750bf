"""The two drivers of dialogues: the only code that knows both worlds, blocking and awaiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..core.interrupts import is_interruption
from .steps import Dialogue, Sleep, Wait

T = TypeVar("T")


def run(
    dialogue: Dialogue[T],
    execute: Callable[[Any], Any],
    sleep: Callable[[float], object],
) -> T:
    """Drive `dialogue` to its end, blocking. `execute` takes commands: plain ones, `Fetch`, and
    `Together`.

    However it ends, the dialogue is closed before this raises: somebody may keep the exception, and
    with it the dialogue and whatever that still had to settle.
    """
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                effect = dialogue.send(answer) if failure is None else dialogue.throw(failure)
            except StopIteration as end:
                if is_interruption(end):
                    raise
                value: T = end.value
                return value
            answer = failure = None
            try:
                if isinstance(effect, Wait):
                    effect.gate.wait(effect.seconds)
                elif isinstance(effect, Sleep):
                    sleep(effect.seconds)
                else:
                    answer = execute(effect)
            except Exception as exc:
                failure = exc
    except BaseException:
        dialogue.close()
        raise


async def arun(
    dialogue: Dialogue[T],
    execute: Callable[[Any], Awaitable[Any]],
    sleep: Callable[[float], Awaitable[object]],
) -> T:
    """Drive `dialogue` to its end, awaiting; else as `run`."""
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                effect = dialogue.send(answer) if failure is None else dialogue.throw(failure)
            except StopIteration as end:
                if is_interruption(end):
                    raise
                value: T = end.value
                return value
            answer = failure = None
            try:
                if isinstance(effect, Wait):
                    await effect.gate.await_(effect.seconds)
                elif isinstance(effect, Sleep):
                    await sleep(effect.seconds)
                else:
                    answer = await execute(effect)
            except Exception as exc:
                failure = exc
    except BaseException:
        dialogue.close()
        raise
