"""Rules from a TOML or JSON file: lists of tables named after the kinds of rules.

An error names the file, the line where that can be known, the rule and the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import ConfigurationError, short_repr
from ..sentinel.rules import DegradeRule, FlowRule, Rule
from .authority import AuthorityRule
from .system import SystemRule

_KINDS: dict[str, Any] = {
    "flow": FlowRule,
    "degrade": DegradeRule,
    "authority": AuthorityRule,
    "system": SystemRule,
}


class RuleFile(NamedTuple):
    """What a file of rules says."""

    rules: tuple[Rule, ...]
    store: str | None
    """The URL of the store; None if the file does not name one."""


def read_rules(path: str | os.PathLike[str]) -> RuleFile:
    """Return the rules in the file at `path`, which ends in .toml or .json.

    Raises `ConfigurationError` for what cannot be read as rules, and `OSError` for a file that
    cannot be read.
    """
    file = Path(path)
    if file.suffix not in (".toml", ".json"):
        raise ConfigurationError(f"{file}: rules are read from a .toml or a .json file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file}: this is not UTF-8 text: {exc}") from exc
    reader = _Reader(file, text)
    return RuleFile(tuple(reader.rules()), reader.store())


class _Reader:
    """Reads the rules of one file."""

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._text = text
        self._is_toml = file.suffix == ".toml"
        self._content = self._parse_toml() if self._is_toml else self._parse_json()
        if not isinstance(self._content, dict):
            raise self._error(None, f'write {{"flow": [...]}}, not {short_repr(self._content)}')
        self._check_names("", None, self._content, [*_KINDS, "store"], "key")

    def store(self) -> str | None:
        """Return the URL of the store; None if there is none."""
        url = self._content.get("store")
        if url is not None and not isinstance(url, str):
            raise self._error(self._line_of("store"), f"store={short_repr(url)} is not a URL")
        return url

    def rules(self) -> Iterator[Rule]:
        """Yield the rules, kind by kind."""
        for kind, rule_type in _KINDS.items():
            tables = self._content.get(kind, [])
            if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
                form = f"[[{kind}]]" if self._is_toml else f'"{kind}": [{{...}}]'
                raise self._error(self._line_of(kind), f"write the rules of {kind} as {form}")
            for number, table in enumerate(tables):
                yield self._rule(kind, number, rule_type, table)

    def _rule(self, kind: str, number: int, rule_type: Any, table: dict[str, Any]) -> Rule:
        name = f"{rule_type.__name__} {number + 1}"
        if "resource" in table:
            name += f" ({short_repr(table['resource'])})"
        fields = dataclasses.fields(rule_type)
        at = (kind, number, table)
        self._check_names(name + ": ", at, table, [field.name for field in fields], "field")
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in table:
                raise self._error(
                    self._line_in(at, None), f"{name}: the field {field.name!r} is missing"
                )
        try:
            rule: Rule = rule_type(**table)
        except (ConfigurationError, TypeError) as exc:
            # The first word of a message about a field is the field, after the rule's name.
            words = re.findall(r"\w+", str(exc).rpartition(": ")[2])
            named = next((word for word in words if word in table), None)
            raise self._error(self._line_in(at, named), f"{name}: {exc}") from exc
        return rule

    def _check_names(
        self, where: str, at: Any, table: dict[str, Any], known: list[str], what: str
    ) -> None:
        for name in table:
            if name not in known:
                # Sentinel's own spelling, too: maxQueueingTimeMs.
                snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
                near = difflib.get_close_matches(snake, known, 1)
                hint = (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else f"; there are {', '.join(map(repr, known))}"
                )
                line = self._line_of(name) if at is None else self._line_in(at, name)
                raise self._error(line, f"{where}unknown {what} {name!r}{hint}")

    # -- lines --

    def _error(self, line: int | None, message: str) -> ConfigurationError:
        place = f"{self._file}" if line is None else f"{self._file}, line {line}"
        return ConfigurationError(f"{place}: {message}")

    def _line_of(self, name: str) -> int | None:
        """Return the line of the only key `name` of the file; None if there are several."""
        key = re.escape(name)
        pattern = (
            rf'^\s*(?:\[*\s*)"?{key}"?\s*[\]=.]'
            if self._is_toml
            else rf"{re.escape(json.dumps(name))}\s*:"
        )
        found = list(re.finditer(pattern, self._text, re.MULTILINE))
        return self._line_at(found[0].end() - 1) if len(found) == 1 else None

    def _line_in(self, at: tuple[str, int, dict[str, Any]], name: str | None) -> int | None:
        """Return the line of the key `name` of one rule, or of the rule; None if unknown."""
        kind, number, table = at
        if not self._is_toml:
            return self._line_of(name) if name else self._line_of_value(table.get("resource"))
        heads = list(re.finditer(rf"^\s*\[\[\s*{kind}\s*\]\]", self._text, re.MULTILINE))
        if number >= len(heads):
            return None  # written as an inline array
        start = heads[number].end()
        following = re.search(r"^\s*\[", self._text[start:], re.MULTILINE)
        body = self._text[start : start + following.start() if following else None]
        if name is None:
            return self._line_at(start)
        found = re.search(rf'^\s*"?{re.escape(name)}"?\s*=', body, re.MULTILINE)
        return self._line_at(start + found.end()) if found else self._line_at(start)

    def _line_of_value(self, value: Any) -> int | None:
        found = list(re.finditer(rf":\s*{re.escape(json.dumps(value))}", self._text))
        return self._line_at(found[0].end()) if len(found) == 1 else None

    def _line_at(self, position: int) -> int:
        return self._text.count("\n", 0, position) + 1

    # -- formats --

    def _parse_json(self) -> Any:
        try:
            return json.loads(self._text, object_pairs_hook=self._without_repetition)
        except json.JSONDecodeError as exc:
            raise self._error(exc.lineno, f"this is not JSON: {exc.msg}") from exc

    def _without_repetition(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise self._error(None, f"{name!r} is written twice in one object")
            table[name] = value
        return table

    def _parse_toml(self) -> Any:
        if sys.version_info >= (3, 11):
            import tomllib as toml
        else:
            try:
                import tomli as toml
            except ImportError:
                raise ConfigurationError(
                    f"{self._file}: Python 3.10 needs tomli to read TOML; install "
                    "distwindow[toml], or write the rules as JSON"
                ) from None
        try:
            return toml.loads(self._text)
        except toml.TOMLDecodeError as exc:
            found = re.search(r"line (\d+)", str(exc))
            line = int(found[1]) if found else None
            raise self._error(line, f"this is not TOML: {exc}") from exc
