"""Heats and finals: which settings of a peer race, and how the outcome is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from benchmarks import peers
from benchmarks.measure import Results
from benchmarks.report import Section, Target

PLACES = 2
"""How many settings of each library reach the finals."""


Entrant = TypeVar("Entrant", peers.Peer, peers.AsyncPeer)


def chosen(everybody: Sequence[Entrant], heats: Results) -> list[Entrant]:
    """The best settings of each library."""
    found: list[Entrant] = []
    for library in peers.LIBRARIES:
        ran = [p for p in everybody if p.library == library and p.name in heats.values]
        found += sorted(ran, key=lambda peer: -heats.median(peer.name))[:PLACES]
    return found


def use_up(verdicts: Iterable[object]) -> None:
    """Acquire until refused."""
    if all(verdicts):
        raise RuntimeError("twice the limit was admitted and nothing refused")


def report(
    section: Section,
    label: str,
    ran: Sequence[Entrant],
    results: Results,
    target: Target | None,
) -> None:
    """distwindow over the best settings of each library, and over the best of them all."""
    best: dict[str, str] = {}
    for library in peers.LIBRARIES:
        names = [peer.name for peer in ran if peer.library == library]
        if (name := results.best(names)) is not None:
            best[library] = name
    mine = peers.OURS if peers.OURS in results.values else None
    champion = results.best(list(best.values()))
    if mine and champion:
        detail = f"{results.median(mine):,.0f}/s, the best peer {results.median(champion):,.0f}/s"
        ratio = results.ratio(mine, champion)
        section.add(f"{label}: over the best peer", ratio, target=target, detail=detail)
    for library, name in best.items():
        section.add(
            f"{label}: over {library}",
            results.ratio(mine, name) if mine else None,
            detail=f"{results.median(name):,.0f}/s {name}",
        )
    section.failed(results.errors, f"{label}: ")
