"""Agents of Pydantic AI as durable tasks: `Agent(..., capabilities=[PerdureDurability()])`. Extra `pydantic-ai`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.pydantic_ai", "pydantic_ai", package="pydantic-ai-slim", extra="pydantic-ai")

from ..worker.integrations.agent_calls import ToolDecision  # noqa: E402
from ..worker.integrations.pydantic_ai import PerdureDurability  # noqa: E402

__all__ = ["PerdureDurability", "ToolDecision"]
