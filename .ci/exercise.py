"""Use the installed package as a stranger would: `exercise.py FOLDER bare|cli`, from that folder.

DISTWINDOW_URL names a running server. Imports the stdlib and distwindow: nothing else is there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

folder, extra = sys.argv[1:]
# The checkout must not be what is imported: its tree has the scripts in another place.
os.chdir(folder)

import distwindow  # noqa: E402

URL = os.environ["DISTWINDOW_URL"]
PACKAGE = Path(distwindow.__file__).parent
COMMAND = Path(sys.executable).parent / "distwindow"


def check(what: str, holds: bool) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}")
    print(f"ok: {what}")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


check("imported from site-packages", "site-packages" in PACKAGE.parts)
check("scripts are inside the wheel", any((PACKAGE / "_lua").rglob("*.lua")))
check("typed", (PACKAGE / "py.typed").exists())

for url in ("memory://", URL):
    with distwindow.Limiter(url, "2/hour", prefix=f"exercise-{extra}") as limiter:
        verdicts = [bool(limiter.try_acquire("key")) for _ in range(3)]
    check(f"two of three admitted on {url.partition(':')[0]}", verdicts == [True, True, False])


async def on_a_loop() -> list[bool]:
    async with distwindow.AsyncLimiter(URL, "2/hour", prefix=f"exercise-async-{extra}") as limiter:
        return [bool(await limiter.try_acquire("key")) for _ in range(3)]


check("the same on an event loop", asyncio.run(on_a_loop()) == [True, True, False])

said = run("--help")
if extra == "bare":
    hint = said.stderr.strip()
    check("without the extra: one line", len(hint.splitlines()) == 1 and said.returncode != 0)
    check("that names the extra", "distwindow[cli]" in hint)
else:
    check("help", said.returncode == 0 and "doctor" in said.stdout)
    tries = [run("try", "key", "--limit", "1/hour").returncode for _ in range(2)]
    check("try admits once, then refuses", tries == [0, 1])
