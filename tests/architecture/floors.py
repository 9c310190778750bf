"""The rules of the architecture: imports only go down, and have no cycles; what is private stays in
its room.

Read from the source with `ast`, so that an import inside a function or behind `TYPE_CHECKING`
counts as well. `violations(package)` lists what breaks the rules, one line each.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("contrib", "cli", "testing")
KNOW_ALL = ("inspect", *PROGRAMS)
"""What shows or reads all features, and goes with any of them."""
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("support",),
    ("sentinel",),
    ("ring",),
    ("runtime",),
    ("waiting", "observer"),
    (
        "shaping",
        "borrow",
        "minute",
        "upstream",
        "rules",
        "breaker lower",
        "concurrency lower",
        "away lower",
    ),
    ("local",),
    ("away",),
    ("stores",),
    ("lifecycle",),
    ("inspect", "limiter lower"),
    ("reserve",),
    ("breaker", "concurrency"),
    ("limiter",),
    ("guard",),
    ("",),  # the package itself
    PROGRAMS,
    ("__main__",),
)
"""The rooms, the lowest first. Rooms of one floor do not import each other, but for `BESIDE`."""
LOWER_HALF = {
    "breaker": {"rules", "record", "commands", "memory"},
    "away": {"outages"},
    "concurrency": {"commands", "memory", "operations", "held"},
    "limiter": {"decider", "decorator", "entry"},
}
"""The files that know the engine only; the others use the store, the worker and the entry. Of the
limiter, what reservations and breakers stand on, too."""
BESIDE = {("breaker", "concurrency"), ("testing", "contrib")}
"""Rooms of one floor of which the first may import the second."""
FEATURES: dict[str, set[str]] = {
    "shaping": {"stores", "limiter"},
    "borrow": {"stores", "limiter"},
    "minute": {"local", "stores", "lifecycle", "limiter"},
    "away": {"stores", "lifecycle", "limiter"},
    "reserve": {"limiter"},
    "breaker": {"stores", "limiter", "guard"},
    "concurrency": {"stores", "away", "guard"},
    "guard": set(),
    "upstream": {"stores"},
    "rules": {"limiter"},
}
"""What can be deleted, and the rooms which import it, besides the programs and the package."""
_OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OPEN_TO_PROGRAMS = {"inspect", "lifecycle"}
"""What programs import from the floors of the limiters besides the package itself."""


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
    # Each module is parsed and walked once: there are three hundred thousand nodes.
    nodes = {
        name: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))
        for name, path in modules.items()
    }
    imports = [found for name in modules for found in _imports(name, nodes[name], modules)]
    forbidden = [
        f"{item.source}:{item.line} imports {item.target}: {why}"
        for item in imports
        if (why := _violation(package.name, item)) is not None
    ]
    return [
        *_without_floor(package.name, modules),
        *forbidden,
        *_cycles(imports, modules),
        *_private_uses(package.name, nodes),
    ]


def _modules(package: Path) -> dict[str, Path]:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


# -- reading ----------------------------------------------------------------------------------


def _imports(name: str, nodes: list[ast.AST], modules: dict[str, Path]) -> Iterator[Import]:
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    is_package = modules[name].name == "__init__.py"
    for node in nodes:
        for target in _targets(node, name, is_package, modules):
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


def _room(package: str, module: str) -> str:
    """Return the room in which a module is, as `FLOORS` names it; empty for the package itself."""
    first, _, rest = module.removeprefix(package).lstrip(".").partition(".")
    is_lower = rest in LOWER_HALF.get(first, ())
    return f"{first} lower" if is_lower else first


def _floor(room: str) -> int | None:
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def _without_floor(package: str, modules: dict[str, Path]) -> Iterator[str]:
    for room in sorted({_room(package, module) for module in modules}):
        if _floor(room) is None:
            yield f"{package}.{room} has no floor: give it one in tests/architecture/floors.py"


def _violation(package: str, item: Import) -> str | None:
    """Return why this import breaks the rule, or None."""
    here = _room(package, item.source)
    if item.target == package or item.target.startswith(package + "."):
        return _inside(here, _room(package, item.target), item)
    return _outside(package, here, item)


def _inside(here: str, there: str, item: Import) -> str | None:
    source, target = _floor(here), _floor(there)
    feature, importer = there.removesuffix(" lower"), here.removesuffix(" lower")
    if importer not in FEATURES.get(feature, {importer}) | {feature, "", *KNOW_ALL}:
        return f"{feature} can be deleted, and is imported by {FEATURES[feature]} alone"
    if here == there or source is None or target is None:
        return None  # `_without_floor` reports the latter
    if source < target:
        # Errors have the decision that they are about; only their annotations name it.
        is_annotation = here == "errors" and not item.runtime
        return None if is_annotation else f"up from floor {source} to floor {target}"
    if source == target and (here, there) not in BESIDE:
        return f"{here} and {there} are on one floor, and do not import each other"
    if here in ("contrib", "cli") and there not in OPEN_TO_PROGRAMS:
        first = _floor("lifecycle")
        assert first is not None
        if first <= target < source and there != "":
            return "programs take it from the package itself"
    return None


def _outside(package: str, here: str, item: Import) -> str | None:
    top = item.target.partition(".")[0]
    if here == "ring":
        if top not in sys.stdlib_module_names:
            return "ring imports the standard library only"
        if top == "asyncio":
            return "ring does not import asyncio"
        if top == "time" and item.source != f"{package}.ring.clock":
            return "of ring only ring.clock reads a clock; others are given the time"
    floor, stores = _floor(here), _floor("stores")
    if top in ("typer", "click", "rich") and here != "cli":
        return "only the command line imports typer and rich"
    if top == "redis" and floor is not None and stores is not None and floor < stores:
        return "redis is imported from the floor of the stores upwards"
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


# -- private names ----------------------------------------------------------------------------


def _private_uses(package: str, nodes: dict[str, list[ast.AST]]) -> Iterator[str]:
    """List what uses a private name that only other rooms define: an attribute of another object,
    or an import. A subclass uses those of its base class by `self`.
    """
    defined: dict[str, set[str]] = {}
    for name, found in nodes.items():
        defined.setdefault(_own_room(package, name), set()).update(_defined(found))
    for name, found in nodes.items():
        room = _own_room(package, name)
        elsewhere = set().union(*(names for other, names in defined.items() if other != room))
        for line, used in _private_names(found):
            if used in elsewhere - defined[room]:
                yield f"{name}:{line} uses {used}, which is private to another room"


def _own_room(package: str, module: str) -> str:
    """Return the room, both halves of it; each integration is one of its own."""
    parts = module.removeprefix(package).lstrip(".").split(".")
    return ".".join(parts[: 2 if parts[0] == "contrib" else 1])


def _defined(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and _is_own(node):
            yield node.attr


def _private_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        used = []
        if isinstance(node, ast.Attribute) and not _is_own(node):
            used = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.level:
            used = [alias.name for alias in node.names]
        for name in used:
            if name.startswith("_") and not name.endswith("__") and name not in _OF_NAMED_TUPLES:
                yield getattr(node, "lineno", 0), name


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
