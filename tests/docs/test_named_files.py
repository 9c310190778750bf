"""The files and folders that the pages about the code name exist, and `docs/architecture.md` has
every folder and every member of a store.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distwindow.ring.store import AsyncStore, Store

from .pages import ROOT, blocks, name

PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
"""Not the decision records, which name files as they were when something was decided."""
# A name with or without folders. After a colon or a slash it is part of a URL or a limit.
_NAME = re.compile(r"(?<![\w/:.*-])\.?\w[\w-]*(?:[./][\w-]+)*/?(?![\w:*])")
_IS_FILE = re.compile(r"\.(?:py|lua|md|sh|toml|yml|txt)$")


def named_paths(line: str) -> list[str]:
    """Return the names of files (`name.py`) and folders (`name/`, or in one that exists)."""
    return [
        found
        for found in _NAME.findall(line)
        if _IS_FILE.search(found)
        or (found.endswith("/") and len(found) > 2)  # "n/" is a division
        or ("/" in found and (ROOT / found.partition("/")[0]).is_dir())
    ]


def missing(page: Path, text: str) -> list[str]:
    """Return the names in `text` that exist neither beside the page nor in repository or package.

    A bare file name may also belong to the folder of the path before it in the same line, as in
    "`local/base.py`, `leased.py`".
    """
    absent: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        folders = [page.parent, ROOT, ROOT / "distwindow"]
        beside: Path | None = None
        for path in named_paths(line):
            bare = "/" not in path
            places = [*([beside] if beside is not None and bare else []), *folders]
            found = next((place / path for place in places if (place / path).exists()), None)
            if found is None:
                absent.append(f"{name(page)}:{number}: {path}")
            elif not bare:
                beside = found.parent if found.is_file() else found
    return absent


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    assert missing(page, page.read_text(encoding="utf-8")) == []


def test_every_folder_is_in_the_tree() -> None:
    package = ROOT / "distwindow"
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")}
    tree = blocks(PAGES[0], "text")[0].text
    assert [
        one for one in sorted(folders - {"."}) if not re.search(rf"(^| ){one}/ ", tree, re.M)
    ] == []


def test_the_members_of_a_store_are_listed() -> None:
    section = PAGES[0].read_text(encoding="utf-8").split("## To add a store\n")[1]
    members = {
        member
        for kind in (Store, AsyncStore)
        for member in [*vars(kind), *kind.__annotations__]
        if not member.startswith("_")
    }
    assert "decide" in members
    assert [member for member in sorted(members) if not re.search(rf"`{member}\b", section)] == []
