"""The rule of the architecture: imports only go down, and have no cycles.

Read from the source with `ast`, so that an import inside a function or behind `TYPE_CHECKING`
counts as well. `violations(package)` lists what breaks the rule, one line each.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    "core": 1,
    "_fork": 1,
    "_fork_wait": 1,
    "windows": 2,
    "callables": 2,
    "protocol": 2,
    "operations": 3,
    "sentinel": 3,
    "go_zero": 3,
    "consistency": 4,
    "store": 4,
    "rules": 4,
    "limiter": 5,
    "base_limiter": 5,
    "async_limiter": 5,
    "entry": 5,
    "entry_options": 5,
    "admission": 5,
    "failure_types": 5,
    "lifecycle": 5,
    "decorator": 5,
    "breaker": 5,
    "concurrency": 5,
    "guard": 5,
    "worker": 5,
    "connect": 5,
    "testing": 5,
    "cli": 6,
    "contrib": 6,
    # `python -m distwindow` only starts the command line.
    "__main__": 7,
}
LIMITER_FLOOR = 5
"""The package itself, `__init__`, imports modules up to this floor."""
PROGRAM_FLOOR = 6
"""These use the limiters as users do: they import them from the package itself."""
SEPARATE = {frozenset({"windows", "protocol"}), frozenset({"consistency", "store"})}
"""Pairs that do not import each other."""
OPEN_TO_PROGRAMS = {"connect"}
"""What programs may import from the limiters' floor besides the package itself."""
REDIS_FLOOR = 4
"""The lowest floor that imports redis."""


@dataclass(frozen=True)
class Import:
    """`source` imports `target`, both dotted; `runtime` is false behind `if TYPE_CHECKING`."""

    source: str
    target: str
    line: int
    runtime: bool


def violations(package: Path) -> list[str]:
    """Return every violation of the rule in the package at `package`, one line each."""
    modules = _modules(package)
    imports = [found for name, path in modules.items() for found in _imports(name, path, modules)]
    forbidden = [
        f"{item.source}:{item.line} imports {item.target}: {why}"
        for item in imports
        if (why := _violation(package.name, item)) is not None
    ]
    return [*_without_floor(package.name, modules), *forbidden, *_cycles(imports, modules)]


def _modules(package: Path) -> dict[str, Path]:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


# -- reading ----------------------------------------------------------------------------------


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for target in _targets(node, name, path.name == "__init__.py", modules):
            yield Import(name, target, getattr(node, "lineno", 0), id(node) not in typing_only)


def _targets(node: ast.AST, name: str, is_package: bool, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            # One dot is the package the module lies in, each further dot the one above.
            here = name.split(".")
            base = here[: len(here) - node.level + is_package]
            origin = ".".join([*base, origin] if origin else base)
        for alias in node.names:
            # `from package import name` reaches a module of that name, where there is one.
            submodule = f"{origin}.{alias.name}"
            yield submodule if submodule in modules else origin


# -- the rule ----------------------------------------------------------------------------------


def _part(package: str, module: str) -> str:
    """The first name below the package; empty for the package itself."""
    return module.removeprefix(package).lstrip(".").partition(".")[0]


def _without_floor(package: str, modules: dict[str, Path]) -> Iterator[str]:
    parts = {_part(package, module) for module in modules} - {""}
    for part in sorted(parts - set(FLOORS)):
        yield f"{package}.{part} has no floor: give it one in tests/architecture/floors.py"


def _violation(package: str, item: Import) -> str | None:
    """Return why this import breaks the rule, or None."""
    here = _part(package, item.source)
    if item.target == package or item.target.startswith(package + "."):
        return _inside(here, _part(package, item.target))
    return _outside(package, here, item)


def _inside(here: str, there: str) -> str | None:
    if here == there:
        return None
    if here not in FLOORS.keys() | {""} or there not in FLOORS.keys() | {""}:
        return None  # `_without_floor` reports it
    if here == "":
        return None if FLOORS[there] <= LIMITER_FLOOR else "the package imports no programs"
    if there == "":
        return None if FLOORS[here] == PROGRAM_FLOOR else "only programs import the package itself"
    if frozenset({here, there}) in SEPARATE:
        return f"{here} and {there} do not import each other"
    if FLOORS[here] < FLOORS[there]:
        return f"up from floor {FLOORS[here]} to floor {FLOORS[there]}"
    if FLOORS[here] == PROGRAM_FLOOR:
        if FLOORS[there] == PROGRAM_FLOOR:
            return "programs do not import each other"
        if FLOORS[there] == LIMITER_FLOOR and there not in OPEN_TO_PROGRAMS:
            return "programs take it from the package itself"
    return None


def _outside(package: str, here: str, item: Import) -> str | None:
    top = item.target.partition(".")[0]
    if here == "core":
        if top not in sys.stdlib_module_names:
            return "core imports the standard library only"
        if top == "asyncio":
            return "core does not import asyncio"
        if top == "time" and item.source != f"{package}.core.clock":
            return "of core only core.clock reads a clock; others are given the time"
    if top == "redis" and here and FLOORS.get(here, REDIS_FLOOR) < REDIS_FLOOR:
        return f"redis is imported from floor {REDIS_FLOOR} upwards"
    return None


def _cycles(imports: list[Import], modules: dict[str, Path]) -> list[str]:
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for item in imports:
        if item.runtime and item.target in modules and item.target != item.source:
            graph[item.source].add(item.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as exc:
        # graphlib lists each module before the one that imports it; reversed, it reads "imports".
        return ["a cycle: " + " imports ".join(reversed(exc.args[1]))]
    return []
