"""An MCP server as a program: python -m tests.agents.mcp_server REDIS_URL PREFIX [PORT]

It speaks over stdio, or HTTP at a port, and knows its clients by a header field.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from distwindow.contrib.fastmcp import RateLimits


def client_id(context: object) -> str | None:
    headers: dict[str, str] = import_module("fastmcp.server.dependencies").get_http_headers()
    return headers.get("x-client")


def server(rate_limits: RateLimits, *middlewares: Any) -> Any:
    mcp = import_module("fastmcp").FastMCP("weather")
    for middleware in middlewares:
        mcp.add_middleware(middleware)

    def search(city: str) -> str:
        return f"sunny in {city}"

    def forecast() -> str:
        return "sunny"

    def alerts() -> str:
        return "none"

    def about() -> str:
        return "the weather"

    for tool in (search, forecast, alerts):
        mcp.tool(tool)
    mcp.resource("data://about")(about)
    return mcp


def main(url: str, prefix: str, port: str = "") -> None:
    rate_limits = RateLimits(url, on_store_error="raise", prefix=prefix, timeout=10.0)
    mcp = server(
        rate_limits,
        rate_limits.tools({"search": "2/hour", "*": "3/hour"}, key=client_id),
        rate_limits.middleware(
            "1/hour", key=client_id, exempt=lambda context: context.method != "resources/read"
        ),
    )
    if port:
        mcp.run(transport="streamable-http", host="127.0.0.1", port=int(port))
    else:
        mcp.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
