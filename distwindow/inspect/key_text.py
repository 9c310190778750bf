"""The texts of a key: as an argument of a command, as an output shows it, and in JSON.

The text of a key is that of `unescape` in `ring/key.py`: bytes that are not UTF-8 are surrogates.
"""

from __future__ import annotations

import os


def parse_key(argument: str) -> str | bytes:
    """Return the key of an argument: `bytes` where it is no text in the shell's encoding."""
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python decodes such arguments to lone surrogates
        return os.fsencode(argument)
    return argument


def json_text(text: str) -> str:
    """Return the key of this text for JSON, where many readers refuse lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def spellings(text: str) -> set[str]:
    """Return the texts that name the key of this text: in commands, in tables and in JSON."""
    return {text, text.replace("\0", "%00"), json_text(text)}
