"""Embedder of the extra `embeddings`, which needs no network."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from perdure.queues.errors import ConfigurationError
from perdure.worker.memory import HybridStore, embedders, new_memory
from perdure.worker.memory.embedders import load_embedder

from tests.support.memory_stores import Stores

PAIRS = Path(__file__).parent / "pairs"
WANTS, WANTS_NOT = "The customer does want EU data", "The customer does not want EU data"


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def test_related_texts_are_nearer_than_unrelated_ones() -> None:
    embedder = load_embedder("wordllama")
    vectors = embedder.embed(["which SQL server do we use?", "The database is PostgreSQL", "She plays the violin", ""])
    assert isinstance(vectors, list)
    query, near, far, empty = vectors
    assert [len(vector) for vector in vectors] == [embedder.dimension] * 4
    assert cosine(query, near) > 0.3
    assert cosine(query, far) < 0.15
    assert not any(empty)


def test_the_model_is_read_from_the_files_of_the_wheel() -> None:
    """The package is not imported: it would configure the logging of the process, and could download a tokenizer."""
    code = (
        "import socket, sys; socket.socket.connect = None\n"
        "from perdure.worker.memory.embedders import load_embedder\n"
        "assert len(load_embedder('wordllama').embed(['x'])[0]) == 256\n"
        "print([name for name in ('wordllama', 'requests', 'huggingface_hub') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedders, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'perdure\[embeddings\]'"):
        load_embedder("wordllama")


async def test_statements_with_a_negation_are_linked_by_a_real_model(stores: Stores) -> None:
    embedder = load_embedder("wordllama")
    [one, other] = list(embedder.embed([WANTS, WANTS_NOT]))  # type: ignore[arg-type]  # it is not async
    assert cosine(list(one), list(other)) > 0.92
    store: HybridStore
    async with stores(embedder) as store:
        for text in (WANTS, WANTS_NOT):
            stores.clock.now += 5
            await store.add(new_memory(text))
        [found] = await store.search("is EU data wanted?")
        assert found.memory.text == WANTS_NOT
        assert [(note.relation, note.text) for note in found.related] == [("conflicts", WANTS)]


async def test_two_thirds_of_the_labelled_opposites_are_linked_by_a_real_model(stores: Stores) -> None:
    """docs/how-to/memory.md has these numbers. Each pair is in a profile of its own."""
    lines = [line for file in sorted(PAIRS.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split(" | ") for line in lines if not line.startswith("#")]
    linked = Counter[str]()
    store: HybridStore
    async with stores(load_embedder("wordllama")) as store:
        for number, (label, *texts) in enumerate(pairs):
            _, newer = [await store.add(new_memory(text, subject=f"pair {number}")) for text in texts]
            linked[label] += any(link.relation == "conflicts" for link in newer.links)
    assert Counter(label for label, *_ in pairs)["opposite"] == 59
    assert len(pairs) == 59 + 72
    assert +linked == Counter(opposite=37)
