"""`distwindow reset`: forget keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ..protocol.keys import RingName, check_prefix
from . import scan as walk
from .errors import guarded
from .key_text import shell_word, spellings
from .options import DEFAULT_PREFIX, DEFAULT_URL, Prefix, Url
from .render import printable
from .servers import Server, servers

_BATCH = 500


@guarded
def reset(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...",
            help="Keys, as `stats` shows them. A -- goes before keys that begin with a dash.",
            show_default=False,
        ),
    ],
    pattern: Annotated[
        bool, typer.Option("--pattern", help="The KEYs are globs: --pattern 'user:*'.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be forgotten.")
    ] = False,
    url: Url = DEFAULT_URL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Forget the windows of keys: everything is free again, under all limits.

    A key of which nothing is known is no error: it is as free as it was to become.
    """
    check_prefix(prefix)
    if pattern:
        choices = [walk.like(prefix, key) for key in keys]
        choice = walk.any_of(prefix, choices)
    else:
        choices = []
        choice = walk.exactly(prefix, keys)
    found = _Found()
    with servers(url) as nodes, walk.Progress() as progress:
        tally = walk.Tally(watch=progress)
        for server in nodes:
            # What is named like a ring but is no hash is somebody else's: it stays.
            for step in walk.names(server, prefix, choice, tally, kind="hash"):
                found.add(step if dry_run else _forget(server, step))
    done = "would be forgotten" if dry_run else "forgotten"
    if not pattern:
        for argument in keys:
            _say(argument, found.named(argument, prefix), prefix, done)
        return
    if dry_run:
        for key in sorted(found.keys.values(), key=lambda key: key.text):
            typer.echo(f"{shell_word(key.text)}: {_windows([key])} {done}")
    for argument, one in zip(keys, choices, strict=True):
        _say(argument, found.meant_by(one), prefix, done, pattern=True)


@dataclass
class _Key:
    """A key that was found."""

    text: str
    rings: set[bytes] = field(default_factory=set)


class _Found:
    """The keys that were found, by the stems of their rings."""

    def __init__(self) -> None:
        self.keys: dict[bytes, _Key] = {}
        self._stems_by_spelling: dict[str, set[bytes]] = {}

    def add(self, step: Iterable[tuple[bytes, RingName]]) -> None:
        for name, ring in step:
            stem = walk.stem_of(name)
            if stem not in self.keys:
                self.keys[stem] = _Key(ring.key)
                for text in spellings(ring.key):
                    self._stems_by_spelling.setdefault(text, set()).add(stem)
            self.keys[stem].rings.add(name)

    def named(self, argument: str, prefix: str) -> list[_Key]:
        stems = {walk.plain_stem(prefix, argument), *self._stems_by_spelling.get(argument, ())}
        return [self.keys[stem] for stem in stems if stem in self.keys]

    def meant_by(self, choice: walk.Choice) -> list[_Key]:
        return [key for stem, key in self.keys.items() if choice.wants(stem, key.text)]


def _forget(server: Server, step: Sequence[tuple[bytes, RingName]]) -> list[tuple[bytes, RingName]]:
    """Those of the rings that were there, and no longer are."""
    forgotten = []
    for at in range(0, len(step), _BATCH):
        part = step[at : at + _BATCH]
        pipeline = server.client.pipeline(transaction=False)
        for name, _ in part:
            pipeline.unlink(name)
        for ring, count in zip(part, pipeline.execute(), strict=True):
            if count:
                forgotten.append(ring)
    return forgotten


def _say(
    argument: str, keys: Sequence[_Key], prefix: str, done: str, *, pattern: bool = False
) -> None:
    shown = printable(argument)  # as it was typed
    if keys:
        several = f"{_counted(len(keys), 'key')}, " if pattern else ""
        typer.echo(f"{shown}: {several}{_windows(keys)} {done}")
        return
    hint = ""
    if not pattern and walk.has_wildcards(argument):
        hint = "; this names one key: for a pattern add --pattern"
    typer.echo(f"{shown}: nothing to forget under the prefix {prefix!r}{hint}")


def _windows(keys: Iterable[_Key]) -> str:
    return _counted(sum(len(key.rings) for key in keys), "window")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
