"""What a model is given, rebuilt from what the task knows, and always in a form that its provider takes."""

from .builder import ContextBuilder
from .compaction import CompactionRequest
from .conversation import INTERRUPTED
from .layers import Layers, assemble
from .prompt import Budgets, Prompt
from .providers import MALFORMED, from_anthropic, from_openai, to_anthropic, to_openai
from .tokens import Estimate, Tiktoken, default_counter

__all__ = [
    "INTERRUPTED",
    "MALFORMED",
    "Budgets",
    "CompactionRequest",
    "ContextBuilder",
    "Estimate",
    "Layers",
    "Prompt",
    "Tiktoken",
    "assemble",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "to_anthropic",
    "to_openai",
]
