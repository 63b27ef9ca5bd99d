"""Tasks as tools of an MCP server, and tools of MCP servers as steps. It needs the extra `mcp`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.mcp", "mcp", extra="mcp")

from ..worker.integrations.mcp.mcp_transports import http_application, serve_stdio  # noqa: E402 - after the check
from ..worker.integrations.mcp.remote_tools import (  # noqa: E402
    RemoteResult,
    RemoteToolError,
    RemoteTools,
    mcp_tools,
)
from ..worker.integrations.mcp.tool_list import ToolOptions, ToolSelection  # noqa: E402
from ..worker.integrations.mcp.tool_results import ToolResult  # noqa: E402
from ..worker.integrations.mcp.tool_server import ToolServerOptions  # noqa: E402

__all__ = [
    "RemoteResult",
    "RemoteToolError",
    "RemoteTools",
    "ToolOptions",
    "ToolResult",
    "ToolSelection",
    "ToolServerOptions",
    "http_application",
    "mcp_tools",
    "serve_stdio",
]
