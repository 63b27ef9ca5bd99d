"""No test exports a trace to the vendor."""

from __future__ import annotations

from agents import set_tracing_disabled

set_tracing_disabled(True)
