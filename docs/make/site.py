"""What `mkdocs build` adds to pages: see the comments."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return what is built of a page; called by mkdocs."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.3}  # whoever searches the site wants the page first
    if markdown.count("\n```python\n") < 2 or "continue one another" in markdown:
        return markdown
    title, rest = markdown.split("\n", 1)
    return f"{title}\n\n*The blocks of Python on this page continue one another.*\n{rest}"
