"""How far a reader has to go: `python -m benchmarks.code_shape`.

Prints the size of the package and of its parts beside their budgets, and of some warm calls how
many calls into the package they make, in how many files, and how often they return to a file that
they have already left. Nothing is timed, so a busy machine does not matter.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import distwindow
from benchmarks.server import running
from distwindow import (
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    ErrorCount,
    FlowRule,
    Guard,
    Limiter,
)

PACKAGE = Path(distwindow.__file__).parent
PARTS = {
    "engine": ("ring", "runtime", "local", "stores"),
    "cli": ("cli",),
    "celery": ("contrib/celery",),
}
BUDGETS = {"engine": 11_500, "cli": 3_000, "celery": 1_900}
"""Lines that are not blank, for whoever adds to a part to see. Nothing fails above them."""


def size() -> None:
    """Print files, lines, the share of imports, and the parameters of constructors."""
    files = sorted(PACKAGE.rglob("*.py"))
    lines, imports = _lines(files), 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        imports += sum(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
    code = sum(map(_code_lines, files))
    print(
        f"{len(files)} files, {lines:,} lines that are not blank, {lines / len(files):.0f} per file"
    )
    print(
        f"{code:,} lines of code, {code / len(files):.0f} per file; imports: {imports / code:.1%}"
    )
    for part, folders in PARTS.items():
        of_part = _lines([file for folder in folders for file in (PACKAGE / folder).rglob("*.py")])
        print(f"{part:<8} {of_part:>6,} of {BUDGETS[part]:>6,} lines: {', '.join(folders)}")
    for cls in (Limiter, Concurrency, CircuitBreaker, Guard):
        print(f"{cls.__name__}: {len(inspect.signature(cls).parameters)} parameters")


def _lines(files: list[Path]) -> int:
    """Return the lines that are not blank."""
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def _code_lines(file: Path) -> int:
    """Return the lines that are not blank, not comments, and not docstrings."""
    text = file.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in strings
    )


class Recorder:
    """Records the files of the package in which calls begin, while it is entered."""

    def __init__(self) -> None:
        self._files: list[str] = []

    def __enter__(self) -> Recorder:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            self._files.append(file)

    def counts(self) -> tuple[int, int, int]:
        """Return the calls, their files, and the returns to a file that was already left."""
        left: set[str] = set()
        returns, last = 0, ""
        for file in self._files:
            if file != last:
                left.add(last)
                returns += file in left
            last = file
        return len(self._files), len(set(self._files)), returns


def show(name: str, call: Callable[[], object]) -> None:
    for _ in range(5):
        call()
    counts = []
    for _ in range(5):
        with Recorder() as recorder:
            call()
        counts.append(recorder.counts())
    _print(name, counts)


def _print(name: str, counts: list[tuple[int, int, int]]) -> None:
    calls, files, returns = min(counts)
    print(f"{name:<34} {calls:>4} calls {files:>3} files {returns:>3} returns")


def main() -> None:
    size()
    with running() as server:
        url = server.url
        with (
            Limiter(url, "1000000/second", consistency="leased") as leased,
            Limiter(url, "1000000/second") as direct,
            CircuitBreaker(url, ErrorCount(5)) as breaker,
            Concurrency(url, 10) as slots,
            Guard(url, rules=[FlowRule("shop", 1_000_000)]) as guard,
        ):

            def enter_breaker() -> None:
                with breaker.call("shop"):
                    pass

            def hold() -> None:
                with slots.hold("shop"):
                    pass

            def enter_guard() -> None:
                with guard.entry("shop"):
                    pass

            for _ in range(1000):  # so that permits are leased
                leased.try_acquire("k")
            show("try_acquire, leased, a hit", lambda: leased.try_acquire("k"))
            show("try_acquire, direct", lambda: direct.try_acquire("k"))
            show("acquire, direct, without waiting", lambda: direct.acquire("k"))
            show("CircuitBreaker.call", enter_breaker)
            show("Concurrency.hold", hold)
            show("Guard.entry, one flow rule", enter_guard)

        asyncio.run(_show_async(url))


async def _show_async(url: str) -> None:
    async with AsyncLimiter(url, "1000000/second") as limiter:
        counts = []
        for _ in range(10):
            with Recorder() as recorder:
                await limiter.try_acquire("k")
            counts.append(recorder.counts())
        _print("AsyncLimiter.try_acquire, direct", counts)


if __name__ == "__main__":
    main()
