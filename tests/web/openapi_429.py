"""The routes of an OpenAPI schema that document 429, and what is missing there.

curl -s localhost:8000/openapi.json | python -m tests.web.openapi_429
"""

from __future__ import annotations

import json
import sys
from typing import Any


def limited_operations(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the documented refusal of each operation that has one."""
    return {
        f"{method.upper()} {path}": operation["responses"]["429"]
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        if "429" in operation["responses"]
    }


def faults(refusal: dict[str, Any]) -> list[str]:
    """Return what is missing in a documented refusal."""
    fields = {"RateLimit-Policy", "RateLimit", "Retry-After"}
    missing = sorted(fields - set(refusal.get("headers", {})))
    if "application/problem+json" not in refusal.get("content", {}):
        missing.append("application/problem+json")
    return missing


if __name__ == "__main__":
    found = limited_operations(json.load(sys.stdin))
    for name, refusal in found.items():
        print(name, "" if not faults(refusal) else f"lacks {', '.join(faults(refusal))}")
    sys.exit(any(map(faults, found.values())) or not found)
