"""The rule of the architecture: imports only go down, and have no cycles.

Read from the source with `ast`, so that an import inside a function or behind `TYPE_CHECKING`
counts as well. `complaints(package)` lists what breaks the law, one line each.
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
    "windows": 2,
    "protocol": 2,
    "operations": 3,
    "consistency": 4,
    "store": 4,
    "rules": 4,
    "telemetry": 4,
    "limiter": 5,
    "base_limiter": 5,
    "async_limiter": 5,
    "entry": 5,
    "decorator": 5,
    "breaker": 5,
    "concurrency": 5,
    "worker": 5,
    "connect": 5,
    "testing": 5,
    "cli": 6,
    "contrib": 6,
    "dashboard": 6,
    # `python -m distwindow` only starts the command line.
    "__main__": 7,
}
FACES = 5
GUESTS = 6
# Neighbours that have nothing to say to each other.
APART = {frozenset({"windows", "protocol"}), frozenset({"consistency", "store"})}
# The one face that guests may call by its own door; the others come through the front door.
OPEN_FACES = {"connect"}
# Redis and files begin at this floor.
OUTSIDE = 4


@dataclass(frozen=True)
class Import:
    """`source` imports `target`, both dotted; `runtime` is false behind `if TYPE_CHECKING`."""

    source: str
    target: str
    line: int
    runtime: bool


def complaints(package: Path) -> list[str]:
    """Return every breach of the rule in the package at `package`."""
    modules = _modules(package)
    imports = [found for name, path in modules.items() for found in _imports(name, path, modules)]
    breaches = [
        f"{item.source}:{item.line} imports {item.target}: {why}"
        for item in imports
        if (why := _breach(package.name, item)) is not None
    ]
    return [*_strangers(package.name, modules), *breaches, *_cycles(imports, modules)]


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


# -- judging ----------------------------------------------------------------------------------


def _room(package: str, module: str) -> str:
    """The room of a module: what follows the package's name; empty for the front door."""
    return module.removeprefix(package).lstrip(".").partition(".")[0]


def _strangers(package: str, modules: dict[str, Path]) -> Iterator[str]:
    rooms = {_room(package, module) for module in modules} - {""}
    for room in sorted(rooms - set(FLOORS)):
        yield f"{package}.{room} has no floor: give it one in tests/architecture/floors.py"


def _breach(package: str, item: Import) -> str | None:
    """Return why this import breaks the rule, or None."""
    here = _room(package, item.source)
    if item.target == package or item.target.startswith(package + "."):
        return _indoors(here, _room(package, item.target))
    return _outdoors(package, here, item)


def _indoors(here: str, there: str) -> str | None:
    if here == there:
        return None
    if here not in FLOORS.keys() | {""} or there not in FLOORS.keys() | {""}:
        return None  # a room without a floor is complained of by name
    if here == "":  # the front door stands before everything but the guests
        return None if FLOORS[there] <= FACES else "the front door does not let guests in"
    if there == "":
        return None if FLOORS[here] == GUESTS else "only guests use the front door"
    if frozenset({here, there}) in APART:
        return f"{here} and {there} do not know each other"
    if FLOORS[here] < FLOORS[there]:
        return f"up from floor {FLOORS[here]} to floor {FLOORS[there]}"
    if FLOORS[here] == GUESTS:
        if FLOORS[there] == GUESTS:
            return "guests do not know each other"
        if FLOORS[there] == FACES and there not in OPEN_FACES:
            return "guests take a face from the front door"
    return None


def _outdoors(package: str, here: str, item: Import) -> str | None:
    top = item.target.partition(".")[0]
    if here == "core":
        if top not in sys.stdlib_module_names:
            return "core is pure: the standard library alone"
        if top == "asyncio":
            return "core knows no event loop"
        if top == "time" and item.source != f"{package}.core.clock":
            return "time is an argument; only core.clock reads it"
    if top == "redis" and here and FLOORS.get(here, OUTSIDE) < OUTSIDE:
        return f"the outside world begins at floor {OUTSIDE}"
    return None


def _cycles(imports: list[Import], modules: dict[str, Path]) -> list[str]:
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for item in imports:
        if item.runtime and item.target in modules and item.target != item.source:
            graph[item.source].add(item.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as exc:
        # graphlib lists who is needed first; turned round it reads "imports".
        return ["a cycle: " + " imports ".join(reversed(exc.args[1]))]
    return []
