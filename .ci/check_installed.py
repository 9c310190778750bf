"""Checks the installed package as a user has it: `check_installed.py FOLDER bare|cli`.

FOLDER is outside of the checkout. DISTWINDOW_URL names a running server. The
environment has only the standard library and distwindow.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

folder, extra = sys.argv[1:]
# Leave the checkout, so that the installed package is imported: it has the scripts elsewhere.
os.chdir(folder)

import distwindow  # noqa: E402 - after os.chdir

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
check("scripts are inside the wheel", (PACKAGE / "lua.json").is_file())
check("py.typed is inside the wheel", (PACKAGE / "py.typed").exists())

for url in ("memory://", URL):
    with distwindow.Limiter(url, "2/hour", prefix=f"check-{extra}") as limiter:
        decisions = [bool(limiter.try_acquire("key")) for _ in range(3)]
    check(f"two of three admitted on {url.partition(':')[0]}", decisions == [True, True, False])


async def decisions_on_a_loop() -> list[bool]:
    async with distwindow.AsyncLimiter(URL, "2/hour", prefix=f"check-async-{extra}") as limiter:
        return [bool(await limiter.try_acquire("key")) for _ in range(3)]


check("the same on an event loop", asyncio.run(decisions_on_a_loop()) == [True, True, False])

done = run("--help")
if extra == "bare":
    hint = done.stderr.strip()
    check("without the extra: one line", len(hint.splitlines()) == 1 and done.returncode != 0)
    check("the line names the extra", "distwindow[cli]" in hint)
else:
    check("help prints the commands", done.returncode == 0 and "doctor" in done.stdout)
    codes = [run("try", "key", "--limit", "1/hour").returncode for _ in range(2)]
    check("try admits once, then refuses", codes == [0, 1])
    printed = [run("grafana").stdout, run("grafana", "--alerts").stdout]
    check("grafana prints its files", '"panels"' in printed[0] and "alert:" in printed[1])
