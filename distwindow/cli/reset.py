"""`distwindow reset`: delete the windows, slots, pauses and circuit breakers of keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ..errors import counted
from ..inspect.key_text import spellings
from ..inspect.reset import StoredName, delete, stored_names
from ..inspect.selection import (
    Selection,
    any_of,
    argument_key_prefix,
    has_wildcards,
    key_prefix_of,
    kind_of,
    matching_keys,
    named_keys,
)
from ..inspect.servers import open_servers
from ..ring.key import check_prefix
from .command import DEFAULT_PREFIX, DEFAULT_URL, PrefixOption, UrlOption, report_errors
from .progress import ProgressLine
from .render import printable, shell_word


@report_errors
def reset(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY",
            help="Keys, as `stats` shows them. Put -- before a key that begins with a dash.",
            show_default=False,
        ),
    ],
    pattern: Annotated[
        bool, typer.Option("--pattern", help="Take each KEY as a glob: --pattern 'user:*'.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Delete the windows, slots, pauses and circuit breakers of keys: everything is free again,
    under all limits, upstreams are called, and breakers are closed.

    An unknown key is not an error, because all its permits are free already.
    """
    check_prefix(prefix)
    if pattern:
        selections = [matching_keys(prefix, key) for key in keys]
        selection = any_of(prefix, selections)
    else:
        selections = []
        selection = named_keys(prefix, keys)
    found = _FoundKeys()
    with open_servers(url) as servers, ProgressLine(servers) as line:
        scanned = 0
        for server in servers:
            for count, names in stored_names(server, prefix, selection):
                found.add(names if dry_run else delete(server, names))
                scanned += count
                line.update(scanned)
    done = "would be deleted" if dry_run else "deleted"
    if not pattern:
        for argument in keys:
            _print_result(argument, found.named(argument, prefix), prefix, done)
        return
    if dry_run:
        for key in sorted(found.keys.values(), key=lambda key: key.text):
            typer.echo(f"{shell_word(key.text)}: {_names([key])} {done}")
    for argument, one in zip(keys, selections, strict=True):
        _print_result(argument, found.selected_by(one), prefix, done, pattern=True)


@dataclass
class _FoundKey:
    text: str
    names: set[bytes] = field(default_factory=set)


class _FoundKeys:
    """The keys that the scan has found, by what their names begin with."""

    def __init__(self) -> None:
        self.keys: dict[bytes, _FoundKey] = {}
        self._by_spelling: dict[str, set[bytes]] = {}

    def add(self, names: Iterable[StoredName]) -> None:
        for raw, text in names:
            key_prefix = key_prefix_of(raw)
            if key_prefix not in self.keys:
                self.keys[key_prefix] = _FoundKey(text)
                for spelling in spellings(text):
                    self._by_spelling.setdefault(spelling, set()).add(key_prefix)
            self.keys[key_prefix].names.add(raw)

    def named(self, argument: str, prefix: str) -> list[_FoundKey]:
        """Return the keys of which `argument` is a spelling."""
        own = argument_key_prefix(prefix, argument)
        prefixes = {own, *self._by_spelling.get(argument, ())}
        return [self.keys[one] for one in prefixes if one in self.keys]

    def selected_by(self, selection: Selection) -> list[_FoundKey]:
        """Return the keys that `selection` includes."""
        return [
            key for key_prefix, key in self.keys.items() if selection.includes(key_prefix, key.text)
        ]


def _print_result(
    argument: str, keys: Sequence[_FoundKey], prefix: str, done: str, *, pattern: bool = False
) -> None:
    shown = printable(argument)  # as it was typed
    if keys:
        key_count = f"{counted(len(keys), 'key')}, " if pattern else ""
        typer.echo(f"{shown}: {key_count}{_names(keys)} {done}")
        return
    hint = ""
    if not pattern and has_wildcards(argument):
        hint = "; this names one key: for a pattern add --pattern"
    typer.echo(f"{shown}: nothing to delete under the prefix {prefix!r}{hint}")


def _names(keys: Iterable[_FoundKey]) -> str:
    """Return what these keys have: `2 windows and 1 set of slots`."""
    counts = Counter(kind_of(name) for key in keys for name in key.names)
    parts = [counted(counts["window"], "window")] if counts["window"] else []
    if counts["slots"]:
        parts.append(counted(counts["slots"], "set") + " of slots")
    if counts["pause"]:
        parts.append(counted(counts["pause"], "pause"))
    if counts["breaker"]:
        parts.append(counted(counts["breaker"], "circuit breaker"))
    return " and ".join(parts)
