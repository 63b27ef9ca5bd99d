"""Context windows: what an agent's model function and summarizer need, and the message formats of the providers.

`View` and `Finding` are what a check of coherence gets and returns.
"""

from .worker.agent.coherence import Finding, View
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
    "Finding",
    "Message",
    "Prompt",
    "Question",
    "ToolCall",
    "View",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "to_anthropic",
    "to_openai",
]
