"""Finds and loads the Lua scripts. A script is joined with the pieces that it names, once.

The scripts are in `lua/` beside the package in a checkout, and in `distwindow/_lua` in a wheel.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import ConfigurationError

_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r"^--@include (\S+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script as it is sent. `head` is the `---` lines of its file: name, KEYS, ARGV, RETURN."""

    name: str
    text: str
    sha: str
    head: tuple[str, ...]


def scripts_folder() -> Path:
    """Return the folder of the `.lua` files; raise `ConfigurationError` if there is none."""
    for folder in (_PACKAGE / "_lua", _PACKAGE.parent / "lua"):
        # Not `Path.is_file`: it takes a `ValueError` of a signal handler for a missing file.
        if os.access(folder / "acquire.lua", os.R_OK):
            return folder
    raise ConfigurationError(
        f"distwindow's Lua scripts are missing: neither {_PACKAGE / '_lua'} nor "
        f"{_PACKAGE.parent / 'lua'} holds acquire.lua; reinstall distwindow"
    )


def load_scripts() -> None:
    """Read all scripts, so that no call has to: what a signal handler raises while a file is read
    may be taken for an error of the file.
    """
    for name in script_names():
        load_script(name)


def script_names() -> list[str]:
    """Return the names of all scripts, sorted."""
    return sorted(path.stem for path in scripts_folder().glob("*.lua"))


@cache
def load_script(name: str) -> Script:
    """Return the script `name`, with its include lines replaced by the pieces that they name.

    Comments are removed, because EVAL sends the text and the server keeps it.
    """
    root = scripts_folder()
    source = (root / f"{name}.lua").read_text(encoding="utf-8")
    head = tuple(line[4:] for line in source.splitlines() if line.startswith("--- "))
    joined = _INCLUDE.sub(lambda line: (root / line[1]).read_text(encoding="utf-8"), source)
    text = _COMMENT.sub("", joined)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), head)
