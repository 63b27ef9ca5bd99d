"""What a model is given, rebuilt from what the task knows, and always in a form that its provider takes."""

from .anthropic import from_anthropic, to_anthropic
from .builder import ContextBuilder
from .compaction import OldTurns
from .exchanges import INTERRUPTED
from .layers import Layers, assemble
from .openai import MALFORMED, from_openai, to_openai
from .prompt import Budgets, Prompt
from .tokens import Estimate, Tiktoken, default_counter

__all__ = [
    "INTERRUPTED",
    "MALFORMED",
    "Budgets",
    "ContextBuilder",
    "Estimate",
    "Layers",
    "OldTurns",
    "Prompt",
    "Tiktoken",
    "assemble",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "to_anthropic",
    "to_openai",
]
