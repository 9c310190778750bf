"""What is wrong with the text of a `limit_key`, found before there is a call to fill it with."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator

_FORMATTER = string.Formatter()
_PERCENT = re.compile(r"%(\(\w+\))?[sdr](?!\w)")
_STANDARD_SPEC = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(\.\d+)?([A-Za-z])")
_STANDARD_TYPES = frozenset("bcdeEfFgGnosxX")


def problem_of(template: str) -> str | None:
    """Return what would make a template fail, or be one key, for all calls; None if nothing is
    known to be wrong. The template can be parsed. Names of arguments are not checked here.
    """
    for field, spec in fields_of(template):
        for attribute in re.findall(r"\.([^.\[]*)", re.sub(r"\[[^\]]*\]", "", field)):
            if not attribute.isidentifier():
                return (
                    f"{attribute!r} is no name of an attribute, and a template can call nothing; "
                    "write a function of the task's arguments"
                )
        found = _STANDARD_SPEC.fullmatch(spec)
        # A single letter may be a format of a type of the application's own.
        if found and len(spec) > 1 and found[3] not in _STANDARD_TYPES:
            return f"{spec!r} is no format: it ends in the unknown type {found[3]!r}"
    # Not within a field: "%d" may stand in the format of a date.
    literal = "{}".join(text for text, *_ in _FORMATTER.parse(template))
    found = _PERCENT.search(literal)
    if found:
        return f"{found[0]!r} is not filled: write the name of an argument in braces"
    return None


def unused_names(template: str, names: Collection[str]) -> list[str]:
    """Return the names of arguments that are words of a template without fields: it makes one key
    for all calls, and perhaps should not.
    """
    if any(True for _ in fields_of(template)):
        return []
    words = set(re.findall(r"\w+", template))
    return [name for name in names if name in words]


def fields_of(template: str) -> Iterator[tuple[str, str]]:
    """Yield what stands in the braces of a template, and its format; those within a format
    included. Raises `ValueError` for what cannot be parsed.
    """
    for _, field, spec, _ in _FORMATTER.parse(template):
        if field is not None:
            yield field, spec or ""
            yield from fields_of(spec or "")
