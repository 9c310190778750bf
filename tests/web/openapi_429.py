"""The routes of an OpenAPI schema that document 429, and what is missing there."""

from __future__ import annotations

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
