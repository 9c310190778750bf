"""Checks what was built: `check_package.py FOLDER`, which has one wheel.

It needs readme-renderer, by which PyPI makes the page of a package out of its long description.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from readme_renderer import markdown

from distwindow.ring import command
from tests.docs.package import broken, long_description

MAX_BYTES = 740 * 1024

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(archive.read(metadata_name))
    lua_files = json.loads(archive.read("distwindow/lua.json"))
version = metadata["Version"]
description = metadata.get_payload(decode=True).decode()
page = markdown.render(description)
links = re.findall(r'\b(?:href|src)="([^"]*)"', page or "")
# Headings link to themselves.
broken_links = broken([link for link in links if not link.startswith("#user-content-")], version)
size = wheel.stat().st_size


def scripts_of(texts: dict[str, str]) -> list[command.Script]:
    """Return the scripts that these files make."""
    command.load_script.cache_clear()
    command.lua_files = lambda: texts  # type: ignore[assignment]  # in place of the cached one
    return [command.load_script(name) for name in command.script_names()]


def check(what: str, holds: bool) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}")
    print(f"ok: {what}")


check(f"the wheel has {size:,} of at most {MAX_BYTES:,} bytes", size <= MAX_BYTES)
check(
    "it is pure Python",
    wheel.name.endswith("-py3-none-any.whl")
    and not [name for name in names if name.endswith((".so", ".pyd", ".dylib"))],
)
check(
    "its scripts are those of the checkout",
    scripts_of(command.lua_files()) == scripts_of(lua_files),
)
check(
    "its page is README.md with links to the tag",
    description.strip() == long_description(version).strip(),
)
check(f"{len(links)} links of its page lead somewhere: {broken_links}", links and not broken_links)
