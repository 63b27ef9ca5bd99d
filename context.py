"""Context windows: what an agent's model function and summarizer need, and the message formats of the providers."""

from .worker.agent.context import (
    MALFORMED,
    Budgets,
    CompactionRequest,
    ContextBuilder,
    Prompt,
    default_counter,
    from_anthropic,
    from_openai,
    to_anthropic,
    to_openai,
)
from .worker.agent.tools import AgentTools
from .worker.errors import CompactionFailed, ContextError, ContextTooLarge
from .worker.journal import Commitment, Message, Question, ToolCall

__all__ = [
    "MALFORMED",
    "AgentTools",
    "Budgets",
    "Commitment",
    "CompactionFailed",
    "CompactionRequest",
    "ContextBuilder",
    "ContextError",
    "ContextTooLarge",
    "Message",
    "Prompt",
    "Question",
    "ToolCall",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "to_anthropic",
    "to_openai",
]
