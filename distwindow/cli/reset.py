"""`distwindow reset`: delete the windows, slots and circuit breakers of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ..errors import counted
from ..ring.key import RingNameParts, check_prefix, line_name, shaping_name
from .breakers import breaker_page, is_breaker_name
from .command import (
    DEFAULT_PREFIX,
    DEFAULT_URL,
    PIPELINE_SIZE,
    PrefixOption,
    Server,
    UrlOption,
    open_servers,
    report_errors,
)
from .render import printable, shell_word, spellings
from .scan import (
    Page,
    ProgressLine,
    Selection,
    any_of,
    argument_key_prefix,
    has_wildcards,
    matching_keys,
    named_keys,
    ring_key_prefix,
    scan_names,
)
from .stats import find_slots, is_slots_name


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
    """Delete the windows, slots and circuit breakers of keys: everything is free again, under all
    limits, and breakers are closed.

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
            # A name like a ring's that is not a hash belongs to another program, and is kept.
            for names in scan_names(server, prefix, selection, redis_type="hash"):
                page = names.rings + names.shaped + breaker_page(names.breakers, server)
                found.add(page if dry_run else _delete(server, page))
                scanned += names.names
                line.update(scanned)
            # Their holders are told that they have lost their slots when these are renewed.
            slots = find_slots(server, prefix, selection)
            found.add(slots if dry_run else _delete(server, slots))
    done = "would be deleted" if dry_run else "deleted"
    if not pattern:
        for argument in keys:
            _print_result(argument, found.named(argument, prefix), prefix, done)
        return
    if dry_run:
        for key in sorted(found.keys.values(), key=lambda key: key.text):
            typer.echo(f"{shell_word(key.text)}: {_windows([key])} {done}")
    for argument, one in zip(keys, selections, strict=True):
        _print_result(argument, found.selected_by(one), prefix, done, pattern=True)


@dataclass
class _FoundKey:
    text: str
    rings: set[bytes] = field(default_factory=set)


class _FoundKeys:
    """The keys that the scan has found, by the prefixes of their rings' names."""

    def __init__(self) -> None:
        self.keys: dict[bytes, _FoundKey] = {}
        self._by_spelling: dict[str, set[bytes]] = {}

    def add(self, page: Page) -> None:
        for name, ring in page:
            key_prefix = ring_key_prefix(name)
            if key_prefix not in self.keys:
                self.keys[key_prefix] = _FoundKey(ring.key)
                for text in spellings(ring.key):
                    self._by_spelling.setdefault(text, set()).add(key_prefix)
            self.keys[key_prefix].rings.add(name)

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


def _delete(server: Server, page: Page) -> Page:
    """Delete these rings. Return those that existed."""
    deleted: list[tuple[bytes, RingNameParts]] = []
    for at in range(0, len(page), PIPELINE_SIZE):
        part = page[at : at + PIPELINE_SIZE]
        pipeline = server.client.pipeline(transaction=False)
        for name, _ in part:
            pipeline.unlink(name, shaping_name(name), line_name(name))
        for ring, count in zip(part, pipeline.execute(), strict=True):
            if count:
                deleted.append(ring)
    return deleted


def _print_result(
    argument: str, keys: Sequence[_FoundKey], prefix: str, done: str, *, pattern: bool = False
) -> None:
    shown = printable(argument)  # as it was typed
    if keys:
        key_count = f"{counted(len(keys), 'key')}, " if pattern else ""
        typer.echo(f"{shown}: {key_count}{_windows(keys)} {done}")
        return
    hint = ""
    if not pattern and has_wildcards(argument):
        hint = "; this names one key: for a pattern add --pattern"
    typer.echo(f"{shown}: nothing to delete under the prefix {prefix!r}{hint}")


def _windows(keys: Iterable[_FoundKey]) -> str:
    names = [name for key in keys for name in key.rings]
    slots, breakers = sum(map(is_slots_name, names)), sum(map(is_breaker_name, names))
    windows = len(names) - slots - breakers
    parts = [counted(windows, "window")] if windows else []
    if slots:
        parts.append(counted(slots, "set") + " of slots")
    if breakers:
        parts.append(counted(breakers, "circuit breaker"))
    return " and ".join(parts)
