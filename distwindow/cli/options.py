"""The options that several commands share, and keys as they come from a shell."""

from __future__ import annotations

import os
from typing import Annotated

import typer

DEFAULT_URL = "redis://localhost:6379/0"
DEFAULT_PREFIX = "distwindow"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="DISTWINDOW_URL",
        metavar="URL",
        help="Where the state lives. A password is safer in the variable than in the list of "
        "processes.",
    ),
]
Prefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        envvar="DISTWINDOW_PREFIX",
        metavar="WORD",
        help="What the names of all keys begin with.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text.")]


def given_key(argument: str) -> str | bytes:
    """A key from the command line: bytes where it is not text in the shell's encoding."""
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python hands undecodable bytes over as lone surrogates
        return os.fsencode(argument)
    return argument
