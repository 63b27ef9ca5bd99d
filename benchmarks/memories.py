"""`python -m benchmarks.memories`: milliseconds of a search and an addition among many memories on SQLite."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from perdure.worker.memory.embedders import HashingEmbedder
from perdure.worker.memory.hybrid import HybridStore
from perdure.worker.memory.memory import Memory, NewMemory
from perdure.worker.memory.sqlite import SqliteBackend
from uuid_utils import uuid7

from .support.machine import origin_line, run
from .support.origin import ROOT

__all__ = ["measure"]

DIMENSION: Final = 384
_WORDS: Final = 2_000
"""Size of the vocabulary of the memories."""

_LENGTH: Final = 12
"""Words of a memory."""


async def measure(folder: Path, count: int, samples: int, *, vectors: bool) -> tuple[float, float]:
    """Return the median milliseconds of a search and of an addition among `count` memories of one owner and type."""
    made = random.Random(1)

    def text() -> str:
        return " ".join(f"word{made.randrange(_WORDS)}" for _ in range(_LENGTH))

    def stored() -> Memory:
        now = time.time()
        return Memory(id=str(uuid7()), text=text(), owner="bench", created=now, accessed=now, updated=now)

    embedder = HashingEmbedder(DIMENSION) if vectors else None
    async with HybridStore(SqliteBackend(folder / f"{count}-{vectors}.sqlite3"), embedder) as store:
        await store.restore([stored() for _ in range(count)])

        async def search() -> None:
            await store.search(" ".join(text().split()[:3]), owner="bench")

        async def add() -> None:
            await store.add(NewMemory(text=text()), owner="bench")

        return await _milliseconds(search, samples), await _milliseconds(add, samples)


async def _milliseconds(act: Callable[[], Awaitable[None]], samples: int) -> float:
    await act()
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        await act()
        found.append((time.perf_counter() - began) * 1_000)
    return median(found)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
) -> None:
    """Print the median time of a search and of an addition, with vectors and with words only."""
    print(origin_line())
    data = ROOT / ".perdure"
    data.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=data) as folder:
        for count in (200, 400) if quick else (10_000, 100_000):
            for vectors in (True, False):
                search, add = run(measure(Path(folder), count, 5 if quick else 30, vectors=vectors))
                what = "with vectors" if vectors else "words only"
                print(f"{count:,} memories, {what}: search {search:.1f} ms, add {add:.1f} ms", flush=True)


if __name__ == "__main__":
    typer.run(main)
