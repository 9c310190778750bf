"""Rules from a TOML or JSON file: lists of tables named after the kinds of rules.

An error names the file, the rule by its kind and number, and the field.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigurationError, short_repr
from ..sentinel.rules import DegradeRule, FlowRule, Rule
from .rules import AuthorityRule, SystemRule, check_rules

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


class RuleFile(NamedTuple):
    """The content of a file of rules."""

    rules: tuple[Rule, ...]
    store: str | None
    """The URL of the store; None if the file does not name one."""


def read_rules(path: str | os.PathLike[str]) -> RuleFile:
    """Return the rules in the file at `path`, which ends in .toml or .json.

    Raises `ConfigurationError` for what cannot be read as rules, and for rules that cannot work
    together; `OSError` for a file that cannot be read.
    """
    file = Path(path)
    if file.suffix.lower() not in (".toml", ".json"):
        raise ConfigurationError(f"{file}: rules are read from a .toml or a .json file")
    is_toml = file.suffix.lower() == ".toml"
    try:
        # Editors on Windows begin a file with a byte order mark, which "utf-8-sig" leaves out.
        text = file.read_text(encoding="utf-8-sig")
        content = _parse_toml(text) if is_toml else _parse_json(text)
        return RuleFile(check_rules(_rules(content, is_toml)), _store(content))
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file}: this is not UTF-8 text: {exc}") from exc
    except RecursionError as exc:
        raise ConfigurationError(f"{file}: this is nested too deeply to be rules") from exc
    except ConfigurationError as exc:
        raise ConfigurationError(f"{file}: {exc}") from exc


def _rules(content: Any, is_toml: bool) -> Iterator[Rule]:
    """Yield the rules, kind by kind."""
    if not isinstance(content, dict):
        raise ConfigurationError(f'write {{"flow": [...]}}, not {short_repr(content)}')
    for name in content:
        if name in _ELSEWHERE:
            raise ConfigurationError(f"unknown key {name!r}; {_ELSEWHERE[name]}")
    _check_names("", "key", content, [*_KINDS, "store"])
    if not any(kind in content for kind in _KINDS):
        nothing = "flow = []" if is_toml else '{"flow": []}'
        raise ConfigurationError(
            "there are no rules in this file, and a guard without rules refuses nothing; if "
            f"that is meant, write {nothing}"
        )
    for kind, rule_type in _KINDS.items():
        tables = content.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            form = f"[[{kind}]]" if is_toml else f'"{kind}": [{{...}}]'
            raise ConfigurationError(f"write the rules of {kind} as {form}")
        for number, table in enumerate(tables, 1):
            where = f"{kind} rule {number}: "
            fields = dataclasses.fields(rule_type)
            _check_names(where, "field", table, [field.name for field in fields])
            for field in fields:
                if field.default is dataclasses.MISSING and field.name not in table:
                    raise ConfigurationError(f"{where}the field {field.name!r} is missing")
            try:
                yield rule_type(**table)
            except ConfigurationError as exc:
                raise ConfigurationError(f"{where}{exc}") from exc


def _store(content: dict[str, Any]) -> str | None:
    """Return the URL of the store; None if there is none."""
    url = content.get("store")
    if url is not None and not isinstance(url, str):
        raise ConfigurationError(f"store={short_repr(url)} is not a URL")
    if url is not None and not url.strip():
        raise ConfigurationError("store is empty; leave it out, or give a URL")
    return url


def _check_names(where: str, what: str, table: dict[str, Any], known: Collection[str]) -> None:
    for name in table:
        if name not in known:
            raise ConfigurationError(
                f"{where}unknown {what} {short_repr(name)}; the {what}s are {', '.join(known)}"
            )


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as exc:
        raise ConfigurationError(f"this is not JSON: {exc}") from exc
    except ConfigurationError:
        raise
    except ValueError as exc:  # what is left is an int of thousands of digits
        raise ConfigurationError("a number has thousands of digits") from exc


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which Python would drop the first of two equal keys."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ConfigurationError(f"{short_repr(name)} is written twice in one object")
        made[name] = value
    return made


def _parse_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        try:
            import tomli as toml
        except ImportError:
            raise ConfigurationError(
                "Python 3.10 needs tomli to read TOML: pip install tomli, or write the rules as "
                "JSON"
            ) from None
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as exc:
        raise ConfigurationError(f"this is not TOML: {exc}") from exc
    except ValueError as exc:
        raise ConfigurationError("a number has thousands of digits") from exc
