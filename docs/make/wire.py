"""Prints the heads of `lua/*.lua` into docs/wire.md: python docs/make/wire.py

Its generated section stands between two markers; a test fails when it is stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from distwindow.protocol import scripts as script

PAGE = Path(__file__).resolve().parent.parent / "wire.md"
BEGIN, END = "<!-- scripts -->\n", "<!-- /scripts -->"


def section() -> str:
    """The generated section, without its markers."""
    parts = []
    for name in script.script_names():
        head = script.load_script(name).head
        purpose = head[0].partition(": ")[2]
        source = (script.scripts_folder() / f"{name}.lua").read_text(encoding="utf-8")
        pieces = re.findall(r"^--@include shared/(\w+)\.lua$", source, re.MULTILINE)
        lines = "\n".join(line.rstrip() for line in head[1:])
        parts.append(
            f"### {name}\n\n{purpose[0].upper()}{purpose[1:]}\n\n```text\n{lines}\n```\n\n"
            f"Pieces: {', '.join(f'`{piece}`' for piece in pieces)}.\n"
        )
    return "\n" + "\n".join(parts) + "\n"


def renewed(page: str) -> str:
    """`page` with its generated section as it should be."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + section() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
