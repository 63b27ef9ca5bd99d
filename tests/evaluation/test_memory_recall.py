"""Recall and precision of memory search on two labelled sets, in memory_sets/.

The floor of the embedder and the cut below the best result were chosen with the tuning set only. The held-out set shows
what they achieve elsewhere; nothing may be adjusted to it. Each has 63 memories of six domains, about 45 queries with
relevant memories, many of them in other words or another language, and 24 that nothing is relevant to, half of which
share words with the memories.

All figures are over the first five results. Precision is the mean over all queries of the share of results that are
relevant: it is 1 for a query that rightly returns nothing, and 0 for one that returns anything else.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from perdure.worker.memory import Embedder, HashingEmbedder, HybridStore, SqliteBackend, new_memory
from perdure.worker.memory.embedders import WordLlamaEmbedder
from perdure.worker.memory.hybrid import calibrated_floor

pytestmark = pytest.mark.evaluation

SETS: Final = Path(__file__).parent / "memory_sets"
FIRST: Final = 5


@dataclass(frozen=True)
class Labelled:
    """Labelled set.

    Attributes:
        memories: Texts by their labels.
        queries: Queries, each with the labels of the relevant memories.
    """

    memories: dict[str, str]
    queries: list[tuple[frozenset[str], str]]

    @classmethod
    def read(cls, name: str) -> Labelled:
        sections: dict[str, list[tuple[str, str]]] = {}
        section: list[tuple[str, str]] = []
        for line in (SETS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = sections.setdefault(line.strip("[]"), [])
            elif line and not line.startswith("#"):
                label, _, text = line.partition(" ")
                section.append((label, text.strip()))
        queries = [(frozenset(label.split(",")) - {"-"}, text) for label, text in sections["queries"]]
        memories = dict(sections["memories"])
        assert len(memories) == len(sections["memories"]) == 63
        assert all(labels <= memories.keys() for labels, _ in queries)
        return cls(memories, queries)

    @property
    def unrelated(self) -> int:
        return sum(not labels for labels, _ in self.queries)


@dataclass
class Figures:
    recall: float = 0.0
    precision: float = 0.0
    nothing: int = 0


async def evaluate(labelled: Labelled, folder: Path, embedder: Embedder | None, floor: float | None = None) -> Figures:
    figures = Figures()
    async with HybridStore(SqliteBackend(folder / f"{time.monotonic_ns()}.sqlite3"), embedder) as store:
        names = {(await store.add(new_memory(text))).id: name for name, text in labelled.memories.items()}
        assert await store.count() == len(labelled.memories)
        for wanted, query in labelled.queries:
            found = [names[one.memory.id] for one in await store.search(query, limit=FIRST, floor=floor)]
            hits = len(wanted.intersection(found))
            figures.recall += hits / len(wanted) if wanted else 0.0
            figures.precision += hits / len(found) if found else float(not wanted)
            figures.nothing += not wanted and not found
    figures.recall /= len(labelled.queries) - labelled.unrelated
    figures.precision /= len(labelled.queries)
    return figures


def speed(embedder: Embedder) -> float:
    """Return texts per second."""
    texts = list(Labelled.read("tuning").memories.values()) * 5
    started = time.perf_counter()
    embedder.embed(texts)
    return len(texts) / (time.perf_counter() - started)


def row(label: str, one: Figures, unrelated: int) -> str:
    return f"{label:<22}{one.recall:>9.2f}{one.precision:>10.2f}{one.nothing:>12}/{unrelated}"


@pytest.mark.parametrize("name", ["tuning", "held_out"])
def test_recall_and_precision_of_memory_search(tmp_path: Path, name: str) -> None:
    labelled = Labelled.read(name)
    size = f"{len(labelled.queries) - labelled.unrelated} queries, {labelled.unrelated} unrelated ones"
    print(f"\n{name}: {len(labelled.memories)} memories, {size}")
    print(f"{'search':<22}{'recall@5':>9}{'precision':>10}{'nothing found':>15}")
    found: dict[str, Figures] = {}
    for label, embedder in {"words": None, "hashing": HashingEmbedder(), "wordllama": WordLlamaEmbedder()}.items():
        one = found[label] = asyncio.run(evaluate(labelled, tmp_path, embedder))
        print(row(label, one, labelled.unrelated), "" if embedder is None else f"  {speed(embedder):.0f} texts/s")
    for floor in (0.0, 0.1, 0.15, 0.2, 0.24, 0.3, 0.35, 0.4):
        one = asyncio.run(evaluate(labelled, tmp_path, WordLlamaEmbedder(), floor))
        print(row(f"wordllama, floor {floor:.2f}", one, labelled.unrelated))

    class Unknown:
        """Embedder without a floor of its own."""

        name, dimension = "unknown", 256
        embed = staticmethod(WordLlamaEmbedder().embed)

    print(f"calibrated without it: {asyncio.run(calibrated_floor(Unknown())):.3f}")
    words, meaning = found["words"], found["wordllama"]
    assert meaning.recall > words.recall + 0.1
    assert meaning.precision > words.precision + 0.2
    assert meaning.precision > 0.6
    assert meaning.nothing >= 17
