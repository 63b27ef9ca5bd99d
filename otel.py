"""Traces of tasks with OpenTelemetry: `App(middleware=[Tracing()])`. It needs the extra `otel`."""

from importlib.util import find_spec

from .queues.errors import ConfigurationError

if find_spec("opentelemetry") is None:
    raise ConfigurationError("perdure.otel needs the package opentelemetry-api: pip install 'perdure[otel]'")

from .worker.integrations.otel.tracing import Tracing

__all__ = ["Tracing"]
