"""200 asyncio tasks, on one hot key and over 10,000 keys: right verdicts per second. All run on
asyncio's event loop; distwindow on uvloop is compared with distwindow on asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

from benchmarks import finals, peers
from benchmarks.measure import Results, rounds, said, say
from benchmarks.report import Section, Target
from benchmarks.server import Server, running

TASKS = 200
HOT = ["user:42"]
MANY = [f"user:{number}" for number in range(10_000)]


@dataclass(frozen=True)
class Scene:
    """Which keys, under which quota, to reach what."""

    label: str
    keys: list[str]
    quota: peers.Quota
    target: Target | None


SCENES = (
    Scene("one hot key", HOT, peers.AMPLE, Target(5, at_least=True)),
    Scene("10,000 keys", MANY, peers.AMPLE, Target(4, at_least=True)),
    Scene("one hot key, refused", HOT, peers.SCARCE, None),
)


async def _race(
    acquire: peers.AsyncAcquire, keys: Sequence[str], admitted: bool, seconds: float
) -> float:
    """Right verdicts per second of all tasks together; each task has its share of the keys."""
    clock, right = time.perf_counter, 0
    share = max(1, len(keys) // TASKS)

    async def work(own: Sequence[str]) -> None:
        nonlocal right
        while True:
            for key in own:
                if clock() >= end:
                    return
                if bool(await acquire(key)) is admitted:
                    right += 1

    start = clock()
    end = start + seconds
    parts = [keys[i * share % len(keys) :][:share] for i in range(TASKS)]
    tasks = [asyncio.ensure_future(work(part)) for part in parts]
    try:
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return right / (clock() - start)


async def _warm(acquire: peers.AsyncAcquire, scene: Scene) -> None:
    """Every key exists, every connection is open; a scarce quota is used up."""
    if scene.quota is peers.SCARCE:
        finals.use_up([await acquire(scene.keys[0]) for _ in range(scene.quota.amount * 2)])
        return
    for at in range(0, len(scene.keys), TASKS):
        await asyncio.gather(*map(acquire, scene.keys[at : at + TASKS]))
    await asyncio.gather(*(acquire(scene.keys[0]) for _ in range(TASKS)))


class _Loop:
    """One event loop for a whole race, in which every contender stays open."""

    def __init__(
        self,
        server: Server,
        scene: Scene,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.server, self.scene = server, scene
        self.loop = new_loop()
        self.stack = AsyncExitStack()

    def race(
        self, section: str, entered: Sequence[peers.AsyncPeer], seconds: float, count: int
    ) -> Results:
        self.server.flush()
        try:
            contenders, errors = self.contenders(section, entered, seconds)
            results = rounds(section, contenders, count)
            results.errors |= errors
            return results
        finally:
            self.close()

    def contenders(
        self, section: str, entered: Sequence[peers.AsyncPeer], seconds: float
    ) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
        """A trial for each that could be opened, and the errors of the others."""
        opened, errors = self.loop.run_until_complete(self._open(section, entered))
        return {name: partial(self._trial, call, seconds) for name, call in opened.items()}, errors

    def close(self) -> None:
        with suppress(Exception):
            self.loop.run_until_complete(self.stack.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _trial(self, acquire: peers.AsyncAcquire, seconds: float) -> float:
        admitted = self.scene.quota is peers.AMPLE
        return self.loop.run_until_complete(_race(acquire, self.scene.keys, admitted, seconds))

    async def _open(
        self, section: str, entered: Sequence[peers.AsyncPeer]
    ) -> tuple[dict[str, peers.AsyncAcquire], dict[str, str]]:
        opened: dict[str, peers.AsyncAcquire] = {}
        errors: dict[str, str] = {}
        for peer in entered:
            try:
                acquire = await self.stack.enter_async_context(
                    peer.open(self.server.url, self.scene.quota)
                )
                await _warm(acquire, self.scene)
                opened[peer.name] = acquire
            except Exception as error:
                errors[peer.name] = said(error)
                say(f"{section}: {peer.name} failed: {errors[peer.name]}")
        return opened, errors


def _on_uvloop(section: Section, server: Server, scene: Scene, seconds: float, count: int) -> None:
    """distwindow on uvloop over distwindow on asyncio: the same scene, round by round."""
    import uvloop

    server.flush()
    loops = {
        "asyncio": _Loop(server, scene),
        "uvloop": _Loop(server, scene, uvloop.new_event_loop),
    }
    trials: dict[str, Callable[[], float]] = {}
    try:
        for name, loop in loops.items():
            opened, errors = loop.contenders(name, peers.our_async(), seconds)
            section.failed(errors, f"{scene.label}, on {name}: ")
            if peers.OURS in opened:
                trials[name] = opened[peers.OURS]
        results = rounds(f"asyncio, {scene.label}, event loops", trials, count)
    finally:
        for loop in loops.values():
            loop.close()
    section.failed(results.errors, f"{scene.label}, on ")
    if len(results.values) == len(loops):
        detail = ", ".join(f"{results.median(name):,.0f}/s on {name}" for name in loops)
        ratio = results.ratio("uvloop", "asyncio")
        section.add(f"{scene.label}: on uvloop, over asyncio", ratio, detail=detail)


def run(quick: bool) -> Section:
    section = Section("asyncio", f"{TASKS} asyncio tasks, against each peer's best")
    heat, final, count = (0.1, 0.25, 3) if quick else (0.25, 0.5, 9)
    with running() as server:
        everybody = peers.async_peers()
        heats = Results()
        for library in peers.LIBRARIES:  # not all at once: each opens hundreds of connections
            own = [peer for peer in everybody if peer.library == library]
            part = _Loop(server, SCENES[0]).race(f"asyncio, heat of {library}", own, heat, 1)
            heats.values |= part.values
            heats.errors |= part.errors
        section.failed(heats.errors, "heat: ")
        chosen = [*peers.our_async(), *finals.chosen(everybody, heats)]
        for scene in SCENES:
            results = _Loop(server, scene).race(
                f"asyncio, {scene.label}, finals", chosen, final, count
            )
            finals.report(section, scene.label, chosen, results, scene.target)
            _on_uvloop(section, server, scene, final, count)
    return section
