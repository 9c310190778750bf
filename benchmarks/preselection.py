"""Selects the best settings of each peer, and reports the comparison of these with distwindow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from benchmarks import peers
from benchmarks.measure import Results
from benchmarks.report import Section, Target

SETTINGS_PER_LIBRARY = 2

AnyPeer = TypeVar("AnyPeer", peers.Peer, peers.AsyncPeer)


def best_settings(candidates: Sequence[AnyPeer], results: Results) -> list[AnyPeer]:
    """Return the settings of each library with the highest rates."""
    best: list[AnyPeer] = []
    for library in peers.LIBRARIES:
        own = [p for p in candidates if p.library == library and p.name in results.values]
        own.sort(key=lambda peer: -results.median(peer.name))
        best += own[:SETTINGS_PER_LIBRARY]
    return best


def use_up(decisions: Iterable[object]) -> None:
    """Consume decisions, of which some must be refusals, to use up a quota."""
    if all(decisions):
        raise RuntimeError("twice the limit was admitted and nothing refused")


def report(
    section: Section,
    label: str,
    contenders: Sequence[AnyPeer],
    results: Results,
    target: Target | None,
) -> None:
    """Add rows for distwindow over the best settings of each library, and over the best of all."""
    best: dict[str, str] = {}
    for library in peers.LIBRARIES:
        names = [peer.name for peer in contenders if peer.library == library]
        if (name := results.best(names)) is not None:
            best[library] = name
    own = peers.DISTWINDOW if peers.DISTWINDOW in results.values else None
    best_peer = results.best(list(best.values()))
    if own and best_peer:
        detail = f"{results.median(own):,.0f}/s, the best peer {results.median(best_peer):,.0f}/s"
        ratio = results.ratio(own, best_peer)
        section.add(f"{label}: over the best peer", ratio, target=target, detail=detail)
    for library, name in best.items():
        section.add(
            f"{label}: over {library}",
            results.ratio(own, name) if own else None,
            detail=f"{results.median(name):,.0f}/s {name}",
        )
    section.add_failures(results.errors, f"{label}: ")
