"""Keys as text: quoted so that a shell reads the same key again, and the spellings of one key.

The text of a key is that of `unescape` in `ring/key.py`: bytes that are not UTF-8 are lone
surrogates in it.
"""

from __future__ import annotations

import re

from .render import supports_unicode

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_UNQUOTED = re.compile(r"[A-Za-z0-9_@%+=:,./-]|[^\x00-\x7f]")
"""Characters that have no special meaning in bash."""
_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def shell_word(text: str) -> str:
    """Return the key of this text as one word of bash that is safe to print.

    The word is bare where nothing needs quoting, else in single quotes. A character that could
    harm a terminal, or that the output cannot encode, makes it `$'...'` with escapes. These are
    escapes of bytes, so they mean the same in every locale.
    """
    if _PLAIN.fullmatch(text):  # as most keys are
        return text
    # An argument cannot contain NUL: it is spelled as in the names of Redis keys.
    text = text.replace("\0", "%00")
    if not all(map(_is_displayable, text)):
        return "$'" + "".join(map(_ansi_c_quoted, text)) + "'"
    if text and all(map(_UNQUOTED.match, text)):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def json_text(text: str) -> str:
    """Return the key of this text for JSON, where many readers refuse lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def spellings(text: str) -> set[str]:
    """Return all texts by which a command finds the key of this text: its own, and its spellings
    in a table and in JSON, where these differ.
    """
    return {text, text.replace("\0", "%00"), json_text(text)}


def _is_displayable(char: str) -> bool:
    return char.isprintable() and (char.isascii() or supports_unicode())


def _ansi_c_quoted(char: str) -> str:
    """Return the character as it is written inside `$'...'`, which bash calls ANSI-C quoting."""
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if _is_displayable(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
