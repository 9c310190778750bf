"""Puts the tables of a benchmark report into docs/benchmarks.md:

python -m benchmarks --markdown report.md && python docs/make/benchmarks.py report.md
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "benchmarks.md"
BEGIN, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->"


def main() -> None:
    report = Path(sys.argv[1]).read_text(encoding="utf-8").strip()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{report}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
