"""Each file needs the framework that it is named after; one that is not installed is left out."""

from __future__ import annotations

from importlib.util import find_spec

FRAMEWORKS = {
    "langchain_core": "test_langchain.py",
    "fastmcp": "test_fastmcp.py",
    "pydantic_ai": "test_pydantic_ai.py",
}
collect_ignore = [test for module, test in FRAMEWORKS.items() if not find_spec(module)]
