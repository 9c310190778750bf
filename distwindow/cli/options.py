"""The options that several commands share, and the parsing of keys from the command line."""

from __future__ import annotations

import os
from typing import Annotated

import typer

DEFAULT_URL = "redis://localhost:6379/0"
DEFAULT_PREFIX = "distwindow"

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="DISTWINDOW_URL",
        metavar="URL",
        help="The store. Put a password into the variable: other users can read arguments in the "
        "process list.",
    ),
]
PrefixOption = Annotated[
    str,
    typer.Option(
        "--prefix",
        envvar="DISTWINDOW_PREFIX",
        metavar="WORD",
        help="The prefix of all Redis keys.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def parse_key(argument: str) -> str | bytes:
    """Return the key that a command-line argument names: `bytes` where the argument is not text in
    the shell's encoding, else `str`.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python decodes such arguments to lone surrogates
        return os.fsencode(argument)
    return argument
