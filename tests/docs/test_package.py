"""What an index shows of the package is true: links, extras, versions. `.ci/check_package.py` looks
at what is built.
"""

from __future__ import annotations

import re

import pytest

from distwindow import __version__

from .package import broken, long_description, pyproject
from .pages import PAGES, ROOT, name

PROJECT = pyproject()["project"]
EXTRAS = sorted(PROJECT["optional-dependencies"])


def test_the_page_of_an_index_leads_to_files_of_the_tag() -> None:
    text = re.sub(r"```.*?```", "", long_description(__version__), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 30
    assert broken(links, __version__) == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("docs/start.md", True),
        ("#install", True),
        ("{source}/blob/v1.2/docs/start.md#install", False),
        ("{source}/blob/v1.2/docs/start.md#absent", True),
        ("{source}/blob/v1.2/docs/absent.md", True),
        ("{source}/blob/main/docs/start.md", True),
        ("https://redis.io/docs", False),
    ],
)
def test_a_link_that_leads_nowhere_is_found(link: str, is_broken: bool) -> None:
    written = link.format(source=PROJECT["urls"]["Source"])
    assert broken([written], "1.2") == ([written] if is_broken else [])


def test_one_name_of_the_repository_is_in_all_links() -> None:
    """It is a placeholder until there is one; `scripts/check-release` lets none be published."""
    source = PROJECT["urls"]["Source"]
    owner, repository = source.removeprefix("https://github.com/").split("/")
    assert PROJECT["urls"] == {
        "Documentation": f"https://{owner}.github.io/{repository}/",
        "Source": source,
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"\nsite_url: {PROJECT['urls']['Documentation']}\nrepo_url: {source}\n" in site


def test_the_python_versions_are_those_that_pages_say() -> None:
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert PROJECT["requires-python"] == f">={versions[0]}"
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert f"tested: CPython {versions[0]} to {versions[-1]}" in start


def test_readme_installs_from_the_index_first_and_names_every_extra() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first_screen = "\n".join(readme.splitlines()[:50])
    places = [
        first_screen.index(command)
        for command in (
            "pip install distwindow ",
            'pip install "distwindow[fastapi]"',
            "From a checkout: `pip install .`",
        )
    ]
    assert places == sorted(places)
    table = readme.split("\n## Install\n")[1].split("\n## ")[0]
    assert [extra for extra in EXTRAS if f"`{extra}`" not in table] == []


_SOURCES = [*PAGES, *sorted((ROOT / "distwindow").rglob("*.py"))]


def test_the_extras_that_pages_and_errors_install_exist() -> None:
    named = {
        extra: name(source)
        for source in _SOURCES
        for found in re.findall(
            r"install ['\"](?:distwindow|\.)\[([\w,]+)\]", source.read_text(encoding="utf-8")
        )
        for extra in found.split(",")
    }
    assert {"cli", "celery"} <= set(named)
    assert {extra: page for extra, page in named.items() if extra not in EXTRAS} == {}
