"""Every block of Python runs, as it would in a file. The blocks of a page share their variables. In
place of `redis://localhost:6379/0` the server of the tests is used, with a prefix for each page. A
`print` with a comment behind it prints what the comment says.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distwindow.contrib.http import AsyncRateLimits
from distwindow.contrib.upstream import UpstreamLimits
from distwindow.lifecycle.lifecycle import AsyncClosable, BlockingClosable

from .pages import PAGES, Block, blocks, name, preset

DOCUMENTED_API = "https://api.example.com"
API_HOST = re.compile(r'"api\.(example|openai|anthropic)\.com"')
DOCUMENTED_URL = "redis://localhost:6379/0"
PRINTED = re.compile(r"^print\(.*?\)  # ([^\n]+)$", re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page, "python") if block.norun is None]


class _Api(BaseHTTPRequestHandler):
    """An API that serves each call, also those of OpenAI's and Anthropic's SDKs."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": "Hi"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
            self._answer({"id": "1", "object": "chat.completion", "created": 1, "model": "gpt-5",
                          "choices": [choice], "usage": usage})  # fmt: skip
        else:
            self._answer({"id": "1", "type": "message", "role": "assistant", "content": [],
                          "model": "claude-opus-5", "stop_reason": "end_turn",
                          "usage": {"input_tokens": 9, "output_tokens": 5}})  # fmt: skip

    def _answer(self, fields: Any) -> None:
        body = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def needs_agents(page: Path) -> bool:
    """True if scripts/test-web runs this page, as its frameworks are not installed here."""
    frameworks = ("langchain_core", "pydantic_ai", "fastmcp")
    return page.name == "agents.md" and not all(map(find_spec, frameworks))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if runnable(p) and not needs_agents(p)], ids=name
)
def test_every_block_of_python_runs(
    page: Path,
    redis_url: str,
    api_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    preset(monkeypatch, prefix=prefix, timeout=5.0)  # so that a busy machine is no outage
    monkeypatch.chdir(tmp_path)
    for name_, value in (("OPENAI", f"{api_url}/v1"), ("ANTHROPIC", api_url)):
        monkeypatch.setenv(f"{name_}_BASE_URL", value)
        monkeypatch.setenv(f"{name_}_API_KEY", "none")
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for block in runnable(page):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                text = block.text.replace(DOCUMENTED_URL, redis_url)
                # Another test, or this one when it is tried again, may have used the limits up.
                text = text.replace('prefix="shop"', f'prefix="{prefix}"')
                text = API_HOST.sub('"127.0.0.1"', text.replace(DOCUMENTED_API, api_url))
                _run(block, text, module.__dict__)
            expected = PRINTED.findall(block.text)
            if expected:
                assert out.getvalue().splitlines() == expected, block.where
        for value in list(module.__dict__.values()):
            if isinstance(value, (BlockingClosable, UpstreamLimits)):
                value.close()
            elif isinstance(value, (AsyncClosable, AsyncRateLimits)):
                loop.run_until_complete(value.aclose())


def _run(block: Block, text: str, names: dict[str, Any]) -> None:
    # So that a traceback has the line numbers of the page.
    source = "\n" * (block.line - 1) + text
    exec(compile(source, str(block.page), "exec"), names)
