"""The signatures in docs/api/ are those of the code, and every public name is there."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

import distwindow
import distwindow.sentinel

from .pages import ROOT, blocks

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
# A signature may be wrapped: what is indented, and a closing bracket, belong to the line before.
SIGNATURES = [
    re.sub(r"\n *", " ", signature)
    for page in PAGES
    for block in blocks(page, "py")
    for signature in re.split(r"\n(?![ )])", block.text.strip())
]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
INDEX = TEXTS["index.md"]
PROSE = re.sub(r"```.*?```", "", "\n".join(TEXTS.values()), flags=re.DOTALL)
NO_SIGNATURE = {
    "ArticleGoogleBreaker", "Blocked", "BreakerHistory", "ConfigurationError",
    "DistwindowDeprecationWarning", "DistwindowError", "Event", "GoogleBreaker", "__version__",
}  # fmt: skip
DOTTED = re.compile(r"^([\w.]+)")


# What a path begins with, and the module whose public names follow.
MODULES: dict[str, Any] = {"": distwindow, "sentinel.": distwindow.sentinel}
# Base classes, and what a method returns: their methods are there.
NOT_MADE = {
    "AsyncReservation", "ChainEntry", "CircuitBreakerBase", "Counts", "Level", "ObserverEvent",
    "Reservation", "Rule", "StoreCall", "TrafficShapingController",
}  # fmt: skip


def found_at(path: str) -> Any:
    """Return what a documented path names."""
    prefix = "sentinel." if path.startswith("sentinel.") else ""
    first, *rest = path.removeprefix(prefix).split(".")
    assert first in MODULES[prefix].__all__
    thing: Any = getattr(MODULES[prefix], first)
    for name in rest:
        thing = inspect.getattr_static(thing, name)
    return thing


def path_of(line: str) -> str:
    found = DOTTED.match(line)
    assert found is not None, line
    return found[1]


@pytest.mark.parametrize("line", SIGNATURES)
def test_each_signature_is_that_of_the_code(line: str) -> None:
    path = path_of(line)
    thing = found_at(path)
    if "(" not in line:
        assert not callable(thing), f"{path} is called"
        return
    documented = ast.parse(f"def f{line.removeprefix(path)}: ...").body[0]
    assert isinstance(documented, ast.FunctionDef)
    real = inspect.signature(thing)
    parameters = [p for p in real.parameters.values() if p.name != "self"]
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in parameters] == [
        *((argument.arg, False) for argument in documented.args.args),
        *((argument.arg, False) for argument in [documented.args.vararg] if argument is not None),
        *((argument.arg, True) for argument in documented.args.kwonlyargs),
    ]
    defaults = _defaults(documented)
    assert defaults == {
        p.name: repr(p.default) if defaults.get(p.name) != "..." else "..."
        for p in parameters
        if p.default is not p.empty
    }
    if documented.returns is not None:
        returned = re.sub(r"^Unawaited\[(.*)\]$", r"\1", real.return_annotation)
        returned = returned.replace("UnawaitedReservation", "AsyncReservation")
        assert ast.unparse(documented.returns) == returned


def _defaults(documented: ast.FunctionDef) -> dict[str, str]:
    plain = documented.args.args[len(documented.args.args) - len(documented.args.defaults) :]
    pairs = [*zip(plain, documented.args.defaults, strict=True)]
    pairs += [
        (argument, default)
        for argument, default in zip(
            documented.args.kwonlyargs, documented.args.kw_defaults, strict=True
        )
        if default is not None
    ]
    return {argument.arg: ast.unparse(default) for argument, default in pairs}


def own_names(prefix: str, module: Any) -> set[str]:
    """Return the public names of a module that the package itself does not have."""
    return set(module.__all__) - (set(distwindow.__all__) if prefix else set())


def test_every_public_name_is_there() -> None:
    documented_paths = {path_of(line) for line in SIGNATURES}
    missing = []
    for prefix, module in MODULES.items():
        for name in own_names(prefix, module) - NO_SIGNATURE:
            members = [
                f"{prefix}{name}.{member}"
                for member, value in vars(getattr(module, name)).items()
                if not member.startswith("_")
                and (inspect.isfunction(value) or isinstance(value, property))
            ]
            made = [] if name in NOT_MADE else [f"{prefix}{name}"]
            missing += [path for path in [*made, *members] if path not in documented_paths]
    missing += [
        f"{name}.{member}"
        for name in ("Limiter", "AsyncLimiter")
        for member in ("limits", "prefix")
        if f"{name}.{member}" not in documented_paths
    ]
    assert not missing


@pytest.mark.parametrize("name", sorted((NO_SIGNATURE | NOT_MADE) - {"__version__"}))
def test_every_name_without_a_signature_is_mentioned(name: str) -> None:
    assert any(name in text for text in TEXTS.values())


def test_the_index_has_every_public_name() -> None:
    """It links each to a page that has it; errors are in its tree."""
    linked = re.findall(r"\[`(\w+)`\]\((\w+\.md)#", INDEX)
    tree = blocks(ROOT / "docs" / "api" / "index.md", "text")[0].text
    missing = [
        prefix + name
        for prefix, module in MODULES.items()
        for name in own_names(prefix, module) - {"__version__"}
        if not any(
            name == other and re.search(rf"\b{prefix}{name}\(|`{name}`", TEXTS[page])
            for other, page in linked
            if (page == "sentinel.md") is bool(prefix)
        )
        and not re.search(rf"\b{name}\b", tree)
    ]
    assert not missing


@pytest.mark.parametrize("kind", [distwindow.Decision, distwindow.Stats, distwindow.Limit])
def test_every_field_is_explained(kind: Any) -> None:
    fields = getattr(kind, "_fields", None) or list(kind.__dataclass_fields__)
    section = re.split(r"\n##? ", PROSE.split(f"\n## {kind.__name__}\n")[1])[0]
    assert [field for field in fields if f"`{field}`" not in section] == []
