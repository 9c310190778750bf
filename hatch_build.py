"""Puts the Lua scripts into one file of the wheel: one read for 39, and 31 kB less to load. Puts
the files that `distwindow grafana` prints beside its module.

Comments of scripts stay in the checkout, but for the names of pieces, which are read. No script
is another one for it: the loader drops comments as well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMMENT = re.compile(r"^\s*--(?!@).*\n", re.MULTILINE)


class ScriptsInOneFile(BuildHookInterface):  # type: ignore[type-arg]  # of any configuration
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # which has the folder beside the package
            return
        folder = Path(self.root) / "lua"
        texts = {
            path.relative_to(folder).as_posix(): _COMMENT.sub("", path.read_text("utf-8"))
            for path in sorted(folder.rglob("*.lua"))
        }
        self._bundle = Path(self.directory) / "lua.json"
        self._bundle.parent.mkdir(parents=True, exist_ok=True)
        self._bundle.write_text(json.dumps(texts), "utf-8")
        build_data["force_include"][str(self._bundle)] = "distwindow/lua.json"
        build_data["force_include"]["docs/grafana"] = "distwindow/cli/grafana_files"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._bundle.unlink()
