"""Token counters: tiktoken with a cached vocabulary, else the estimate; nothing is downloaded."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from perdure.worker.agents.context import prompt
from perdure.worker.agents.context.prompt import Estimate, Tiktoken, default_counter
from perdure.worker.durable.journal.handoff.budget import estimated_tokens

SOURCE = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path of the vocabulary in tiktoken's cache, and install a tiktoken that counts words."""
    encoding = SimpleNamespace(encode_ordinary=str.split)
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda name: encoding))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(prompt._VOCABULARIES, "o200k_base", hashlib.sha256(b"vocabulary").hexdigest())
    default_counter.cache_clear()
    yield tmp_path / hashlib.sha1(SOURCE.encode()).hexdigest()
    default_counter.cache_clear()


def test_with_its_vocabulary_tiktoken_counts(cache: Path) -> None:
    cache.write_bytes(b"vocabulary")
    assert default_counter().count("one two three") == 3


def test_without_a_vocabulary_the_estimate_is_used(cache: Path) -> None:
    assert isinstance(default_counter(), Estimate)
    with pytest.raises(LookupError, match="TIKTOKEN_CACHE_DIR"):
        Tiktoken()


def test_a_damaged_vocabulary_is_not_used(cache: Path) -> None:
    cache.write_bytes(b"vocab")
    assert isinstance(default_counter(), Estimate)
    assert cache.read_bytes() == b"vocab"


def test_without_tiktoken_the_estimate_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_bytes(b"vocabulary")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert isinstance(default_counter(), Estimate)
    with pytest.raises(LookupError, match="not installed"):
        Tiktoken()


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("abcd", 1), ("abcde", 2), ("日本", 2), ("ab日", 2)])
def test_the_estimate_counts_four_ascii_or_one_other_character_per_token(text: str, tokens: int) -> None:
    assert estimated_tokens(text) == Estimate().count(text) == tokens
