"""Keys as text: shown so that a shell reads the same key again, and the spellings of one key.

A key's text is that of `wire.keys.unescape`: bytes that are no UTF-8 are lone surrogates in it.
"""

from __future__ import annotations

import re

from .render import blocks

_BARE = re.compile(r"[A-Za-z0-9_@%+=:,./-]|[^\x00-\x7f]")
"""Characters that bash does not treat specially."""
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def shell_word(text: str) -> str:
    """The key of this text as one word of bash that is safe to print.

    Bare where nothing needs quoting; else in single quotes; with anything that could harm a
    terminal, or that the output cannot encode, as `$'...'` with escapes. These are of bytes, so
    they mean the same in every locale.
    """
    # No argument can hold NUL: it is spelled as in the names of Redis keys.
    text = text.replace("\0", "%00")
    if not all(map(_can_be_shown, text)):
        return "$'" + "".join(map(_ansi_c, text)) + "'"
    if text and all(map(_BARE.match, text)):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def json_text(text: str) -> str:
    """The key of this text for JSON, where lone surrogates would be an error to many readers."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def spellings(text: str) -> set[str]:
    """All texts by which a command finds the key of this text: its own, and those of its display
    in a table and in JSON, where these differ.
    """
    return {text, text.replace("\0", "%00"), json_text(text)}


def _can_be_shown(char: str) -> bool:
    return char.isprintable() and (char.isascii() or blocks())


def _ansi_c(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if _can_be_shown(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
