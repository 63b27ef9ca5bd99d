"""Integrations: middleware and adapters for other libraries, each behind an extra.

django/  a backend for django.tasks, and an outbox (`perdure.integrations.django`)
mcp/     tasks as tools of an MCP server, and tools of MCP servers as steps (`perdure.integrations.mcp`)
otel/    traces with OpenTelemetry (`perdure.otel`)
"""
