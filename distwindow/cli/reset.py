"""`distwindow reset`: forget keys."""

from __future__ import annotations

from typing import Annotated

import typer

from ..protocol.keys import check_prefix
from . import scan as walk
from .errors import guarded
from .options import DEFAULT_PREFIX, DEFAULT_URL, Prefix, Url, given_key
from .render import printable
from .servers import servers

_BATCH = 500


@guarded
def reset(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY...", help="Keys, as `stats` shows them.", show_default=False),
    ],
    url: Url = DEFAULT_URL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Forget the windows of keys: everything is free again, under all limits.

    A key of which nothing is known is no error: it is as free as it was to become.
    """
    check_prefix(prefix)
    given = [given_key(key) for key in keys]
    choice = walk.exactly(prefix, given)
    forgotten: dict[bytes, int] = {}
    with servers(url) as nodes, walk.Progress() as progress:
        tally = walk.Tally(watch=progress)
        for server in nodes:
            # What is named like a ring but is no hash is somebody else's: it stays.
            for step in walk.names(server, prefix, choice, tally, kind="hash"):
                for at in range(0, len(step), _BATCH):
                    names = [name for name, _ in step[at : at + _BATCH]]
                    pipeline = server.client.pipeline(transaction=False)
                    for name in names:
                        pipeline.unlink(name)
                    for name, count in zip(names, pipeline.execute(), strict=True):
                        stem = walk.stem_of(name)
                        forgotten[stem] = forgotten.get(stem, 0) + int(count)
    for argument, key in zip(keys, given, strict=True):
        count = sum(forgotten.get(stem, 0) for stem in walk.stems_of(prefix, key))
        shown = printable(argument)
        if count:
            typer.echo(f"{shown}: {count} window{'s' if count > 1 else ''} forgotten")
        else:
            typer.echo(f"{shown}: nothing to forget under the prefix {prefix!r}")
