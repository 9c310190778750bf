"""Compiled modules are kept while tests run, whatever the environment says.

Tests start hundreds of programs. With PYTHONDONTWRITEBYTECODE, which images of containers set, each
of them would compile the package anew, which takes longer than most of these programs run.
"""

from __future__ import annotations

import os
import sys


def keep() -> None:
    """Have this process and the programs that tests start write compiled modules, and read them."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
