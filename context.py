"""Context windows: what an agent's model function and summarizer need, and the message formats of the providers.

`View` and `Finding` are what a check of coherence gets and returns.
"""

from .worker.agents.coherence.checks import View
from .worker.agents.coherence.findings import Finding
from .worker.agents.context.builder import ContextBuilder
from .worker.agents.context.compaction import CompactionRequest
from .worker.agents.context.prompt import Budgets, Prompt, default_counter
from .worker.agents.context.providers import MALFORMED, from_anthropic, from_openai, to_anthropic, to_openai
from .worker.agents.journal.state import Commitment, Question
from .worker.agents.tools.toolbox import AgentTools
from .worker.durable.journal.chat import Message, ToolCall
from .worker.errors import ContextError, ContextTooLarge

__all__ = [
    "MALFORMED",
    "AgentTools",
    "Budgets",
    "Commitment",
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
