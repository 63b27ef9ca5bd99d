"""Integrations: middleware and adapters for other libraries, each behind an extra.

mcp/    tasks as tools of an MCP server, and tools of MCP servers as steps (`perdure.integrations.mcp`)
otel/   traces with OpenTelemetry (`perdure.otel`)
"""
