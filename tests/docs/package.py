"""The metadata of the package, and the page that an index makes of README.md."""

from __future__ import annotations

import re
import sys
from typing import Any

from .pages import ROOT, anchors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def pyproject() -> dict[str, Any]:
    parsed: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return parsed


def long_description(version: str) -> str:
    """Return README.md after the substitutions of hatch-fancy-pypi-readme."""
    hook = pyproject()["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"].replace("$HFPR_VERSION", version), text)
    return text


def broken(links: list[str], version: str) -> list[str]:
    """Return those of `links` that are relative, or lead into the project and to nothing there.

    Links to other hosts are taken as they are.
    """
    source = pyproject()["project"]["urls"]["Source"]
    raw = source.replace("https://github.com", "https://raw.githubusercontent.com")
    of_the_tag = re.compile(rf"(?:{source}/blob|{raw})/v{re.escape(version)}/([^#]+)#?(.*)")

    def leads_somewhere(link: str) -> bool:
        found = of_the_tag.fullmatch(link)
        if found is None:
            return link.startswith("https://") and not link.startswith((source, raw))
        target = ROOT / found[1]
        return target.exists() and (not found[2] or found[2] in anchors(target))

    return [link for link in links if not leads_somewhere(link)]
