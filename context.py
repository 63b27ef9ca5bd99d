"""Context windows: what an agent's model function and summarizer need, and the message formats of the providers.

`View` and `Finding` are what a check of coherence gets and returns.
"""

from .worker.agent.coherence.checks import View
from .worker.agent.coherence.findings import Finding
from .worker.agent.context.builder import ContextBuilder
from .worker.agent.context.compaction import CompactionRequest
from .worker.agent.context.prompt import Budgets, Prompt, default_counter
from .worker.agent.context.providers import MALFORMED, from_anthropic, from_openai, to_anthropic, to_openai
from .worker.agent.tools.toolbox import AgentTools
from .worker.errors import ContextError, ContextTooLarge
from .worker.journal.chat import Message, ToolCall
from .worker.journal.state import Commitment, Question

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
