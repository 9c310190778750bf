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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..core.errors import ConfigurationError, short_repr
from ..sentinel.rules import DegradeRule, FlowRule, Rule
from .authority import AuthorityRule
from .json_places import JsonPlaces
from .system import SystemRule
from .together import clash, place_of

_KINDS: dict[str, Any] = {
    "flow": FlowRule,
    "degrade": DegradeRule,
    "authority": AuthorityRule,
    "system": SystemRule,
}
_ELSEWHERE = {
    "param_flow": "for a limit per parameter use a Limiter, with the parameter in the key: "
    "limiter.try_acquire(f'order:{user}')",
    "gateway_flow": "for a limit per route use the route as the resource of a flow rule, or a "
    "Limiter with the route in the key",
    "cluster": "every rule of a guard holds for all processes that share the store",
}
"""Kinds of Sentinel's rules that a guard does not have, and what to use."""

_At: TypeAlias = "tuple[str, int, dict[str, Any]]"
"""A rule of the file: its kind, its number from 0, and its table."""


class RuleFile(NamedTuple):
    """What a file of rules says."""

    rules: tuple[Rule, ...]
    store: str | None
    """The URL of the store; None if the file does not name one."""
    store_place: str
    """File and line of the URL, for errors."""


def read_rules(path: str | os.PathLike[str]) -> RuleFile:
    """Return the rules in the file at `path`, which ends in .toml or .json.

    Raises `ConfigurationError` for what cannot be read as rules, and for rules that cannot work
    together; `OSError` for a file that cannot be read.
    """
    file = Path(path)
    if file.suffix.lower() not in (".toml", ".json"):
        raise ConfigurationError(f"{file}: rules are read from a .toml or a .json file")
    try:
        # Editors on Windows begin a file with a byte order mark, which "utf-8-sig" leaves out.
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file}: this is not UTF-8 text: {exc}") from exc
    reader = _Reader(file, text)
    return RuleFile(tuple(reader.rules()), reader.store(), reader.place_of_store())


class _Reader:
    """Reads the rules of one file."""

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._text = text
        self._is_toml = file.suffix.lower() == ".toml"
        self._content = self._parse(self._parse_toml if self._is_toml else self._parse_json)
        if not isinstance(self._content, dict):
            raise self._error(None, f'write {{"flow": [...]}}, not {short_repr(self._content)}')
        self._positions = {} if self._is_toml else self._json_positions()
        self._check_names("", None, self._content, [*_KINDS, "store"], "key")
        if not any(kind in self._content for kind in _KINDS):
            nothing = "flow = []" if self._is_toml else '{"flow": []}'
            raise self._error(
                None,
                "there are no rules in this file, and a guard without rules refuses nothing; if "
                f"that is meant, write {nothing}",
            )

    def store(self) -> str | None:
        """Return the URL of the store; None if there is none."""
        url = self._content.get("store")
        if url is not None and not isinstance(url, str):
            raise self._error(self._line_of("store"), f"store={short_repr(url)} is not a URL")
        if url is not None and not url.strip():
            raise self._error(self._line_of("store"), "store is empty; leave it out, or give a URL")
        return url

    def place_of_store(self) -> str:
        """Return the file, and the line of the URL of the store if there is one."""
        return self._place(self._line_of("store") if "store" in self._content else None)

    def rules(self) -> Iterator[Rule]:
        """Yield the rules, kind by kind."""
        seen: dict[object, tuple[Rule, str]] = {}
        for kind, rule_type in _KINDS.items():
            tables = self._content.get(kind, [])
            if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
                form = f"[[{kind}]]" if self._is_toml else f'"{kind}": [{{...}}]'
                raise self._error(self._line_of(kind), f"write the rules of {kind} as {form}")
            for number, table in enumerate(tables):
                at = (kind, number, table)
                rule, place = self._rule(rule_type, at)
                line = self._line_in(at, None)
                if place in seen:
                    other, name = seen[place]
                    message = f"{_without_name(clash(other, rule), rule)} (the other is {name})"
                    raise self._error(line, f"{_name_in_file(rule_type, at)}: {message}")
                where = "" if line is None else f", line {line}"
                seen[place] = (rule, f"{rule_type.__name__} {number + 1}{where}")
                yield rule

    def _rule(self, rule_type: Any, at: _At) -> tuple[Rule, object]:
        """Return the rule at a place in the file, and what it counts (`place_of`)."""
        table = at[2]
        name = _name_in_file(rule_type, at)
        fields = dataclasses.fields(rule_type)
        self._check_names(name + ": ", at, table, [field.name for field in fields], "field")
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in table:
                raise self._error(
                    self._line_in(at, None), f"{name}: the field {field.name!r} is missing"
                )
        try:
            rule: Rule = rule_type(**table)
            return rule, place_of(rule)
        except (ConfigurationError, TypeError) as exc:
            message = _without_name(str(exc), rule_type, table.get("resource"))
            # A message begins with the field that it is about. What is quoted are values.
            words = re.findall(r"\w+", re.split(r"['\"]", message)[0])
            named = next((word for word in words if word in table), None)
            raise self._error(self._line_in(at, named), f"{name}: {message}") from exc

    def _check_names(
        self, where: str, at: _At | None, table: dict[str, Any], known: list[str], what: str
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
                if at is None and snake in _ELSEWHERE:
                    hint = f"; {_ELSEWHERE[snake]}"
                line = self._line_of(name) if at is None else self._line_in(at, name)
                raise self._error(line, f"{where}unknown {what} {name!r}{hint}")

    # -- lines --

    def _place(self, line: int | None) -> str:
        return f"{self._file}" if line is None else f"{self._file}, line {line}"

    def _error(self, line: int | None, message: str) -> ConfigurationError:
        return ConfigurationError(f"{self._place(line)}: {message}")

    def _line_of(self, name: str) -> int | None:
        """Return the line of the only key `name` of the file; None if there are several."""
        if not self._is_toml:
            return self._line_at(self._positions.get((name,)))
        pattern = rf'^\s*(?:\[*\s*)"?{re.escape(name)}"?\s*[\]=.]'
        found = list(re.finditer(pattern, self._text, re.MULTILINE))
        return self._line_at(found[0].end() - 1) if len(found) == 1 else None

    def _line_in(self, at: _At, name: str | None) -> int | None:
        """Return the line of the key `name` of one rule, or of the rule; None if unknown."""
        kind, number, _ = at
        if not self._is_toml:
            path = (kind, number) if name is None else (kind, number, name)
            return self._line_at(self._positions.get(path))
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

    def _line_at(self, position: int | None) -> int | None:
        return None if position is None else self._text.count("\n", 0, position) + 1

    # -- formats --

    def _parse(self, parse: Callable[[], Any]) -> Any:
        """Return what the file says. Raises for what no parser takes."""
        try:
            return parse()
        except RecursionError as exc:
            raise self._error(None, "this is nested too deeply to be rules") from exc
        except ConfigurationError:
            raise
        except ValueError as exc:  # what is left is an int of thousands of digits
            digits = re.search(r"\d{1000,}", self._text)
            line = self._line_at(digits.start() if digits else None)
            raise self._error(line, "a number has thousands of digits") from exc

    def _parse_json(self) -> Any:
        try:
            return json.loads(self._text)
        except json.JSONDecodeError as exc:
            raise self._error(exc.lineno, f"this is not JSON: {exc.msg}") from exc

    def _json_positions(self) -> dict[Any, int]:
        places = JsonPlaces(self._text)
        if places.repeated is not None:
            line = self._line_at(places.positions[places.repeated])
            raise self._error(line, f"{places.repeated[-1]!r} is written twice in one object")
        return places.positions

    def _parse_toml(self) -> Any:
        if sys.version_info >= (3, 11):
            import tomllib as toml
        else:
            try:
                import tomli as toml
            except ImportError:
                raise ConfigurationError(
                    f"{self._file}: Python 3.10 needs tomli to read TOML: "
                    "pip install tomli, or write the rules as JSON"
                ) from None
        try:
            return toml.loads(self._text)
        except toml.TOMLDecodeError as exc:
            found = re.search(r"line (\d+)", str(exc))
            line = int(found[1]) if found else None
            raise self._error(line, f"this is not TOML: {exc}") from exc


def _name_in_file(rule_type: Any, at: _At) -> str:
    """Return how errors name a rule of the file: by its number among those of its kind."""
    _, number, table = at
    name = f"{rule_type.__name__} {number + 1}"
    return f"{name} ({short_repr(table['resource'])})" if "resource" in table else name


def _without_name(message: str, rule: Any, resource: object = None) -> str:
    """Return the message of a rule, or of a type of rules, without the name at its beginning."""
    if isinstance(rule, Rule):
        rule, resource = type(rule), getattr(rule, "resource", None)
    named = message.removeprefix(f"{rule.__name__} of {short_repr(resource)}: ")
    return named.removeprefix(f"{rule.__name__}: ")
