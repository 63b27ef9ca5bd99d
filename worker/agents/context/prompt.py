"""A prompt: provider-neutral messages with their token counts."""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic_core import to_json

from ....queues.regular_files import read_regular
from ...durable.journal.chat import Message
from ...durable.journal.handoff.budget import estimated_tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    """Shares of the window that layers may take. The turns take the rest.

    Attributes:
        identity: identity and rules. Exceeding it is an error, because nothing of them is left out.
        memory: profile and the memories for the goal; the excess is left out.
        pinned: what the user said, word for word, when older messages are left out or summarized: the first
            instructions, the excess of which is cut, then the latest messages.
        brief: the excess is left out, and counted; the first line and what is waited for always stay.
        inbox: the excess is left out.
        reserve: for the answer and the descriptions of tools.
        summary: for the summary of a compaction.
    """

    identity: float = 0.10
    memory: float = 0.10
    pinned: float = 0.05
    brief: float = 0.15
    inbox: float = 0.10
    reserve: float = 0.15
    summary: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.identity, self.memory, self.pinned, self.brief, self.inbox, self.reserve)
        if min(*shares, self.summary) < 0 or sum(shares) >= 1:
            raise ValueError(f"budgets must be shares of the window, 0 or more and together less than 1, got {self}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The context of a call of a model.

    Attributes:
        stable: how many messages at the start are the same in every prompt of the task.
        cacheable: how many messages at the start are the same in the next prompt, unless turns are left out or
            summarized for it: all but the brief and the inbox.
        tokens: tokens by layer (identity, memory, goal, turns, brief, inbox).
        left_out: number of items that did not fit, by kind (memories, turns, inbox, decisions and so on).
        wanted: the tokens that the prompt would have with all turns and inbox messages.
    """

    messages: tuple[Message, ...]
    cacheable: int = 0
    stable: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    wanted: int = 0

    @property
    def total(self) -> int:
        """Return the tokens of all layers."""
        return sum(self.tokens.values())

    @property
    def cache_key(self) -> str:
        """Return a name for the stable part, the same for all prompts that start with it.

        OpenAI takes it as `prompt_cache_key`, which sends requests with the same key to the same cache.
        """
        text = "\0".join(one.content for one in self.messages[: self.stable])
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


PER_MESSAGE: Final = 4
"""Tokens of a message besides its texts: its role and delimiters."""


class TokenCounter(Protocol):
    """Protocol of token counters."""

    def count(self, text: str) -> int: ...


class Estimate:
    """`estimated_tokens` as a `TokenCounter`."""

    count = staticmethod(estimated_tokens)


_VOCABULARY_BYTES: Final = 1 << 24
"""Largest file of a vocabulary. The folder is often one that all users can write into."""

_VOCABULARIES: Final = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}
"""SHA-256 of tiktoken's vocabulary files, from its module `tiktoken_ext/openai_public.py`."""


class Tiktoken:
    """A counter that uses OpenAI's tokenizer. It never downloads: the vocabulary must be in tiktoken's cache.

    Raises `LookupError` if tiktoken is not installed or the vocabulary is not in its cache.
    """

    def __init__(self, encoding: str = "o200k_base") -> None:
        path = _cached(encoding)
        if path is None:
            raise LookupError(f"the vocabulary {encoding!r} is not in tiktoken's cache (TIKTOKEN_CACHE_DIR)")
        try:
            tiktoken = importlib.import_module("tiktoken")
        except ImportError:
            raise LookupError("tiktoken is not installed") from None
        self._encoding: Any = tiktoken.get_encoding(encoding)

    def count(self, text: str) -> int:
        return len(self._encoding.encode_ordinary(text))


def _cached(encoding: str) -> Path | None:
    """Return tiktoken's cached file of a vocabulary if it is intact; tiktoken would download any other."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    folder = str(Path(tempfile.gettempdir()) / "data-gym-cache") if folder is None else folder
    if not folder or encoding not in _VOCABULARIES:
        return None
    source = f"https://openaipublic.blob.core.windows.net/encodings/{encoding}.tiktoken"
    path = Path(folder) / hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    try:
        intact = hashlib.sha256(read_regular(path, _VOCABULARY_BYTES)).hexdigest() == _VOCABULARIES[encoding]
    except OSError:
        return None
    return path if intact else None


@lru_cache(maxsize=8)
def default_counter(encoding: str = "o200k_base") -> TokenCounter:
    """Return a tiktoken counter if tiktoken and its vocabulary are installed, else the estimate."""
    try:
        return Tiktoken(encoding)
    except LookupError:
        return Estimate()


def message_tokens(message: Message, counter: TokenCounter) -> int:
    """Return the tokens of a message: texts, delimiters, and the names and JSON arguments of its tool calls."""
    tokens = PER_MESSAGE + counter.count(message.content)
    for block in message.reasoning:
        tokens += sum(counter.count(text) for text in block.values() if isinstance(text, str))
    for call in message.tool_calls:
        tokens += PER_MESSAGE + counter.count(call.name) + counter.count(arguments_json(call.arguments))
    return tokens


def arguments_json(arguments: dict[str, Any]) -> str:
    """Return the arguments of a tool call as JSON."""
    return to_json(arguments, inf_nan_mode="null", fallback=str).decode()


def cut(text: str, room: int, counter: TokenCounter) -> str:
    """Return a text, cut to its start with a note of the rest if it takes more than `room` tokens."""
    tokens = counter.count(text)
    keep = len(text) * max(0, room - _NOTE) // max(tokens, 1)
    while tokens > room:
        short = f"{text[:keep]}\n[{len(text) - keep} more characters]"
        if counter.count(short) <= room or not keep:
            return short
        keep = keep * 3 // 4
    return text


_NOTE: Final = 12
"""About the tokens of the note in a text that is cut."""
