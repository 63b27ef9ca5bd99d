"""Adapter for the Claude Agent SDK: a store for its sessions. It needs the extra `claude-agent-sdk`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.claude_agent_sdk", "claude_agent_sdk", extra="claude-agent-sdk")

from ..worker.integrations.claude_agent_sdk import PerdureSessionStore  # noqa: E402 - after the check

__all__ = ["PerdureSessionStore"]
