"""Integrations: middleware and adapters for other libraries, each behind an extra.

otel/   traces with OpenTelemetry (`perdure.otel`)
"""
