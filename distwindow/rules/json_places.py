"""Where the keys of a JSON file of rules stand, which Python's decoder does not tell."""

from __future__ import annotations

import json
import re
from typing import TypeAlias

Path: TypeAlias = "tuple[str | int, ...]"
"""Of a key of the file `("flow",)`, of a rule `("flow", 0)`, of a field `("flow", 0, "count")`."""

_SPACE = re.compile(r"[ \t\n\r]*")


class JsonPlaces:
    """The positions of the keys and rules in `text`, which is JSON and an object."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decode = json.JSONDecoder().raw_decode
        self.positions: dict[Path, int] = {}
        self.repeated: Path | None = None
        """The first key that is written twice in one object; its position is the second one."""
        self._object(self._skip(0), ())

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return at if match is None else match.end()

    def _value(self, at: int, path: Path) -> int:
        """Return the end of the value at `at`. Looks into the file's lists, and their rules."""
        opening = self._text[at]
        if opening == "[" and len(path) == 1:
            return self._list(at, path)
        if opening == "{" and len(path) == 2:
            return self._object(at, path)
        return self._decode(self._text, at)[1]

    def _object(self, at: int, path: Path) -> int:
        at = self._skip(at + 1)
        while self._text[at] != "}":
            key_at = at
            key, at = self._decode(self._text, at)
            name = (*path, key)
            if name in self.positions and self.repeated is None:
                self.repeated = name
            self.positions[name] = key_at
            at = self._value(self._skip(self._skip(at) + 1), name)
            at = self._after(at)
        return at + 1

    def _list(self, at: int, path: Path) -> int:
        at, number = self._skip(at + 1), 0
        while self._text[at] != "]":
            rule: Path = (*path, number)
            self.positions[rule] = at
            at = self._after(self._value(at, rule))
            number += 1
        return at + 1

    def _after(self, at: int) -> int:
        """Return the position after the end of a value, and after its comma if there is one."""
        at = self._skip(at)
        return self._skip(at + 1) if self._text[at] == "," else at
