"""Write the generated sections of docs/wire.md: python docs/make/wire.py

The ring's hash is copied from `lua/README.md`; the scripts are made from their heads. Each
section stands between two markers; a test fails when one is stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from distwindow.ring import command as script

PAGE = Path(__file__).resolve().parent.parent / "wire.md"
LUA = PAGE.parent.parent / "lua"


def ring_section() -> str:
    """The section of `lua/README.md` on the ring's hash, without its markers."""
    readme = (LUA / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^<!-- ring: .*-->\n(.*?)^<!-- /ring -->$", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("lua/README.md has lost its markers <!-- ring: ... --> and <!-- /ring -->")
    return found[1]


def scripts_section() -> str:
    """A description of each script from its head."""
    parts = []
    for name in script.script_names():
        source = (LUA / f"{name}.lua").read_text(encoding="utf-8")
        head = [line[4:] for line in source.splitlines() if line.startswith("--- ")]
        purpose = head[0].partition(": ")[2]
        pieces = re.findall(r"^--@include (\w+/\w+)\.lua$", source, re.MULTILINE)
        lines = "\n".join(line.rstrip() for line in head[1:])
        parts.append(
            f"### {name}\n\n{purpose[0].upper()}{purpose[1:]}\n\n```text\n{lines}\n```\n\n"
            f"Pieces: {', '.join(f'`{piece}`' for piece in pieces)}.\n"
        )
    return "\n" + "\n".join(parts) + "\n"


def renewed(page: str) -> str:
    """`page` with its generated sections as they should be."""
    for name, section in (("ring", ring_section()), ("scripts", scripts_section())):
        before, rest = page.split(f"<!-- {name} -->\n")
        page = (
            f"{before}<!-- {name} -->\n{section}<!-- /{name} -->"
            + rest.split(f"<!-- /{name} -->")[1]
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
