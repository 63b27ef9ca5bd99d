"""Context of a model: a prompt built from the state of a task, in a form that the model's provider accepts.

| module | content |
|---|---|
| `builder.py` | `ContextBuilder`: asks a model with the context of the running task |
| `layers.py` | assembles the layers of a prompt within their token budgets; pure |
| `task_section.py` | the task layer: goal, plan, decisions, discoveries |
| `compaction.py` | replaces the oldest messages with a summary, once |
| `conversation.py` | exchanges, turns, and results for interrupted tool calls |
| `providers.py` | message formats of Anthropic and OpenAI |
| `prompt.py` | `Prompt` and `Budgets` |
| `tokens.py` | token counters |

A tool call and its results are one exchange. Compaction and budgets drop whole exchanges only, because providers
reject a call without a result and a result without a call.

Only the identity layer has the role `system`. All other text may come from tools, senders or earlier tasks, and is
sent as the user's.
"""

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
