"""A module whose library is missing says with which extra it is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.programs import ROOT, printed

WITHOUT_OTHERS = """
import sys
from importlib import import_module
import distwindow, redis.asyncio, redis.asyncio.cluster

# What these need is there, whatever it is with this version of Python.
THERE = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in THERE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
sys.modules[sys.argv[1].rpartition(".")[2]] = None  # which redis-py may have imported
try:
    import_module(sys.argv[1])
except ModuleNotFoundError as exc:
    print(exc)
"""


def integrations() -> list[str]:
    """Return the extras with a module of their name."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z0-9-]+) = \[", table, re.MULTILINE)
    return [each for each in extras if find_spec(f"distwindow.contrib.{module(each)}")]


def module(extra: str) -> str:
    return {"otel": "opentelemetry"}.get(extra, extra.replace("-", "_"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", integrations())
def test_a_missing_library_is_named_with_its_extra(extra: str) -> None:
    said = printed("-c", WITHOUT_OTHERS, f"distwindow.contrib.{module(extra)}")
    assert said.startswith(f"distwindow.contrib.{module(extra)} needs ")
    assert f"pip install 'distwindow[{extra}]'" in said


def test_each_integration_is_asked() -> None:
    assert {"fastapi", "celery", "httpx2", "aiohttp", "pydantic-ai", "otel"} <= set(integrations())
