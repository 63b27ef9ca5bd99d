"""What a model is given, rebuilt from what the task knows, and always in a form that its provider takes."""

from .anthropic import from_anthropic, to_anthropic
from .builder import ContextBuilder, Recall, SearchesMemory
from .compaction import OldTurns, Summarizer, compact
from .exchanges import INTERRUPTED
from .layers import Layers, assemble
from .openai import MALFORMED, from_openai, to_openai
from .prompt import Budgets, Prompt
from .tokens import Estimate, Tiktoken, TokenCounter, default_counter, message_tokens

__all__ = [
    "INTERRUPTED",
    "MALFORMED",
    "Budgets",
    "ContextBuilder",
    "Estimate",
    "Layers",
    "OldTurns",
    "Prompt",
    "Recall",
    "SearchesMemory",
    "Summarizer",
    "Tiktoken",
    "TokenCounter",
    "assemble",
    "compact",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "message_tokens",
    "to_anthropic",
    "to_openai",
]
