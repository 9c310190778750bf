"""The pages, and the fenced blocks in them.

The blocks of Python and of `console` are run. The fence of one may have attributes:

```{.python norun="needs Celery"}         it is not run, and why
```{.console shape="counts differ"}       its output is compared by shape, and why (test_console.py)
```{.console shape="..." config="maxmemory-policy allkeys-lru"}    with this setting of the server
"""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import (
    AdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    Guard,
    Limiter,
)
from distwindow.contrib.http.rate_limits import BaseRateLimits
from distwindow.contrib.upstream import BaseUpstreamLimits

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_OPEN = re.compile(
    r"""^(?P<indent>[ ]*)(?P<fence>`{3,})
    (?: (?P<language>[\w-]*) | \{\.(?P<marked>[\w-]+) (?P<attributes>(?:[ ]\w+="[^"]+")+) \} )$""",
    re.VERBOSE,
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]+)"')


def name(page: Path) -> str:
    """Return the path of a page within the repository."""
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return what links to the headings of a page have after their `#`."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(prose)
    }


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line, from 1."""

    page: Path
    line: int
    language: str
    norun: str | None
    shape: str | None
    config: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of `page` in their order; those of `language` only, if it is given."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = _OPEN.match(lines[at])
        # mkdocs would not see any other fence either, and take its end for a beginning.
        assert opening is not None or "```" not in lines[at], f"{name(page)}:{at + 1}"
        at += 1
        if opening is None:
            continue
        first, indent = at, opening["indent"]
        while lines[at].strip() != opening["fence"]:
            at += 1
        text = "".join(line.removeprefix(indent) + "\n" for line in lines[first:at])
        block_language = opening["language"] or opening["marked"] or ""
        attributes = dict(_ATTRIBUTE.findall(opening["attributes"] or ""))
        norun, shape, config = (
            attributes.pop(known, None) for known in ("norun", "shape", "config")
        )
        assert not attributes, f"{name(page)}:{first}: unknown {list(attributes)}"
        found.append(Block(page, first + 1, block_language, norun, shape, config, text))
        at += 1
    return [block for block in found if language in (None, block.language)]


def between(page: Path, marker: str) -> str:
    """Return the text between `<!-- marker -->` and `<!-- /marker -->`."""
    text = page.read_text(encoding="utf-8")
    return text.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]


def maker(script: str) -> Any:
    """Return what a script of docs/make defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make" / script)))


def preset(monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> None:
    """Change the defaults of limiters, breakers and concurrency limits: code runs as printed, and
    apart from other tests.
    """
    for limiter_class in (
        Limiter, CircuitBreaker, AdaptiveBreaker, Concurrency, Guard, AsyncLimiter,
        AsyncCircuitBreaker, AsyncConcurrency, AsyncGuard, BaseRateLimits, BaseUpstreamLimits,
    ):  # fmt: skip
        own = limiter_class.__init__.__kwdefaults__
        assert own is not None
        for argument, value in defaults.items():
            monkeypatch.setitem(own, argument, value)
