"""Agents of the OpenAI Agents SDK as tasks: `await PerdureRunner().run(agent, input)`. Extra `openai-agents`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.openai_agents", "agents", package="openai-agents", extra="openai-agents")

from ..worker.integrations.agent_calls import ToolApproval  # noqa: E402
from ..worker.integrations.openai_agents import PerdureRunner  # noqa: E402
from ..worker.integrations.openai_session import PerdureSession  # noqa: E402

__all__ = ["PerdureRunner", "PerdureSession", "ToolApproval"]
